"""Where a model is cut into units, and what in a unit runs again on its own."""

import copy
from dataclasses import replace

import pytest
import torch
from plan_models import Block, convolutional, images, tokens, transformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fusedckpt
from fusedckpt import Plan, plan, report
from fusedckpt.planning.calls import Times
from fusedckpt.planning.chain import Chain, Keep, Level, Segment, Unit, simulate
from fusedckpt.planning.policies import policy as by_rule
from fusedckpt.planning.solver import least_outcome, least_peak, may_go_lower, solve
from fusedckpt.planning.units import candidates


def linears(count, dim=8):
    return [nn.Linear(dim, dim) for _ in range(count)]


class Called(nn.Module):
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
        Called(
            embed=nn.Linear(8, 8),
            layers=nn.ModuleDict({str(i): Called(a=nn.Linear(8, 8)) for i in range(3)}),
            norm=nn.LayerNorm(8),
        ),
        body("layers", 3),
    ),
    "lists in a list": (
        Called(stages=nn.ModuleList(nn.ModuleList(linears(2)) for _ in range(2))),
        [f"stages.{i}.{j}" for i in range(2) for j in range(2)],
    ),
    "Sequentials of modules in a Sequential": (
        nn.Sequential(*(nn.Sequential(Called(a=block()), Called(a=block())) for _ in range(3))),
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
        Called(layers=nn.ModuleList(Called(a=nn.Linear(8, 8)) for _ in range(12)), head=block()),
        [*body("layers", 12), *body("head", 2)],
    ),
    "a head and a body of attributes": (
        Called(**convolutions(), head=nn.Sequential(*linears(2))),
        [*convolutions(), *body("head", 2)],
    ),
    "a list of one": (
        Called(only=nn.ModuleList([Called(layers=nn.ModuleList(linears(3)))])),
        body("only.0.layers", 3),
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts(name):
    model, expected = CUTS[name]
    expected = [unit.removeprefix(".") for unit in expected]
    assert candidates(model) == expected
    found = plan(model, torch.randn(8, 8), policy="all", progress=False)
    assert [unit.name for unit in found.chain.units if not unit.code] == expected


def test_a_module_that_is_there_twice_is_named():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 8))
    x = torch.randn(4, 8)
    found = plan(model, x, policy="all", progress=False)
    assert found.left_out == {"0": "is called 2 times in a step"}
    plain = copy.deepcopy(model)
    found.apply(model)
    for each in (model, plain):
        each(x).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(*linears(6))

    def forward(self, x):
        return self.tower(x) - self.tower(x * 2)


