"""Plans for a chain, tried in whole steps: their peaks and their extra time are what these show.

Units are timed only to choose between plans. What the chosen one costs is the difference between
steps under it and steps that keep everything, in turns: whatever adds up in a step is in it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from statistics import median, quantiles
from types import MappingProxyType
from typing import NamedTuple

from fusedckpt.planning.budget import Policy, spare_bytes
from fusedckpt.planning.calls import Times, once, seconds, step_kind
from fusedckpt.planning.chain import Chain, Item, Keep, Outcome, Unit, simulate
from fusedckpt.planning.plan_record import PRODUCTS
from fusedckpt.planning.plans import Plan, structure_of
from fusedckpt.planning.policies import policy as by_rule
from fusedckpt.planning.solver import least_outcome, least_peak, may_go_lower, solve
from fusedckpt.reporting.memory_report import measure
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.tables import enough

__all__ = ["Trials"]

# plans tried for a budget before it is given up
_TRIES = 4
# a faster plan is worth one more step where it takes at most so much of the time
_GAIN = 0.97
# how far off the model of memory may be
_DOUBT = 1.1
# pairs of steps, as many as end within so many seconds: a few are no better than one, many enough
_SECONDS, _FEW, _PAIRS = 0.4, 3, 15
# what a plan costs is at least so much of what units take on their own: less is noise
_LEAST = 0.5


class Trials(NamedTuple):
    """Steps of a model that is such a chain, under plans with this title and limit.

    left_out: by name why modules are no units, or are never recomputed.
    """

    step: Step
    chain: Chain
    title: str
    limit: int | None = None
    left_out: Mapping[str, str] = MappingProxyType({})

    def _plan(self, solution: Outcome) -> Plan:
        model, names = self.step.model, [u.name for u in self.chain.units[1:-1] if not u.code]
        return Plan(
            type(model).__name__, self.title, self.limit, self.chain, solution.items,
            solution.peak, solution.extra, solution.lower_bound, left_out=dict(self.left_out),
            structure={x: structure_of(model.get_submodule(x)) for x in ["", *names]},
        )  # fmt: skip

    def tried(self, solution: Outcome) -> Plan:
        """Run a step under a plan, and write down its peak, and what it held unseen."""
        found = self._plan(solution)
        found.apply(self.step.model)
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
                return self._nearer(found, limit)
            # what the model of memory missed, it may miss again
            target = min(target, found.predicted_bytes) - excess
        # the model of memory rather takes too much than too little
        least = least_peak(chain)
        needed, spare = least.peak, spare_bytes(self.step.parameters()[0].device)
        # what may not fit the device at all is not run
        if least.peak <= max(_DOUBT * limit, chain.base + spare):
            tried = self._lowest()
            if fitting := [found for found in tried if _peak(found) <= limit]:
                return min(fitting, key=lambda found: found.extra_ms)
            needed = min(map(_peak, tried))
        finer = may_go_lower(chain, lowest)
        needed, kind = max(0, needed - rest), "activation budget" if rest else "budget"
        raise ValueError(
            f"plan: the least feasible {kind} is {needed} bytes ({enough(needed)}), "
            f"got {limit - rest} bytes" + (f": {finer}" if finer else "") + _left_out(self.left_out)
        )

    def _nearer(self, found: Plan, limit: int) -> Plan:
        """Return a faster plan that fits, too, where the model took too much for this one."""
        predicted, extra = found.predicted_bytes, found.extra_ms
        if not extra:
            return found
        over, lower = predicted - _peak(found), [least_outcome(self.chain), self._rule("sqrt")]
        # the fewer the bytes, the more time one buys
        gains = [(x.extra - extra) / (predicted - x.peak) for x in lower if x.peak < predicted]
        if over <= 0 or over * min(gains, default=math.inf) <= (1 - _GAIN) * extra:
            return found
        faster = solve(self.chain, limit + over)
        if faster.extra > _GAIN * extra:
            return found
        nearer = self.tried(faster)
        return nearer if _peak(nearer) <= limit else found

    def _rule(self, name: str) -> Outcome:
        rule, _, count = name.partition(":")
        if count:
            # fixed units are in no segment
            free = sum(not unit.fixed for unit in self.chain.units)
            name = f"{rule}:{max(1, min(int(count), free))}"
        return simulate(self.chain, by_rule(self.chain, name))

    def by_policy(self, policy: Policy) -> Plan:
        """Return the plan of a rule."""
        if policy == "memory":
            return min(self._lowest(), key=lambda found: (_peak(found), found.extra_ms))
        if policy == "speed":
            return self.tried(simulate(self.chain, _selective(self.chain, self.left_out)))
        # modules that were listed: each on its own
        return self.tried(self._rule(policy if isinstance(policy, str) else "all"))

    def _lowest(self) -> list[Plan]:
        """Try the plan of least peak, and rules that may come near it, or the limit.

        The model of memory may be off by more than what is between them.
        """
        least = least_peak(self.chain)
        rules = [self._rule(name) for name in ("all", "sqrt", "recursive", "none")]
        most = _DOUBT * max(least.peak, self.limit or 0)
        ways = [least, *(rule for rule in rules if rule.peak <= most)]
        # a way that is there twice is tried once
        distinct = {way.items: way for way in reversed(ways)}
        return [*map(self.tried, distinct.values())]

    def timed(self, found: Plan, forward: float) -> Plan:
        """Return the plan with what it costs in steps, where one that keeps everything fits.

        forward: ms that the model's forward took.
        """
        everything, pairs = self._rule("none"), list[tuple[Times, Times]]()
        device = self.step.parameters()[0].device
        if found.extra_ms and everything.peak - self.chain.base <= spare_bytes(device):
            plain = self._plan(everything)
            pairs = once((step_kind(self.step), found.items), lambda: self._pairs(plain, found))
            forward = median(theirs.forward for theirs, _ in pairs)
        adds = [mine.both - theirs.both for theirs, mine in pairs]
        if len(pairs) < _FEW:
            # one pair is noise, units on their own miss what adds up in a step
            adds.append(found.extra_ms)
        low, extra, high = quantiles(adds, n=4) if pairs else 3 * adds
        ratio = max(_LEAST, extra / found.extra_ms) if found.extra_ms else 1.0
        error, rounds = (high - low) / math.sqrt(len(adds)), len(pairs)
        if ratio * found.extra_ms < 2 * error:
            # steps cannot tell
            ratio, rounds = 1.0, 0
        return replace(_scaled(found, ratio, forward), rounds=rounds, error_ms=error)

    def _pairs(self, plain: Plan, found: Plan) -> list[tuple[Times, Times]]:
        """Return what steps of two plans take, in turns: what slows one down slows both."""
        pairs = [(self._ms(plain), self._ms(found))]
        count = int(1e3 * _SECONDS / sum(times.both for times in pairs[0]))
        more = min(count, _PAIRS) - 1 if count >= _FEW else 0
        return pairs + [(self._ms(plain), self._ms(found)) for _ in range(more)]

    def _ms(self, plan: Plan) -> Times:
        """Return what a step takes under a plan, without the optimizer's."""
        made, held = self.step.fresh()
        plan.apply(made.model)
        try:
            start = seconds(held[0].device)
            output = made.model(*made.args, **made.kwargs)
            middle = seconds(held[0].device)
            made.loss(output).backward()
            end = seconds(held[0].device)
        finally:
            plan.undo()
        return Times(1e3 * (middle - start), 1e3 * (end - start))


