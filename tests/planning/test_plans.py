"""The life of a plan: apply, copy, save and load, draw, and use it on another model."""

import copy
import json
import pickle
import re
from dataclasses import replace

import pytest
import torch
from plan_models import Transformer, assert_equal, step, tokens, transformer
from support import DEVICE, randn
from torch import nn

import fusedckpt
from fusedckpt import Plan
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.planning import roles
from fusedckpt.planning.budget import bytes_of
from fusedckpt.planning.chain import Chain, Item, Level, Unit, simulate
from fusedckpt.planning.rules import by_rule
from fusedckpt.planning.solver import solve
from fusedckpt.reporting.tables import enough


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A segment of one unit and one of two, and a unit that keeps a level."""
    with forced_path("aten"):
        found = fusedckpt.plan(transformer(4, fused=True), tokens(), policy="all", progress=False)
    level = found.chain.units[3].levels[-1].name
    items = Item(0, 1), Item(1, 3), Item(3, 4, level)
    outcome = simulate(found.chain, items)
    return replace(
        found, items=items, predicted_bytes=outcome.peak_bytes, extra_ms=outcome.extra_ms
    )


def assert_same(a, b) -> None:
    x = tokens()
    assert_equal(step(a, x), step(b, x))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deep", "pickle"],
)
def test_copies_of_a_planned_model_are_planned(plan, copied):
    plain = transformer(4, fused=True)
    planned = plan.apply(copy.deepcopy(plain))
    twin = copied(planned)
    plan.undo(planned)
    assert not any(roles.is_assigned(module) for module in planned.modules())
    assert any(roles.is_assigned(module) for module in twin.modules())
    assert_same(twin, plain)
    plan.undo(twin)
    assert [type(m) for m in twin.modules()] == [type(m) for m in plain.modules()]
    assert list(twin.state_dict()) == list(plain.state_dict())


def test_a_loaded_plan_is_the_saved_one(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert str(loaded) == str(plan)
    plain = transformer(4, fused=True)
    assert_same(loaded.apply(copy.deepcopy(plain)), plain)


@pytest.mark.parametrize(
    "edit",
    [
        lambda found: found.pop("items"),
        lambda found: found.update(version=99),
        lambda found: found.update(format="something.else"),
        lambda found: found["items"].pop(),
        lambda found: found["items"][0].update(start=1),
        lambda found: found["items"][2].update(level="nonsense"),
        lambda found: found["chain"]["units"][1].pop("input_bytes"),
        lambda found: found["chain"]["units"][1].update(live_at_begin="1"),
        lambda found: found.update(extra_ms=float("nan")),
        lambda found: found.update(predicted_bytes=1),
        lambda found: found.update(surprise=1),
    ],
)
def test_an_edited_plan_is_refused(plan, tmp_path, edit):
    path = tmp_path / "plan.json"
    plan.save(path)
    found = json.loads(path.read_text())
    edit(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"Plan\.load: .* is not a plan"):
        Plan.load(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": "fusedckpt.plan"}'])
def test_what_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Plan\.load: .* is not a plan"):
        Plan.load(path)


def test_apply_changes_nothing_where_it_cannot(plan):
    other = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"Plan\.apply: Sequential has no unit 'blocks\.0'"):
        plan.apply(other)
    with pytest.raises(TypeError, match=r"Plan\.apply: model must be an nn\.Module, got list"):
        plan.apply([other])
    with pytest.raises(
        TypeError, match=r"Plan\.undo: model must be an nn\.Module or None, got list"
    ):
        plan.undo([other])
    model = plan.apply(transformer(4, fused=True))
    with pytest.raises(ValueError, match="another plan is applied"):
        plan.apply(model)
    plan.undo()
    assert not any(roles.is_assigned(module) for module in model.modules())
    copy.copy(plan).apply(model)
    # one that changes what the structure is told by
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(DEVICE)
    fusedckpt.fuse(net)
    other = fusedckpt.plan(net, randn(3, 4), policy="all", progress=False)
    with pytest.raises(ValueError, match="another plan is applied"):
        other.apply(other.apply(net))
    # another plan's
    plan.undo()
    assert any(roles.is_assigned(module) for module in model.modules())


OTHERS = {
    "more blocks": (lambda: transformer(6, fused=True), "the model is a Transformer of 3"),
    "not fused": (
        lambda: transformer(4),
        "the model is a Transformer of 2.* with fused layers: call",
    ),
    "wider": (lambda: Transformer(4, 128), "the model is a Transformer of 8"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_is_refused_by_another_structure(plan, name):
    made, message = OTHERS[name]
    model = made()
    with pytest.raises(ValueError, match=rf"^Plan\.apply: {message}"):
        plan.apply(model)
    assert not any(roles.is_assigned(module) for module in model.modules())


class OwnLayerNorm(nn.LayerNorm):
    """A class that fuse makes another of, as plans do."""


@pytest.mark.parametrize(
    ("kind", "name"), [(nn.LayerNorm, "LayerNorm"), (OwnLayerNorm, "FusedOwnLayerNorm")]
)
def test_unfuse_leaves_a_planned_module_alone(kind, name):
    model = nn.Sequential(kind(8), nn.Linear(8, 8))
    fusedckpt.fuse(model)
    with roles.assigned({model[0]: roles.segmented()[0]}):
        twin = pickle.loads(pickle.dumps(model))
        assert type(twin[0]) is type(model[0])
        with pytest.raises(ValueError, match=f"unfuse: other code made 0 a {name} after fuse"):
            fusedckpt.unfuse(model)
    assert type(fusedckpt.unfuse(model)[0]) is kind


def test_text_folds_what_is_alike_and_names_budgets_that_hold():
    # an odd number of bytes, which no text of a tenth of a MiB is
    levels = (Level("plain", 300_000, 0.0, 1_500_003, 1_600_001),)
    again = Level("again", 0, 1.0, 1_500_003, 1_700_001)
    inner = [
        Unit(f"blocks.{i}", levels, again, levels[0], 1.0, 100_003, 100_003 * (i > 0),
             1_100_006 + i, 1_200_000, 1_300_000, joined=i > 0)
        for i in range(12)
    ]  # fmt: skip
    chain = Chain(tuple(inner), 1_000_003)
    found = {}
    for name in ("none", "all", "uniform:4"):
        outcome = by_rule(chain, name)
        peak, extra = outcome.peak_bytes, outcome.extra_ms
        found[name] = str(Plan("Net", name, None, chain, outcome.items, peak, extra, 0.0))
    assert all(text.count("blocks.0 to blocks.11") == 1 for text in found.values())
    assert "12 x 390.6 KiB" in found["none"]
    assert "checkpointed (segments 1 to 12)" in found["all"]
    assert "checkpointed (segments 1 to 4 of 3 units)" in found["uniform:4"]
    least = re.search("least feasible +([^:]*)", found["all"])[1]
    # which raises where it is too little
    budget = bytes_of("plan", least, torch.device("cpu"))
    assert solve(chain, budget).peak_bytes <= budget
    everything = re.search("save everything +(.*)", found["all"])[1]
    assert solve(chain, bytes_of("plan", everything, torch.device("cpu"))).extra_ms == 0


def test_units_save_what_autograd_saves():
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)]
    model = nn.Sequential(*blocks).to(DEVICE)
    found = fusedckpt.plan(model, randn(16, 8), policy="none", progress=False)
    # x and the hidden layer, not less by the random states of a checkpoint
    assert found.chain.saved_by(found.items[1]) == 16 * (8 + 32) * 4


def test_a_plan_in_checkpoint_sequential():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    layers, x = layers.to(DEVICE), randn(5, 6)
    expected = torch.autograd.grad(layers(x).sum(), [x, *layers.parameters()])
    for policy in ("none", "all", "uniform:2"):
        found = fusedckpt.plan(layers, x, policy=policy, progress=False)
        counts = {"none": 0, "all": 4, "uniform:2": 2}
        spans = found.spans(4)
        assert sum(context is None for *_, context in spans) == counts[policy]
        y = fusedckpt.checkpoint_sequential(layers, found, x)
        grads = torch.autograd.grad(y.sum(), [x, *layers.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    with pytest.raises(ValueError, match="expected a plan of these 2 functions"):
        fusedckpt.checkpoint_sequential(layers[:2], found, x)


def axes_of(plan):
    """Return the axes of a plan's figure: time against memory, and a step."""
    figures = pytest.importorskip("matplotlib.figure")
    drawing = pytest.importorskip("fusedckpt.planning.plan_plot", exc_type=ImportError)
    trade, through = figures.Figure().subplots(1, 2)
    drawing.draw_trade(trade, plan)
    drawing.draw_step(through, plan)
    return trade, through


@pytest.mark.parametrize("times", [0.5, 1.1, 1e6])
def test_a_budget_far_above_all_points_does_not_collapse_them(plan, times, tmp_path):
    most = by_rule(plan.chain, "none").peak_bytes
    plain, found = axes_of(plan), axes_of(replace(plan, budget_bytes=int(times * most)))
    assert found[0].get_xlim()[1] <= 1.3 * plain[0].get_xlim()[1]
    assert found[1].get_ylim()[1] <= 1.3 * plain[1].get_ylim()[1]
    (told,) = [text.get_text() for text in found[0].texts]
    is_near = times < 2
    assert told == (" budget" if is_near else f"budget {enough(int(times * most))} \u2192")
    # the plain one's lines, and the budget's
    assert [len(b.lines) - len(a.lines) for a, b in zip(plain, found, strict=True)] == [is_near] * 2
    labels = [text.get_text() for text in found[0].get_legend().get_texts()]
    assert {"checkpoint every unit", "sqrt(n) segments", "save everything"} < {*labels}
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