def test_what_runs_more_than_once_is_named():
    for model, called in (
        (Siamese(), r"tower.0 is called 2 times in a step; .*; 3 more$"),
        (
            Called(cells=nn.ModuleList([nn.Linear(8, 8)] * 5)),
            r"cells.0 is called 5 times in a step",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^plan: .*runs exactly once.*: {called}"):
            plan(model, torch.randn(4, 8), policy="all", progress=False)


def nested(found):
    return [level for unit in found.chain.units for level in unit.levels if level.nested]


def test_parts_of_units_run_again(tmp_path):
    model, x = transformer(4), tokens()
    least = plan(model, x, policy="memory", progress=False)
    assert nested(least)
    everything = plan(model, x, policy="none", progress=False).measured_bytes
    # so that whole blocks need not run again
    chain = least.chain
    for share in (0.3, 0.6, 0.9):
        budget = int(least.measured_bytes + share * (everything - least.measured_bytes))
        found = solve(chain, budget)
        whole = replaced(chain, lambda level: not level.nested)
        assert found.extra <= solve(whole, budget).extra
    items = [
        Keep(i, min(unit.levels, key=lambda level: level.kept).name)
        for i, unit in enumerate(chain.units)
    ]
    outcome = simulate(chain, items)
    found = Plan(
        "Transformer", "by hand", None, chain, tuple(items), outcome.peak, outcome.extra, 0.0,
        structure=least.structure,
    )  # fmt: skip
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found
    assert " checkpointed " in str(found)
    plain = copy.deepcopy(model)
    found.apply(model)
    for each in (model, plain):
        each(x).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    found.undo()
    assert {type(m) for m in model.modules()} == {type(m) for m in plain.modules()}


def replaced(chain, keeps):
    units = [
        Unit(**{**vars(unit), "levels": tuple(filter(keeps, unit.levels))}) for unit in chain.units
    ]
    return Chain(tuple(units), chain.base)


def test_units_that_are_given_run_as_a_whole():
    model, x = transformer(2), tokens()
    assert not nested(plan(model, x, policy="memory", units=list(model.blocks), progress=False))
    assert not nested(plan(model, x, policy="all", progress=False))


class Shared(nn.Module):
    """A norm that all blocks use, and a part that a block calls twice."""

    def __init__(self):
        super().__init__()
        norm = nn.LayerNorm(32)
        self.blocks = nn.ModuleList(Twice(norm) for _ in range(3))

    def forward(self, x):
        for each in self.blocks:
            x = each(x)
        return x


class Twice(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.twice = norm, nn.Sequential(nn.Linear(32, 32), nn.GELU())
        self.once = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return x + self.once(self.twice(self.twice(self.norm(x))))


def test_parts_that_are_shared_or_run_twice_do_not():
    found = plan(Shared(), torch.randn(64, 32), policy="memory", progress=False)
    assert {level.name for level in nested(found)} == {"plain but once"}


def flops(step, *given):
    with FlopCounterMode(display=False) as counter:
        step(*given)
    return counter.get_total_flops() / 1e6


def by_flops(kind, call, runs):
    """Times without a clock: what runs takes its FLOPs."""
    return {x: Times(flops(call.once, run), flops(call._timed, run)) for x, run in runs.items()}


def test_blocks_of_layers_are_cut_up_where_that_pays(monkeypatch):
    monkeypatch.setattr("fusedckpt.planning.unit_costs._timed", by_flops)
    model, x = convolutional(6), images()
    most, least = (plan(model, x, policy=policy, progress=False) for policy in ("none", "memory"))
    assert "1" in {unit.name for unit in most.chain.units}
    budget = (most.measured_bytes + least.measured_bytes) // 2
    found = plan(model, x, budget=budget, progress=False)
    # a norm and an activation are cheaper to run again than a convolution
    assert "1.0" in {unit.name for unit in found.chain.units}
    assert found.measured_bytes <= budget


def test_nested_levels_are_not_in_segments():
    levels = (Level("plain", 10, 0.0, 5), Level("plain but a", 2, 1.0, 5, nested=True))
    units = (Unit("x", levels, 4.0, 10, 10), Unit("y", levels, 4.0, 10, 10))
    chain = Chain(units)
    with pytest.raises(ValueError, match="nested levels"):
        simulate(chain, [Segment(0, ("plain but a", "plain"))])
    for budget in range(least_outcome(chain).peak, 40):
        for item in solve(chain, budget).items:
            assert isinstance(item, Keep) or "plain but a" not in item.levels
    assert units[0].fastest.name == "plain"


def test_the_page_and_the_error_say_where_units_could_go_lower():
    model, x = transformer(3), tokens()
    lower = r"units= of modules inside blocks\.\d may go lower"
    found = plan(model, x, policy="all", progress=False)
    assert may_go_lower(found.chain, simulate(found.chain, least_peak(found.chain).items))
    with pytest.raises(ValueError, match=rf"least feasible budget is .* bytes: {lower}"):
        plan(model, x, budget=1000, progress=False)
    linear = nn.Sequential(*linears(4, 32))
    assert "may go lower" not in str(
        plan(linear, torch.randn(64, 32), policy="all", progress=False)
    )
    assert isinstance(model.blocks[0], Block)


class Normed(nn.Module):
    """A norm, and a layer that keeps the norm's input instead of its output."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.mlp = fusedckpt.RMSNorm(dim), fusedckpt.MLP(dim, 2 * dim)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("policy", ["none", "sqrt", "uniform:1"])
def test_norms_that_segments_do_not_share_are_counted(policy):
    model = nn.Sequential(*(Normed(64) for _ in range(6)))
    found = plan(model, torch.randn(512, 64), policy=policy, progress=False)
    assert found.measured_bytes <= found.predicted_bytes <= 1.01 * found.measured_bytes


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_what_the_cheapest_level_keeps_does_not_count_for_others(share):
    model, x = transformer(4), tokens()
    least, most = (
        plan(model, x, policy=policy, progress=False).measured_bytes
        for policy in ("memory", "none")
    )
    found = plan(model, x, budget=int(least + share * (most - least)), progress=False)
    assert nested(found)
    for items in (found.items, by_rule(found.chain, "none")):
        outcome = simulate(found.chain, items)
        same = replace(found, items=items, predicted_bytes=outcome.peak)
        same.apply(model)
        peak = report(model, x).peak_bytes
        same.undo()
        assert peak <= outcome.peak <= 1.02 * peak


def test_the_same_call_gives_the_same_plan():
    model, x = transformer(3), tokens()
    first, second = (plan(model, x, policy="memory", progress=False) for _ in range(2))
    assert str(first) == str(second)
    assert first == second


class Wide(nn.Module):
    """A linear that by a flag, which its repr does not show, squares its output."""

    def __init__(self, squares):
        super().__init__()
        self.inner, self.squares = nn.Linear(64, 64), squares

    def forward(self, x):
        y = self.inner(x)
        return y.tanh().square() if self.squares else y


def test_units_that_differ_by_a_flag_are_measured_apart():
    model = nn.Sequential(*(Wide(i % 2 == 1) for i in range(6)))
    found = plan(model, torch.randn(512, 64), policy="none", progress=False)
    assert found.measured_bytes <= found.predicted_bytes <= 1.02 * found.measured_bytes