def _peak(found: Plan) -> int:
    assert found.measured_bytes is not None
    return found.measured_bytes


def _left_out(reasons: Mapping[str, str]) -> str:
    """Say which modules are never recomputed, by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    told = []
    for reason, alike in names.items():
        others = f" and {len(alike) - 1} other{'s' * (len(alike) > 2)}" if len(alike) > 1 else ""
        told.append(f"{alike[0]}{others} ({reason})")
    return f"; not planned: {', '.join(told)}" if told else ""


def _selective(chain: Chain, left_out: Container[str]) -> tuple[Item, ...]:
    """Save the outputs of products where a unit saves less that way.

    Not where the next unit writes into what it is given. A unit that is one linear would save its
    output beside its input, and an activation its input in place of its output.
    """
    overwritten = [
        unit.fixed and not unit.code and unit.name not in left_out for unit in chain.units[1:]
    ]
    return tuple(
        Keep(i, PRODUCTS if _saves_less(unit) and not spoilt else unit.levels[0].name)
        for i, (unit, spoilt) in enumerate(zip(chain.units, [*overwritten, False], strict=True))
    )


def _saves_less(unit: Unit) -> bool:
    """Whether a unit saves less if it saves the outputs of products."""
    return unit.has(PRODUCTS) and unit.level(PRODUCTS).kept < unit.levels[0].kept


def _scaled(found: Plan, ratio: float, forward: float) -> Plan:
    """Return the plan where all extra time is so many times what it was, and with that forward."""
    before, *units = found.chain.units
    # what is not in units, wherever it is; in calls of their own units may take longer
    rest = max(0.0, forward - found.chain.forward)
    share = forward / (found.chain.forward + rest)
    units = [
        replace(
            unit,
            forward=share * unit.forward,
            rerun=ratio * unit.again,
            tail=ratio * unit.tail,
            levels=tuple(replace(level, extra=ratio * level.extra) for level in unit.levels),
        )
        for unit in units
    ]
    chain = replace(found.chain, units=(replace(before, forward=rest), *units))
    extra, lower_bound = simulate(chain, found.items).extra, ratio * found.lower_bound_ms
    return replace(found, chain=chain, extra_ms=extra, lower_bound_ms=min(lower_bound, extra))
