"""Policy "recursive": bytes, what runs again how often, files, pages, and the least of all."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from nested_plans import line, planned, same, step, unequal
from plan_models import Chain as Between
from plan_models import Pairs, convolutional, images, tokens, transformer
from torch import nn

from fusedckpt import Plan, checkpoint_sequential
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import peak_bytes, saved_tensors
from fusedckpt.planning import roles
from fusedckpt.planning.chain import Segment, simulate
from fusedckpt.planning.policies import policy as by_rule
from fusedckpt.planning.trials import Trials


@pytest.fixture(autouse=True)
def aten():
    """Kernels in the interpreter are too slow to be timed."""
    with forced_path("aten"):
        yield


SIZES = {
    "linears": (lambda: line(16, 256), lambda: torch.randn(512, 256)),
    "transformer": (transformer, tokens),
    "fused": (lambda: transformer(fused=True), tokens),
    "unequal": (unequal, lambda: torch.randn(1024, 64)),
    "pairs": (Pairs, lambda: torch.randn(512, 64)),
    "batch norm": (convolutional, images),
}


@pytest.mark.parametrize("name", SIZES)
def test_peaks_are_as_predicted(name):
    made, example = SIZES[name]
    model, x = made(), example()
    found = planned(model, x)
    assert any(isinstance(item, Segment) and item.inner for item in found.items)
    assert found.measured_bytes <= found.predicted_bytes <= 1.02 * found.measured_bytes
    plain = copy.deepcopy(model)
    found.apply(model)
    for seed in (1, 2):
        assert same(step(model, x, seed=seed), step(plain, x, seed=seed))
    assert same([*model.buffers()], [*plain.buffers()])
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("count", [2, 3, 7, 16, 33])
def test_reruns_are_those_of_nesting(count):
    model, x, calls = line(count), torch.randn(64, 32), Counter()

    def reruns(run):
        calls.clear()
        run(x).sum().backward()
        return [calls[unit] for unit in model.units]

    for unit in model.units:
        # the role is around it, so that what runs again is seen
        own = unit[0].forward
        unit[0].forward = lambda x, unit=unit, own=own: (calls.update([unit]), own(x))[1]
    found = planned(model, x)
    # which measures them once
    checkpoint_sequential(model.units, "recursive", x)
    theirs = reruns(lambda x: checkpoint_sequential(model.units, "recursive", x))
    found.apply(model)
    ours = reruns(model)
    assert ours == theirs
    assert sum(ours) - count == sum(depths(found.items))
    if count == 16:
        assert sum(ours) == 16 * (1 + math.log2(16) / 2) + 1


def depths(items):
    for item in items:
        if isinstance(item, Segment):
            yield item.stop - item.start
            yield from depths(item.inner)


def test_a_logarithm_of_inputs_is_held():
    """As many as `checkpoint_sequential` does, and states of random numbers once, not per depth."""
    model, x = line(64, 16), torch.randn(4096, 16)
    found = planned(model, x)
    with saved_tensors() as saved:
        planned_output = found.apply(model)(x)
    inputs = {unit.output for unit in found.chain.units[1:-1]}
    assert saved.nbytes <= 7 * max(inputs)
    del planned_output
    ours = peak_bytes(lambda: model(x).sum().backward())
    found.undo()
    theirs = peak_bytes(lambda: checkpoint_sequential(model.units, "recursive", x).sum().backward())
    assert ours <= theirs


def test_copies_and_files_and_pages(tmp_path):
    model, x = line(9), torch.randn(16, 32)
    plain = copy.deepcopy(model)
    found = planned(model, x)
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == found
    assert same(step(copy.deepcopy(loaded.apply(model)), x), step(plain, x))
    loaded.undo()
    assert not any(roles.is_assigned(module) for module in model.modules())
    page = str(found)
    assert page == str(loaded)
    assert "checkpointed (segment 1 of 5 units, nested)" in page
    assert "checkpointed (segments 3 to 4)" in page
    whole = json.loads((tmp_path / "plan.json").read_text())
    whole["items"][1]["inner"].pop()
    (tmp_path / "plan.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"Plan\.load: .* is not a plan"):
        Plan.load(tmp_path / "plan.json")
    for item in whole["items"]:
        # as files were written before there were any
        item.pop("inner", None)
    whole["predicted_bytes"] = simulate(found.chain, flat(found)).peak
    whole["extra_ms"] = simulate(found.chain, flat(found)).extra
    (tmp_path / "plan.json").write_text(json.dumps(whole))
    assert Plan.load(tmp_path / "plan.json").items == flat(found)


def flat(found):
    return tuple(
        replace(item, inner=()) if isinstance(item, Segment) else item for item in found.items
    )


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    planned(line(5), torch.randn(16, 32)).plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_in_checkpoint_sequential():
    model, x = nn.Sequential(*line(9).units), torch.randn(512, 32)
    found = planned(model, x)
    plain = copy.deepcopy(model)
    found_y = checkpoint_sequential(model, found, x)
    found_y.square().mean().backward()
    assert same([p.grad for p in model.parameters()], step(plain, x)[1:])
    rise = peak_bytes(lambda: checkpoint_sequential(model, found, x).sum().backward())
    rule = peak_bytes(lambda: checkpoint_sequential(model, "recursive", x).sum().backward())
    assert rise == rule


def test_in_checkpoint_sequential_beside_functions_that_are_no_units():
    model, x = nn.Sequential(*line(7).units), torch.randn(16, 32)
    # which hands on the very tensor, so that units around it are joined
    model.insert(1, nn.Identity()), model.insert(4, nn.Identity())
    found = planned(model, x, units=[unit for unit in model if len([*unit.children()])])
    assert [item.stop - item.start for item in found.items] == [1, 4, 2, 1, 1]
    plain = copy.deepcopy(model)
    checkpoint_sequential(model, found, x).square().mean().backward()
    assert same([p.grad for p in model.parameters()], step(plain, x)[1:])


def test_memory_is_the_least_of_all_rules_and_the_least_budget():
    model, x = unequal(24), torch.randn(1024, 64)
    rules = {name: planned(model, x, policy=name) for name in ("all", "sqrt", "recursive")}
    found = planned(model, x, policy="memory", units=[*model.units])
    assert found.measured_bytes <= min(rule.measured_bytes for rule in rules.values())
    assert any(isinstance(item, Segment) and item.inner for item in found.items)
    with pytest.raises(ValueError, match="plan: the least feasible budget is") as caught:
        planned(model, x, policy="budget", budget=1000, units=[*model.units])
    least = int(str(caught.value).split(" bytes")[0].split()[-1])
    assert least <= found.predicted_bytes
    within = planned(model, x, policy="budget", budget=least, units=[*model.units])
    assert within.measured_bytes <= least
    assert f"least feasible  {least / 2**20:.1f}"[:-1] in str(within)


def test_a_rule_that_cannot_be_near_the_least_is_not_run(monkeypatch):
    model, x, tried = unequal(24), torch.randn(1024, 64), []
    run = Trials.tried
    monkeypatch.setattr(Trials, "tried", lambda self, way: tried.append(way) or run(self, way))
    found = planned(model, x, policy="memory", units=[*model.units])
    assert [way.items for way in tried] == [by_rule(found.chain, "recursive")]


def test_of_what_leaves_no_two_units_to_join():
    """Code between all units: every one is a segment of its own."""
    found = planned(Between([nn.Linear(16, 16) for _ in range(4)]), torch.randn(8, 16))
    assert not any(isinstance(item, Segment) and item.inner for item in found.items)
