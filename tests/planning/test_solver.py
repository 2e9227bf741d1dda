"""Plans against brute force in another simulator, and at the sizes that models have."""

import itertools
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from random_chains import cut_chain, llama_like, random_chain
from replay import replay
from support import calls

from fusedckpt.planning.chain import Chain, Keep, Level, Segment, Unit, simulate
from fusedckpt.planning.policies import policy
from fusedckpt.planning.search import Search
from fusedckpt.planning.solver import least_peak, solve


def every_plan(chain: Chain):
    """Yield all plans, as items, of those with nested segments the rule's."""
    yield policy(chain, "recursive")
    count = len(chain.units)
    names = [[level.name for level in unit.levels] for unit in chain.units]
    inner = [[level.name for level in unit.levels if not level.nested] for unit in chain.units]
    for cuts in itertools.product((False, True), repeat=count - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [count]
        choices = []
        for start, stop in zip([0, *ends], ends, strict=False):
            choice = []
            if not any(unit.fixed for unit in chain.units[start:stop]):
                levels = itertools.product(*inner[start:stop])
                choice = [Segment(start, chosen) for chosen in levels]
            if stop == start + 1:
                choice += [Keep(start, name) for name in names[start]]
            choices.append(choice)
        yield from itertools.product(*choices)


def nested(draw: random.Random, item):
    """Return an item with segments nested in it at random."""
    if isinstance(item, Keep) or len(item.levels) < 2 or draw.random() < 0.2:
        return item
    inner, at = [], item.start
    while at < item.stop:
        # not all of it
        stop = draw.randint(at + 1, item.stop - (at == item.start))
        levels = item.levels[at - item.start : stop - item.start]
        alone = stop == at + 1 and draw.random() < 0.5
        inner.append(Keep(at, *levels) if alone else nested(draw, Segment(at, levels)))
        at = stop
    return replace(item, inner=tuple(inner))


def test_simulator_agrees_with_a_replay_of_every_tensor():
    draw = random.Random(1)
    for _ in range(60):
        chain = random_chain(draw, draw.randint(1, 4))
        for items in every_plan(chain):
            outcome = simulate(chain, items)
            assert (outcome.peak, outcome.extra) == pytest.approx(replay(chain, items))
    for _ in range(200):
        chain = random_chain(draw, draw.randint(2, 9))
        chain = replace(chain, units=tuple(replace(u, fixed=False) for u in chain.units))
        whole = Segment(0, tuple(unit.fastest.name for unit in chain.units))
        items = [nested(draw, whole)]
        outcome = simulate(chain, items)
        assert (outcome.peak, outcome.extra) == pytest.approx(replay(chain, items))
        items = policy(chain, "recursive")
        outcome = simulate(chain, items)
        assert (outcome.peak, outcome.extra) == pytest.approx(replay(chain, items))
    for _ in range(20):
        chain = cut_chain(draw, draw.randint(1, 3), alike=False)
        for items in every_plan(chain):
            outcome = simulate(chain, items)
            assert (outcome.peak, outcome.extra) == pytest.approx(replay(chain, items))


def test_a_peak_worked_out_by_hand():
    a = Unit("a", (Level("plain", 10, 0, 7),), 3, input=4, output=5, forward_transient=6, left=2)
    b = Unit("b", (Level("plain", 8, 0, 9),), 2, input=5, output=1, tail=1, left=30)
    chain = Chain((a, b), base=100)
    kept = simulate(chain, [Keep(0, "plain"), Keep(1, "plain")])
    # a's backward: its 10 and 7, and what b left
    assert (kept.peak, kept.extra, kept.where) == (147, 0, "backward of a")
    both = simulate(chain, [Segment(0, ("plain", "plain"))])
    assert (both.peak, both.extra) == (147, 4)
    alone = simulate(chain, [Segment(0, ("plain",)), Keep(1, "plain")])
    # a runs again: its 10 and 6, its output's gradient of 5, and what b left
    assert (alone.peak, alone.extra, alone.where) == (151, 3, "recompute of a")


def best_of(outcomes: list[tuple[int, float]], budget: float) -> float | None:
    return min((extra for peak, extra in outcomes if peak <= budget), default=None)


def test_equals_brute_force():
    draw = random.Random(2)
    for number in range(300):
        chain = random_chain(draw, 1 + number % 4 if number < 275 else 5)
        outcomes = [replay(chain, items) for items in every_plan(chain)]
        least, most = min(outcomes)[0], max(outcomes)[0]
        for budget in (least - 1, least, draw.randint(least, most), (least + most) // 2):
            expected = best_of(outcomes, budget)
            if expected is None:
                with pytest.raises(ValueError, match=f"least feasible budget is {least} bytes"):
                    solve(chain, budget)
                continue
            plan = solve(chain, budget)
            assert replay(chain, plan.items) == pytest.approx((plan.peak, plan.extra))
            assert plan.peak <= budget
            assert plan.extra == pytest.approx(expected)
            assert plan.lower_bound == pytest.approx(expected)


@pytest.mark.parametrize("alike", [True, False])
def test_chunks_equal_brute_force(alike):
    draw, tried = random.Random(10), 0
    for number in range(120):
        chain = cut_chain(draw, 1 + number % 3, alike)
        outcomes = [replay(chain, items) for items in every_plan(chain)]
        least, most = min(outcomes)[0], max(outcomes)[0]
        assert least == least_peak(chain).peak
        for budget in (least, draw.randint(least, most), (least + most) // 2, most):
            plan, expected = solve(chain, budget), best_of(outcomes, budget)
            assert replay(chain, plan.items) == pytest.approx((plan.peak, plan.extra))
            assert plan.peak <= budget
            assert plan.extra == pytest.approx(expected)
            assert plan.lower_bound == pytest.approx(expected)
            tried += 1
    assert tried == 480


def test_least_peak_equals_brute_force():
    draw = random.Random(3)
    for _ in range(100):
        chain = random_chain(draw, draw.randint(1, 4))
        outcomes = [replay(chain, items) for items in every_plan(chain)]
        plan = least_peak(chain)
        assert (plan.peak, plan.extra) == pytest.approx(min(outcomes))


def test_more_budget_never_costs_time():
    draw = random.Random(4)
    for count in (6, 12, 24):
        chain = random_chain(draw, count, most=10**6)
        least, most = least_peak(chain).peak, simulate(chain, policy(chain, "none")).peak
        budgets = [least + (most - least) * share // 12 for share in range(14)]
        extras = [solve(chain, budget).extra for budget in budgets]
        assert extras == sorted(extras, reverse=True)
        assert extras[0] > extras[-1]


def test_no_limit_costs_no_time():
    draw = random.Random(5)
    for count in (1, 7, 40):
        chain = random_chain(draw, count)
        fastest = sum(unit.fastest.extra for unit in chain.units)
        assert solve(chain, math.inf).extra == fastest
    assert solve(llama_like(32), math.inf).extra == 0


def test_error_names_a_budget_that_works():
    draw = random.Random(6)
    for chain in (random_chain(draw, 9), random_chain(draw, 50), llama_like(200)):
        with pytest.raises(ValueError, match="solve: the least feasible budget is") as error:
            solve(chain, chain.base)
        (least,) = map(int, re.findall(r"is (\d+) bytes", str(error.value)))
        assert solve(chain, least).peak == least
        with pytest.raises(ValueError, match=f"is {least} bytes, got {least - 1}"):
            solve(chain, least - 1)
    with pytest.raises(ValueError, match="got nan"):
        solve(chain, math.nan)


def scaled(chain: Chain, by: int) -> Chain:
    def times(record, *names: str):
        found = {name: getattr(record, name) for name in names}
        return replace(record, **{name: by * x for name, x in found.items() if x is not None})

    units = [
        replace(
            times(unit, "input", "output", "forward_transient", "left"),
            levels=tuple(
                times(level, "kept", "transient", "ending", "forward_transient", "again")
                for level in unit.levels
            ),
        )
        for unit in chain.units
    ]
    return Chain(tuple(units), base=by * chain.base)


def test_bytes_have_no_unit():
    draw = random.Random(7)
    for count in (5, 20, 60):
        chain = random_chain(draw, count, most=10**4)
        least, most = least_peak(chain).peak, simulate(chain, policy(chain, "none")).peak
        for budget in (least, (least + most) // 2):
            plan, larger = solve(chain, budget), solve(scaled(chain, 977), 977 * budget)
            assert larger.extra == pytest.approx(plan.extra, rel=1e-9)
            assert larger.peak <= 977 * budget


def share_of(chain: Chain, share: float) -> int:
    """Return a share of the peak of a step that keeps all."""
    return int(share * simulate(chain, policy(chain, "none")).peak)


@pytest.mark.parametrize(
    ("count", "most", "noise"),
    [(100, 1_000_000, 0.1), (100, 1_000_000, 0.0), (1000, 10_000_000, 0.0)],
)
def test_is_quick_and_near_the_bound(count, most, noise):
    chain = llama_like(count, noise)
    budget = share_of(chain, 0.25)
    found = []
    # a million calls take about two seconds
    assert calls(lambda: found.append(solve(chain, budget))) < most
    (plan,) = found
    assert plan.peak <= budget
    assert 0 < plan.lower_bound <= plan.extra <= 1.002 * plan.lower_bound


def test_never_slower_than_sqrt_at_its_peak():
    draw = random.Random(8)
    chains = [random_chain(draw, draw.randint(1, 60), most=10**6) for _ in range(30)]
    for chain in [*chains, llama_like(60)]:
        rule = simulate(chain, policy(chain, "sqrt"))
        plan = solve(chain, rule.peak)
        assert plan.peak <= rule.peak
        assert plan.extra <= rule.extra


def test_beats_sqrt_clearly_on_a_transformer():
    chain = llama_like(100)
    rule = simulate(chain, policy(chain, "sqrt"))
    assert solve(chain, rule.peak).extra < 0.85 * rule.extra


def test_bounds_hold_where_frontiers_are_thinned(monkeypatch):
    draw = random.Random(9)
    chains = [random_chain(draw, draw.randint(4, 7)) for _ in range(60)]
    for chain in chains:
        least, most = least_peak(chain).peak, simulate(chain, policy(chain, "none")).peak
        budget = (2 * least + max(least, most)) // 3
        exact = solve(chain, budget)
        with monkeypatch.context() as patch:
            patch.setattr("fusedckpt.planning.solver._FEWEST", 2)
            thinned = solve(chain, budget)
        search = Search(chain, budget - chain.base, len(chain.units), steps=2)
        assert search.find_multiplier() <= exact.extra + 1e-9
        assert exact.lower_bound == exact.extra
        assert thinned.lower_bound <= exact.extra + 1e-9
        assert exact.extra <= thinned.extra + 1e-9


def test_bad_input_is_refused():
    level = Level("plain", 1, 0, 1)
    unit = Unit("a", (level,), 1, 1, 1)
    chain = Chain((unit, replace(unit, name="b")))
    with pytest.raises(ValueError, match="Level: kept is int, finite and not negative, got -1"):
        replace(level, kept=-1)
    with pytest.raises(ValueError, match="Level: extra is float, finite and not negative, got inf"):
        replace(level, extra=math.inf)
    with pytest.raises(ValueError, match=r"Unit: input is int, .* got 1\.5"):
        replace(unit, input=1.5)
    with pytest.raises(ValueError, match="needs levels of distinct names"):
        replace(unit, levels=(level, level))
    with pytest.raises(ValueError, match="tail of a takes longer"):
        replace(unit, tail=2.0)
    with pytest.raises(ValueError, match="at least one unit"):
        Chain(())
    for name in ("square", "uniform", "uniform:0", "uniform:3", "uniform:x"):
        with pytest.raises(ValueError, match="uniform:1 to 2 expected"):
            policy(chain, name)
    with pytest.raises(ValueError, match="starts at unit 1 was expected"):
        simulate(chain, [Keep(0, "plain"), Keep(0, "plain")])
    with pytest.raises(ValueError, match="covers 1 of 2 units"):
        simulate(chain, [Keep(0, "plain")])
    with pytest.raises(ValueError, match="a has no level 'preact'"):
        simulate(chain, [Keep(0, "preact"), Keep(1, "plain")])
    with pytest.raises(ValueError, match="a chain of less than"):
        solve(scaled(chain, 1 << 52), math.inf)


def integer_program(chain: Chain, limit: int) -> tuple[float, float]:
    """Return extra ms and a lower bound by HiGHS, all units of a segment at one kind of level."""
    optimize = pytest.importorskip("scipy.optimize")
    sparse = pytest.importorskip("scipy.sparse")
    count, kinds = len(chain.units), range(len(chain.units[0].levels))
    # an item: its ends, what it keeps, its peak beyond all kept before, its time
    edges = []
    for i, unit in enumerate(chain.units):
        for level in unit.levels:
            peak = level.kept + max(unit.forward_transient, level.transient)
            edges.append((i, i + 1, level.kept, peak, level.extra))
        for stop, kind in itertools.product(range(i + 1, count + 1), kinds):
            part = Chain(chain.units[i:stop])
            names = tuple(u.levels[kind].name for u in part.units)
            outcome = simulate(part, [Segment(0, names)])
            if outcome.peak <= limit:
                edges.append((i, stop, unit.input, outcome.peak, outcome.extra))
    starts, stops, kept, peaks, extra = map(np.array, zip(*edges, strict=True))
    nodes = np.arange(count)[:, None]
    flow = (starts == nodes).astype(float) - (stops == nodes)
    # what was kept up to a unit and the peak of the item that starts there
    memory = np.where(stops <= nodes, kept, 0) + np.where(starts == nodes, peaks, 0)
    found = optimize.milp(
        extra,
        integrality=np.ones(len(edges)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(sparse.csr_array(flow), *2 * [(nodes[:, 0] == 0) * 1.0]),
            optimize.LinearConstraint(sparse.csr_array(memory / limit), -np.inf, 1.0),
        ],
        options={"mip_rel_gap": 1e-3, "time_limit": 15},
    )
    return (math.inf if found.fun is None else found.fun), found.mip_dual_bound


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_agrees_with_an_integer_program(share):
    chain = llama_like(32)
    budget = share_of(chain, share)
    plan = solve(chain, budget)
    best, bound = integer_program(chain, budget)
    # its plans are some of ours: none beats our bound, nor our plan by more than our gap
    assert best >= plan.lower_bound * (1 - 1e-9)
    assert plan.extra <= best + (plan.extra - plan.lower_bound) + 1e-9
    assert bound <= best
