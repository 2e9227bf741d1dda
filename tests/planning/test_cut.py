"""Where a model is cut into units."""

import re

import pytest
import torch
from plan_models import tokens, transformer
from support import DEVICE
from torch import nn
from zoo import MLPBlock

import fusedckpt
from fusedckpt import plan
from fusedckpt.planning.units import candidates


def linears(count, dim=8):
    return [nn.Linear(dim, dim) for _ in range(count)]


class CallsChildren(nn.Module):
    """Calls what is in its attributes, lists and dicts, in order."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        for part in self.children():
            x = run(part, x)
        return x


def run(part, x):
    if isinstance(part, nn.ModuleDict):
        part = part.values()
    if isinstance(part, nn.Module) and not isinstance(part, nn.ModuleList):
        return part(x)
    for inner in part:
        x = run(inner, x)
    return x


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def body(prefix, count):
    return [f"{prefix}.{i}" for i in range(count)]


def convolutions():
    return {f"conv{i}": nn.Conv1d(8, 8, 1) for i in range(8)}


CUTS = {
    "torchtitan": (
        CallsChildren(
            embed=nn.Linear(8, 8),
            layers=nn.ModuleDict({str(i): CallsChildren(a=nn.Linear(8, 8)) for i in range(3)}),
            norm=nn.LayerNorm(8),
        ),
        body("layers", 3),
    ),
    "lists in a list": (
        CallsChildren(stages=nn.ModuleList(nn.ModuleList(linears(2)) for _ in range(2))),
        [f"stages.{i}.{j}" for i in range(2) for j in range(2)],
    ),
    "Sequentials of modules in a Sequential": (
        nn.Sequential(
            *(nn.Sequential(CallsChildren(a=block()), CallsChildren(a=block())) for _ in range(3))
        ),
        [f"{i}.{j}" for i in range(3) for j in range(2)],
    ),
    "blocks of layers": (nn.Sequential(*(block() for _ in range(3))), body("", 3)),
    "blocks with one of layers inside": (
        nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), block(), nn.Tanh()) for _ in range(3))),
        body("", 3),
    ),
    "two long Sequentials": (
        nn.Sequential(nn.Sequential(*linears(4)), nn.Sequential(*linears(3))),
        [*body("0", 4), *body("1", 3)],
    ),
    "a head and a body": (
        CallsChildren(
            layers=nn.ModuleList(CallsChildren(a=nn.Linear(8, 8)) for _ in range(12)), head=block()
        ),
        [*body("layers", 12), *body("head", 2)],
    ),
    "a head and a body of attributes": (
        CallsChildren(**convolutions(), head=nn.Sequential(*linears(2))),
        [*convolutions(), *body("head", 2)],
    ),
    "a list of one": (
        CallsChildren(only=nn.ModuleList([CallsChildren(layers=nn.ModuleList(linears(3)))])),
        body("only.0.layers", 3),
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts(name):
    model, expected = CUTS[name]
    expected = [unit.removeprefix(".") for unit in expected]
    assert candidates(model) == expected
    found = plan(model, torch.randn(8, 8), policy="all", progress=False)
    assert [unit.name for unit in found.chain.units] == expected


def test_the_page_and_the_error_say_where_the_least_peak_is():
    model, x = transformer(3), tokens()
    where = r"(recompute|backward|forward) of blocks\.\d"
    found = plan(model, x, policy="all", progress=False)
    assert re.search(rf"least feasible  .* MiB: {where}", str(found))
    with pytest.raises(
        ValueError, match=rf"least feasible budget is .* the peak is in the {where}"
    ):
        plan(model, x, budget=1000, progress=False)


@pytest.mark.parametrize("policy", ["none", "sqrt", "uniform:1"])
def test_norms_that_segments_do_not_share_are_counted(policy):
    # a CPU's segment holds the state of a GPU's generator, too, 16 bytes
    blocks = (MLPBlock(fusedckpt.RMSNorm(64), fusedckpt.MLP(64, 128)) for _ in range(6))
    model = nn.Sequential(*blocks).to(DEVICE)
    found = plan(model, torch.randn(512, 64, device=DEVICE), policy=policy, progress=False)
    assert found.measured_bytes <= found.predicted_bytes <= 1.01 * found.measured_bytes


def test_the_same_call_gives_the_same_plan():
    model, x = transformer(3), tokens()
    first, second = (plan(model, x, policy="memory", progress=False) for _ in range(2))
    assert str(first) == str(second)
    assert first == second


class FlaggedSquare(nn.Module):
    """A linear that by a flag, which its repr does not show, squares its output."""

    def __init__(self, squares):
        super().__init__()
        self.inner, self.squares = nn.Linear(64, 64), squares

    def forward(self, x):
        y = self.inner(x)
        return y.tanh().square() if self.squares else y


def test_units_that_differ_by_a_flag_are_measured_apart():
    model = nn.Sequential(*(FlaggedSquare(i % 2 == 1) for i in range(6)))
    found = plan(model, torch.randn(512, 64), policy="none", progress=False)
    assert found.measured_bytes <= found.predicted_bytes <= 1.02 * found.measured_bytes
