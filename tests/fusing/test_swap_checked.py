"""fuse: what is left of unknown classes and why, and the check of numbers."""

import copy

import pytest
import torch
from own_mlps import D, Gated, H, Inlined, Packed, Plain, Split
from own_norms import Llama
from support import DEVICE, randn, saved_bytes
from swap_cases import assert_equal, kinds
from test_chosen import sequential
from torch import nn

from fusedckpt import fuse
from fusedckpt.fusing import verification


class SlightlyScaled(Plain):
    def forward(self, x):
        return super().forward(x) * 1.01


class ScaledByWeight(Plain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return super().forward(x) * self.scale


AGAIN = {
    "ELU": lambda: Plain(nn.ELU(0.2)),
    "Softplus": lambda: Plain(nn.Softplus(beta=2)),
    "ReLU6": lambda: Plain(nn.ReLU6()),
    "scaled": SlightlyScaled,
    "inlined": Inlined,
    "own parameter": ScaledByWeight,
}


@pytest.mark.parametrize("make", AGAIN.values(), ids=list(AGAIN))
def test_some_are_recomputed_where_only_inputs_are_saved(make):
    module = make().to(DEVICE, torch.float64)
    eager = copy.deepcopy(module)
    report = fuse(module, norm=False)
    assert report.swapped == {"": f"{type(eager).__name__} -> recomputed"}
    x = randn(3, 4, D, dtype=torch.float64)
    assert_equal(module, eager, x, tol=0)
    assert saved_bytes(lambda x: module(x * 1), [x]) == 8 * 3 * 4 * D
    assert report.fallbacks == {}


def test_a_sequential_is_compared_at_small_widths(monkeypatch):
    counts = []

    class Draw(verification.Draw):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            counts[-1] += sum(value.numel() for value in self.values.values())

    monkeypatch.setattr(verification, "Draw", Draw)
    for width in (96, 384):
        counts.append(0)
        linears = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        model = nn.Sequential(nn.LayerNorm(width), linears[0], nn.GELU(), linears[1]).to(DEVICE)
        assert fuse(model, norm=False).swapped["1"].endswith("-> mlp")
    assert counts[0] == counts[1] > 0


def test_a_wrong_rule_is_named(monkeypatch):
    """Every kind of swap is really checked: ours is broken on purpose."""
    model = nn.Sequential(Llama(), Plain(), Packed(), nn.LayerNorm(D), Split(), sequential())
    model.to(DEVICE)
    real = verification._Run.results

    def off(run, dtype, device, swap=None):
        found = real(run, dtype, device, swap)
        return found if swap is None else [found[0] * 1.001, *found[1:]]

    monkeypatch.setattr(verification._Run, "results", off)
    before = kinds(model)
    # linears that run as they are may save recipes, which no check has to pass
    report = fuse(model, attention=False, linear=False)
    assert report.swapped == {}
    assert sorted(report.left) == ["0", "1", "2", "3", "4", "5.0"]
    assert {reason.key for reason in report.left.values()} == {"differs"}
    assert kinds(model) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_dtype_passes_its_check(dtype):
    model = nn.Sequential(Plain(), Gated(), Packed(), nn.LayerNorm(D), sequential())
    report = fuse(model.to(DEVICE, dtype))
    assert len(report.swapped) == 5
    assert report.left == {}


def test_nothing_is_touched(monkeypatch):
    model = nn.Sequential(Plain(p=0.5), Llama(), nn.BatchNorm1d(D), sequential()).to(DEVICE)
    x = randn(3, D)
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: pytest.fail("a gradient came"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    grads = [p.grad.clone() for p in model.parameters()]
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state()] if DEVICE.type == "cuda" else []
    with torch.no_grad():
        assert len(fuse(model).swapped) == 3
    assert torch.equal(states[0], torch.get_rng_state())
    if DEVICE.type == "cuda":
        assert torch.equal(states[1], torch.cuda.get_rng_state())
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert versions == [p._version for p in model.parameters()]
    pairs = zip(grads, model.parameters(), strict=True)
    assert all(torch.equal(grad, p.grad) for grad, p in pairs)
    assert model[0].training
    assert model[0].drop.p == 0.5


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model = nn.Sequential(Plain(), Llama(), nn.LayerNorm(D)).to(DEVICE)
    before, attributes = kinds(model), [set(m.__dict__) for m in model.modules()]
    real, calls = verification.difference, []

    def fails(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no more")
        return real(*args)

    monkeypatch.setattr(verification, "difference", fails)
    with pytest.raises(MemoryError, match="no more"):
        fuse(model)
    assert kinds(model) == before
    assert [set(m.__dict__) for m in model.modules()] == attributes


def test_tied_weights_within_one_block():
    module = Plain().to(DEVICE, torch.float64)
    module.second.weight = nn.Parameter(torch.randn(H, D, dtype=torch.float64, device=DEVICE).t())
    other = Gated().to(DEVICE, torch.float64)
    other.w.weight = other.v.weight
    for each in (module, other):
        eager = copy.deepcopy(each)
        assert fuse(each).swapped
        assert_equal(each, eager, randn(3, D, dtype=torch.float64))


def test_bytes_in_the_report_are_those_of_a_call():
    from fusedckpt.memory import saved_tensors

    eager = Gated().to(DEVICE)
    model = copy.deepcopy(eager)
    report = fuse(model)
    found = []
    for each in (eager, model):
        x = randn(8, D)
        with saved_tensors() as saved:
            y = each(x * 1)
        found.append(saved.nbytes / 8)
        del y
    assert report.saved[""] == tuple(found) == (4 * (D + 4 * H), 4 * D)
