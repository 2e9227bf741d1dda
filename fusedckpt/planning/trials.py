"""Plans for a chain, tried in whole steps: their peaks and their extra time are what these show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

from fusedckpt.planning.budget import Policy
from fusedckpt.planning.calls import once, repeated, seconds, step_kind
from fusedckpt.planning.chain import Chain, Item, Keep, Outcome, Segment, simulate
from fusedckpt.planning.plan_record import BUT, PRODUCTS, level_and_parts
from fusedckpt.planning.plans import Plan, structure_of
from fusedckpt.planning.policies import policy as by_rule
from fusedckpt.planning.roles import recomputes_timed
from fusedckpt.planning.solver import least_outcome, least_peak, may_go_lower, solve
from fusedckpt.reporting.memory_report import measure
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.tables import enough

__all__ = ["Trials"]

# plans tried for a budget before it is given up
_TRIES = 4
# how far off the model of memory may be
_DOUBT = 1.1
# steps that are timed go on for so many seconds, and so many at most
_SECONDS, _STEPS = 0.1, 5


class Trials(NamedTuple):
    """Steps of a model that is such a chain, under plans with this title and limit."""

    step: Step
    chain: Chain
    title: str
    limit: int | None = None

    def tried(self, solution: Outcome) -> Plan:
        """Run a step under a plan, and write down its peak, and what it held unseen."""
        model, names = self.step.model, [u.name for u in self.chain.units[1:-1] if not u.code]
        found = Plan(
            type(model).__name__, self.title, self.limit, self.chain, solution.items,
            solution.peak, solution.extra, solution.lower_bound,
            structure={x: structure_of(model.get_submodule(x)) for x in ["", *names]},
        )  # fmt: skip
        found.apply(model)
        try:
            measured = measure(self.step)
        finally:
            found.undo()
        return replace(found, measured_bytes=measured.peak_bytes, held=measured.held)

    def within(self, limit: int, rest: int) -> Plan:
        """Return the fastest plan whose step, when run, stays within the limit.

        rest: what of the limit the caller did not ask for.
        """
        chain, target = self.chain, limit
        lowest = least_outcome(chain)
        for _ in range(_TRIES):
            if target < lowest.peak:
                break
            found = self.tried(solve(chain, target))
            if (excess := _peak(found) - limit) <= 0:
                return found
            # what the model of memory missed, it may miss again
            target = min(target, found.predicted_bytes) - excess
        # the model of memory rather takes too much than too little; what it finds far too large may
        # not fit the device at all, and is not run
        least = least_peak(chain)
        last = [x for x in (least, self._rule("none")) if x.peak <= _DOUBT * limit]
        found = min(map(self.tried, last), key=_peak, default=None)
        needed = least.peak if found is None else _peak(found)
        if found is not None and needed <= limit:
            return found
        finer = may_go_lower(chain, lowest)
        needed, kind = max(0, needed - rest), "activation budget" if rest else "budget"
        raise ValueError(
            f"plan: the least feasible {kind} is {needed} bytes ({enough(needed)}), "
            f"got {limit - rest} bytes" + (f": {finer}" if finer else "")
        )

    def _rule(self, name: str) -> Outcome:
        return simulate(self.chain, by_rule(self.chain, name))

    def by_policy(self, policy: Policy) -> Plan:
        """Return the plan of a rule."""
        if policy == "memory":
            return self._least()
        if policy == "speed":
            return self.tried(simulate(self.chain, _selective(self.chain)))
        # modules that were listed: each on its own
        return self.tried(self._rule(policy if isinstance(policy, str) else "all"))

    def _least(self) -> Plan:
        """Return, of the plan of least peak and rules that may come near, the one that does.

        The model of memory may be off by more than what is between them.
        """
        least = least_peak(self.chain)
        rules = [self._rule(name) for name in ("all", "sqrt", "none")]
        ways = [least, *(rule for rule in rules if rule.peak <= _DOUBT * least.peak)]
        # a way that is there twice is tried once
        distinct = {way.items: way for way in reversed(ways)}
        tried = map(self.tried, distinct.values())
        return min(tried, key=lambda found: (_peak(found), found.extra_ms))

    def timed(self, found: Plan, packing: Mapping[str, float]) -> Plan:
        """Return the plan with the time that its recomputes take in steps under it.

        packing: ms that a unit takes more in a segment besides.
        """
        modelled = sum(_recompute_ms(self.chain, item, packing) for item in found.items)
        if not modelled:
            return found
        found.apply(self.step.model)
        try:
            spent = once((step_kind(self.step), found.items), lambda: _recomputes(self.step))
        finally:
            found.undo()
        return _scaled(found, 1 + (spent - modelled) / found.extra_ms)


def _peak(found: Plan) -> int:
    assert found.measured_bytes is not None
    return found.measured_bytes


def _selective(chain: Chain) -> tuple[Item, ...]:
    """Keep the outputs of products, but where the next unit writes into what it is given."""
    overwritten = [unit.fixed and not unit.code for unit in chain.units[1:]]
    return tuple(
        Keep(i, PRODUCTS if unit.has(PRODUCTS) and not spoilt else unit.levels[0].name)
        for i, (unit, spoilt) in enumerate(zip(chain.units, [*overwritten, False], strict=True))
    )


def _recompute_ms(chain: Chain, item: Item, packing: Mapping[str, float]) -> float:
    """Return the ms that the recompute of an item takes, as units were measured."""
    units = chain.units[item.start : item.stop]
    if isinstance(item, Segment):
        return sum(unit.again - packing[unit.name] for unit in units) - units[-1].tail
    if BUT not in item.level:
        return 0.0
    level, kept = (units[0].level(x) for x in (item.level, level_and_parts(item.level)[0]))
    return level.extra - kept.extra


def _recomputes(step: Step) -> float:
    """Return the ms that recomputes take in a step."""
    clock = partial(seconds, step.parameters()[0].device)

    def spent() -> float:
        made, _ = step.fresh()
        loss = made.loss(made.model(*made.args, **made.kwargs))
        with recomputes_timed(clock) as times:
            loss.backward()
        return 1e3 * sum(times)

    return median(repeated(spent, _SECONDS, _STEPS))


def _scaled(found: Plan, ratio: float) -> Plan:
    """Return the plan where all extra time is so many times what it was."""
    units = tuple(
        replace(
            unit,
            rerun=ratio * unit.again,
            tail=ratio * unit.tail,
            levels=tuple(replace(level, extra=ratio * level.extra) for level in unit.levels),
        )
        for unit in found.chain.units
    )
    chain = replace(found.chain, units=units)
    extra, lower_bound = simulate(chain, found.items).extra, ratio * found.lower_bound_ms
    return replace(found, chain=chain, extra_ms=extra, lower_bound_ms=min(lower_bound, extra))
