"""Plans against brute force in another simulator, and at the sizes that models have."""

import itertools
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from random_chains import llama_like, random_chain
from support import calls

from fusedckpt.planning import solver
from fusedckpt.planning.chain import Chain, Keep, Level, Segment, Unit, simulate
from fusedckpt.planning.policies import policy
from fusedckpt.planning.solver import _starts_of, least_peak, solve


def every_plan(chain: Chain):
    """Yield all plans, as items."""
    count = len(chain.units)
    for cuts in itertools.product((False, True), repeat=count - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [count]
        choices = []
        for start, stop in zip([0, *ends], ends, strict=False):
            first, *others = chain.units[start:stop]
            may = not first.fixed and all(unit.joined for unit in others)
            choice = [Segment(start, stop)] if may else []
            if stop == start + 1:
                choice += [Keep(start, level.name) for level in first.levels]
            choices.append(choice)
        yield from itertools.product(*choices)


def replay(chain: Chain, items) -> tuple[int, float]:
    """Return peak and extra time of a plan, from the tensors that live in every phase."""
    # by unit, bytes more than in a step in which every unit is in a checkpoint of its own
    more, peaks, extra = [0] * len(chain.units), [chain.before, chain.after], 0.0
    for item in items:
        for i in range(item.start, item.stop):
            unit = chain.units[i]
            level = unit.again if isinstance(item, Segment) else unit.level(item.level)
            peaks.append(level.forward + sum(more[:i]))
            is_inside = isinstance(item, Segment) and i > item.start
            more[i] = -unit.freed if is_inside else level.kept
            peaks.append(unit.between + sum(more[: i + 1]))
    for item in items[::-1]:
        if isinstance(item, Keep):
            level = chain.units[item.start].level(item.level)
            peaks.append(level.backward + sum(more[: item.start]))
            extra += level.extra
            continue
        last = item.stop - 1
        for i in range(item.start, last):
            unit = chain.units[i]
            runs = unit.inside.forward - unit.begin
            peaks.append(chain.units[last].arrives + sum(more[: last + 1]) + runs)
            # it has its intermediates again, and random states; the next one its input
            more[i] += unit.inside.kept + chain.states
            more[i + 1] += chain.units[i + 1].freed
            extra += unit.rerun_ms
        peaks.append(chain.units[last].again.backward + sum(more[:last]))
        extra += chain.units[last].again.extra
        for i in reversed(range(item.start, last)):
            peaks.append(chain.units[i].inside.backward + sum(more[:i]))
    return max(peaks), extra


def test_simulator_agrees_with_a_replay_of_every_phase():
    draw = random.Random(1)
    for _ in range(80):
        chain = random_chain(draw, draw.randint(1, 5))
        for items in every_plan(chain):
            outcome = simulate(chain, items)
            assert (outcome.peak, outcome.extra) == pytest.approx(replay(chain, items))


def test_a_peak_worked_out_by_hand():
    """Two units with inputs of 4 and 5 bytes, of which a step holds 100 bytes anyway."""
    again = Level("again", 0, 3.0, 110, 121), Level("again", 0, 1.0, 115, 120)
    levels = Level("plain", 6, 0.0, 116, 118), Level("plain", 3, 0.0, 117, 119)
    a = Unit("a", levels[:1], again[0], levels[0], 3.0, 3.0, 4, 0, 104, 111, 110)
    b = Unit("b", levels[1:], again[1], levels[1], 2.0, 2.0, 5, 5, 109, 112, 110,
             joined=True)  # fmt: skip
    chain = Chain((a, b), base=100)
    kept = simulate(chain, [Keep(0, "plain"), Keep(1, "plain")])
    # b's backward, and the 6 bytes of a
    assert (kept.peak, kept.extra, kept.where) == (125, 0, "backward of b")
    alone = simulate(chain, [Segment(0, 1), Segment(1, 2)])
    assert (alone.peak, alone.extra, alone.where) == (121, 4, "recompute of a")
    both = simulate(chain, [Segment(0, 2)])
    # b's recompute and backward, and the 6 bytes of a, which ran again before it
    assert (both.peak, both.extra, both.where) == (126, 4, "recompute of b")
    with pytest.raises(ValueError, match="may be in one segment"):
        simulate(Chain((a, replace(b, joined=False))), [Segment(0, 2)])


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
        assert solve(chain, math.inf).extra == 0
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

    def level(found: Level | None) -> Level | None:
        return found and times(found, "kept", "forward", "backward")

    units = [
        replace(
            times(unit, "input", "freed", "begin", "between", "arrives"),
            levels=tuple(map(level, unit.levels)),
            again=level(unit.again),
            inside=level(unit.inside),
        )
        for unit in chain.units
    ]
    return replace(times(chain, "base", "before", "after", "states"), units=tuple(units))


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


def test_bounds_hold_where_ways_are_dropped(monkeypatch):
    draw = random.Random(9)
    for _ in range(60):
        chain = random_chain(draw, draw.randint(4, 7))
        least, most = least_peak(chain).peak, simulate(chain, policy(chain, "none")).peak
        budget = (2 * least + max(least, most)) // 3
        exact = solve(chain, budget)
        with monkeypatch.context() as patch:
            patch.setattr(solver, "_WIDTHS", (2,))
            solver._fastest.cache_clear()
            narrow = solve(chain, budget)
        solver._fastest.cache_clear()
        assert exact.lower_bound == exact.extra
        assert narrow.lower_bound <= exact.extra + 1e-9
        assert exact.extra <= narrow.extra + 1e-9


def test_bad_input_is_refused():
    chain = random_chain(random.Random(0), 2)
    unit, level = chain.units[0], chain.units[0].levels[0]
    with pytest.raises(ValueError, match="Level: forward is a size in bytes, got -1"):
        replace(level, forward=-1)
    with pytest.raises(ValueError, match="Level: extra is a time, got inf"):
        replace(level, extra=math.inf)
    with pytest.raises(ValueError, match=r"Unit: input is a size in bytes, got 1\.5"):
        replace(unit, input=1.5)
    with pytest.raises(ValueError, match="Unit: input is a size in bytes, got True"):
        replace(unit, input=True)
    with pytest.raises(ValueError, match="needs levels of distinct names"):
        replace(unit, levels=(level, level))
    with pytest.raises(ValueError, match="either fixed or has the cost of a segment"):
        replace(unit, again=None, fixed="")
    with pytest.raises(ValueError, match="at least one unit"):
        Chain(())
    for name in ("square", "recursive", "uniform", "uniform:0", "uniform:3", "uniform:x"):
        with pytest.raises(ValueError, match="uniform:1 to 2 expected"):
            policy(chain, name)
    first = Keep(0, "level0")
    with pytest.raises(ValueError, match="starts at unit 1 was expected"):
        simulate(chain, [first, first])
    with pytest.raises(ValueError, match="covers 1 of 2 units"):
        simulate(chain, [first])
    with pytest.raises(ValueError, match="unit0 has no level 'preact'"):
        simulate(chain, [Keep(0, "preact"), Keep(1, "level0")])
    with pytest.raises(ValueError, match="a chain of less than"):
        solve(scaled(chain, 1 << 52), math.inf)


def integer_program(chain: Chain, limit: int) -> tuple[float, float]:
    """Return extra ms and a lower bound by HiGHS."""
    optimize = pytest.importorskip("scipy.optimize")
    sparse = pytest.importorskip("scipy.sparse")
    count = len(chain.units)
    # an item: its ends, what it keeps, its peak beyond all kept before, its time
    edges = []
    for i, start in enumerate(_starts_of(chain, count)):
        for stop, kept, need, ms in zip(*(column.tolist() for column in start), strict=True):
            edges.append((i, stop, kept, need, ms)) if need <= limit else None
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
