"""Plans against brute force in another simulator, by rule, and at the sizes that models have."""

import itertools
import math
import random
from dataclasses import fields, replace

import numpy as np
import pytest
from random_chains import llama_like, random_chain
from support import calls

from fusedckpt.planning.chain import Chain, Item, Level, Unit, simulate
from fusedckpt.planning.rules import by_rule
from fusedckpt.planning.solver import least_peak, solve
from fusedckpt.planning.starts import starts_of


def every_plan(chain: Chain):
    """Yield all plans, as items."""
    count = len(chain.units)
    for cuts in itertools.product((False, True), repeat=count - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [count]
        choices = []
        for start, stop in zip([0, *ends], ends, strict=False):
            first, *others = chain.units[start:stop]
            may = not first.fixed and all(unit.joined for unit in others)
            choice = [Item(start, stop)] if may else []
            if stop == start + 1:
                choice += [Item(start, start + 1, level.name) for level in first.levels]
            choices.append(choice)
        yield from itertools.product(*choices)


def saves(chain: Chain, item: Item, constant: int) -> bool:
    """Whether an item saves a shared constant."""
    unsaved = () if item.level is None else chain.units[item.start].level(item.level).unsaved_shared
    units = chain.units[item.start : item.stop]
    return constant not in unsaved and any(constant in unit.shared for unit in units)


def gone_by(chain: Chain, items, start: int) -> int:
    """Return the bytes of shared constants that no item saves, of those up to one at `start`."""
    earlier = [item for item in items if item.start <= start]
    return sum(
        constant.nbytes
        for k, constant in enumerate(chain.shared)
        if constant.since <= start and not any(saves(chain, item, k) for item in earlier)
    )


def replay(chain: Chain, items) -> tuple[int, float]:
    """Return peak and extra time of a plan, from the tensors that live in every phase."""
    # by unit, bytes more than in a step in which every unit is in a checkpoint of its own
    more, peaks, extra = [0] * len(chain.units), [chain.peak_before, chain.peak_after], 0.0
    # by unit, random states and arguments that live as long as its segment
    lasting = [chain.random_state_bytes + unit.unsaved_constants for unit in chain.units]
    for item in items:
        for i in range(item.start, item.stop):
            unit = chain.units[i]
            level = unit.recomputed if item.level is None else unit.level(item.level)
            assert level is not None
            peaks.append(level.forward_peak + sum(more[:i]))
            is_inside = item.level is None and i > item.start
            more[i] = -unit.freed_in_segment if is_inside else level.added_bytes
            peaks.append(unit.peak_until_next + sum(more[: i + 1]))
    peaks.append(chain.peak_returned + sum(more) - gone_by(chain, items, len(more) - 1))
    for item in items[::-1]:
        gone = gone_by(chain, items, item.start)
        if item.level is not None:
            level = chain.units[item.start].level(item.level)
            peaks.append(level.backward_peak + sum(more[: item.start]) - gone)
            extra += level.extra_ms
            continue
        last = item.stop - 1
        # its argument, whatever the first unit saves
        held = chain.units[item.start].unsaved_input if last > item.start else 0
        more[0] += held
        for i in range(item.start, last):
            unit = chain.units[i]
            runs = unit.in_segment.forward_peak - unit.live_at_begin
            live = chain.units[last].live_at_gradient - gone
            peaks.append(live + sum(more[: last + 1]) + runs)
            # it has its intermediates again, beside what the segment keeps; the next one its input
            more[i] += unit.in_segment.added_bytes + lasting[i]
            more[i + 1] += chain.units[i + 1].freed_in_segment
            extra += unit.forward_ms
        end = chain.units[last]
        backward = end.recomputed.backward_peak
        if last > item.start and end.unsaved_input:
            runs = end.live_at_gradient + end.in_segment.forward_peak - end.live_at_begin
            backward = min(backward, max(runs, end.in_segment.backward_peak + lasting[last]))
        peaks.append(backward + sum(more[:last]) - gone)
        extra += chain.units[last].recomputed.extra_ms
        for i in reversed(range(item.start, last)):
            held_until_the_end = held * (i == 0) + sum(lasting[i : last + 1]) - gone
            held_until_the_end += sum(x.first_saved for x in chain.units[i + 1 : last + 1])
            peaks.append(
                chain.units[i].in_segment.backward_peak + sum(more[:i]) + held_until_the_end
            )
        more[0] -= held
    return max(peaks), extra


def test_the_simulator_and_the_solver_agree_with_a_replay_of_every_plan():
    draw = random.Random(2)
    for number in range(100):
        chain = random_chain(draw, 1 + number % 4 if number < 94 else 5)
        plans = [(items, replay(chain, items)) for items in every_plan(chain)]
        for items, outcome in plans[:: 1 + len(plans) // 20]:
            found = simulate(chain, items)
            assert (found.peak_bytes, found.extra_ms) == pytest.approx(outcome)
        outcomes = [outcome for _, outcome in plans]
        least, most = min(outcomes)[0], max(outcomes)[0]
        plan = least_peak(chain)
        assert (plan.peak_bytes, plan.extra_ms) == pytest.approx(min(outcomes))
        with pytest.raises(ValueError, match=f"is {least} bytes, got {least - 1}"):
            solve(chain, least - 1)
        for budget in (least, draw.randint(least, most), (least + most) // 2):
            plan = solve(chain, budget)
            expected = min(extra for peak, extra in outcomes if peak <= budget)
            assert replay(chain, plan.items) == pytest.approx((plan.peak_bytes, plan.extra_ms))
            assert plan.peak_bytes <= budget
            assert (plan.extra_ms, plan.lower_bound_ms) == pytest.approx((expected, expected))


def test_a_peak_worked_out_by_hand():
    """Two units with inputs of 4 and 5 bytes, of which a step holds 100 bytes anyway."""
    again = Level("again", 0, 3.0, 110, 121), Level("again", 0, 1.0, 115, 120)
    levels = Level("plain", 6, 0.0, 116, 118), Level("plain", 3, 0.0, 117, 119)
    a = Unit("a", levels[:1], again[0], levels[0], 3.0, 4, 0, 104, 111, 110)
    b = Unit("b", levels[1:], again[1], levels[1], 2.0, 5, 5, 109, 112, 110, joined=True)
    chain = Chain((a, b), resident_bytes=100)
    for items, expected in (
        # b's backward, and the 6 bytes of a
        ([Item(0, 1, "plain"), Item(1, 2, "plain")], (125, 0, "backward of b")),
        ([Item(0, 1), Item(1, 2)], (121, 4, "recompute of a")),
        # b's recompute and backward, and the 6 bytes of a, which ran again before it
        ([Item(0, 2)], (126, 4, "recompute of b")),
    ):
        found = simulate(chain, items)
        assert (found.peak_bytes, found.extra_ms, found.where) == expected
        slower = simulate(replace(chain, slowdown=2.0), items)
        assert (slower.peak_bytes, slower.extra_ms) == (found.peak_bytes, 2 * found.extra_ms)
        assert solve(replace(chain, slowdown=2.0), found.peak_bytes).extra_ms <= slower.extra_ms
    for wrong, told in (
        ([Item(0, 1), Item(0, 1)], "expected an item that starts at unit 1"),
        ([Item(0, 1)], "covers 1 of 2 units"),
        ([Item(0, 1, "preact"), Item(1, 2)], "a has no level 'preact'"),
        ([Item(0, 2, "plain")], "may be in one segment"),
    ):
        with pytest.raises(ValueError, match=told):
            simulate(chain, wrong)
    with pytest.raises(ValueError, match="may be in one segment"):
        simulate(Chain((a, replace(b, joined=False))), [Item(0, 2)])


@pytest.mark.parametrize("count", [1, 6, 30])
def test_more_budget_never_costs_time(count):
    for chain in (random_chain(random.Random(count), count, most=10**6), llama_like(count)):
        least, most = least_peak(chain).peak_bytes, by_rule(chain, "none").peak_bytes
        budgets = [least + (most - least) * share // 12 for share in range(14)]
        plans = [*(solve(chain, budget) for budget in budgets), solve(chain, math.inf)]
        extras = [plan.extra_ms for plan in plans]
        assert extras == sorted(extras, reverse=True)
        assert (extras[-1], plans[0].peak_bytes) == (0, least)
        rule = by_rule(chain, "sqrt")
        assert solve(chain, rule.peak_bytes).extra_ms <= rule.extra_ms
    with pytest.raises(ValueError, match=f"least feasible budget is {least} bytes, got nan"):
        solve(chain, math.nan)


def scaled(chain: Chain, by: int) -> Chain:
    """Return a chain with all bytes multiplied."""

    def times(record):
        names = [field.name for field in fields(record) if field.type == "int"]
        return replace(record, **{name: by * getattr(record, name) for name in names})

    units = [
        replace(
            times(unit),
            levels=tuple(map(times, unit.levels)),
            recomputed=unit.recomputed and times(unit.recomputed),
            in_segment=times(unit.in_segment),
        )
        for unit in chain.units
    ]
    return replace(times(chain), units=tuple(units))


def test_bytes_have_no_unit():
    draw = random.Random(7)
    for count in (5, 20, 60):
        chain = random_chain(draw, count, most=10**4)
        budget = (least_peak(chain).peak_bytes + by_rule(chain, "none").peak_bytes) // 2
        plan, larger = solve(chain, budget), solve(scaled(chain, 977), 977 * budget)
        assert larger.extra_ms == pytest.approx(plan.extra_ms, rel=1e-9)
        assert larger.peak_bytes <= 977 * budget


@pytest.mark.parametrize(
    ("count", "most", "noise"),
    [(100, 1_000_000, 0.1), (100, 1_000_000, 0.0), (400, 4_000_000, 0.0)],
)
def test_is_quick_and_near_the_bound(count, most, noise):
    chain = llama_like(count, noise)
    budget = by_rule(chain, "none").peak_bytes // 4
    found = []
    # a million calls take about two seconds
    assert calls(lambda: found.append(solve(chain, budget))) < most
    (plan,) = found
    assert plan.peak_bytes <= budget
    assert 0 < plan.lower_bound_ms <= plan.extra_ms <= 1.002 * plan.lower_bound_ms
    if count == 100:
        rule = by_rule(chain, "sqrt")
        assert solve(chain, rule.peak_bytes).extra_ms < 0.85 * rule.extra_ms


def test_bounds_hold_where_ways_are_dropped():
    draw = random.Random(9)
    for _ in range(60):
        chain = random_chain(draw, draw.randint(4, 7))
        least, most = least_peak(chain).peak_bytes, by_rule(chain, "none").peak_bytes
        budget = (2 * least + max(least, most)) // 3
        exact = solve(chain, budget)
        narrow = solve(chain, budget, widths=(2,))
        assert exact.lower_bound_ms == exact.extra_ms
        assert narrow.lower_bound_ms <= exact.extra_ms + 1e-9
        assert exact.extra_ms <= narrow.extra_ms + 1e-9


def integer_program(chain: Chain, limit: int) -> tuple[float, float]:
    """Return extra ms and a lower bound by HiGHS."""
    optimize = pytest.importorskip("scipy.optimize")
    sparse = pytest.importorskip("scipy.sparse")
    count = len(chain.units)
    # an item: its ends, what it keeps, its peak beyond all kept before, its time
    edges = []
    for i, start in enumerate(starts_of(chain, count)):
        for stop, kept, need, ms in zip(*(column.tolist() for column in start[:4]), strict=True):
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
    budget = int(share * by_rule(chain, "none").peak_bytes)
    plan = solve(chain, budget)
    best, bound = integer_program(chain, budget)
    # its plans are some of ours: none beats our bound, nor our plan by more than our gap
    assert best >= plan.lower_bound_ms * (1 - 1e-9)
    assert plan.extra_ms <= best + (plan.extra_ms - plan.lower_bound_ms) + 1e-9
    assert bound <= best


def chain_of(count, fixed=(), apart=()):
    """Return a chain whose units are joined but for fixed ones, and those apart."""
    chain = random_chain(random.Random(10), count)
    units = [
        replace(
            unit,
            fixed="modifies its input" if i in fixed else "",
            recomputed=None if i in fixed else Level("again", 0, 1.0, 1, 1),
            joined=i > 0 and not {i - 1, i} & {*fixed} and i not in apart,
        )
        for i, unit in enumerate(chain.units)
    ]
    return replace(chain, units=tuple(units))


@pytest.mark.parametrize(
    ("chain", "name", "starts"),
    [
        (chain_of(17), "none", range(17)),
        (chain_of(17), "all", range(17)),
        (chain_of(17), "uniform:1", [0]),
        (chain_of(17), "uniform:5", [0, 3, 6, 10, 13]),
        (chain_of(17), "uniform:99", range(17)),
        (chain_of(9, fixed={0, 4, 8}), "none", range(9)),
        (chain_of(9, fixed={0, 4, 8}), "all", range(9)),
        (chain_of(9, fixed={0, 4, 8}), "uniform:1", [0, 1, 4, 5, 8]),
        (chain_of(6, apart={3}), "uniform:1", [0, 3]),
        (chain_of(3, fixed=range(3)), "sqrt", range(3)),
    ],
)
def test_rules(chain, name, starts):
    items = by_rule(chain, name).items
    assert [item.start for item in items] == [*starts]
    kept = [item.level is not None for item in items]
    assert kept == [name == "none" or bool(chain.units[item.start].fixed) for item in items]


def test_sqrt_balances_bytes():
    kept = [1] * 12 + [12] * 4
    units = [
        replace(unit, input_bytes=0, levels=(Level("plain", k, 0.0, 1, 1),))
        for unit, k in zip(chain_of(16).units, kept, strict=True)
    ]
    items = by_rule(Chain(tuple(units)), "sqrt").items
    assert len(items) <= 4
    # 60 bytes in four segments, of which single units take 12
    assert max(sum(kept[item.start : item.stop]) for item in items) == 24
