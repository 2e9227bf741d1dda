"""Plans for a chain, tried in whole steps: these show their peaks and their extra time.

Units are timed only to choose between plans. The extra time of the chosen plan is the difference
between steps under it and steps that save everything, in turns: every cost of a step counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import NamedTuple

from fusedckpt.planning.budget import Policy, spare_bytes
from fusedckpt.planning.chain import Chain, Item, Outcome, simulate
from fusedckpt.planning.changed_arguments import ADVICE, CHANGES
from fusedckpt.planning.measure import MeasuredChain
from fusedckpt.planning.offloading import choose
from fusedckpt.planning.plans import Plan, structure_of
from fusedckpt.planning.roles import PRODUCTS
from fusedckpt.planning.rules import by_rule
from fusedckpt.planning.solver import least_peak, solve
from fusedckpt.planning.whole_steps import Times, once, peak_of, step_kind, times_of
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.tables import enough

# plans tried for a budget before it is given up
_TRIES = 4
# a measured peak may be this many times the predicted one
_DOUBT = 1.1
# the seconds within which pairs of steps must end
_SECONDS = 0.25
# with fewer pairs than this, one pair is run
_FEW = 3
# the most pairs of steps
_PAIRS = 15
# a plan costs at least this share of the extra ms of its units: less is noise
_LEAST = 0.5


class StepPair(NamedTuple):
    """The times of two steps, one after the other."""

    # the times of a step that saves everything
    plain: Times
    # the times of a step under the plan
    planned: Times


@dataclass
class Trials:
    """Steps of a measured model under plans."""

    # the model's chain, and a step without a plan
    measured: MeasuredChain
    # the policy, as the plan prints it
    title: str
    # the most bytes that the peak of a step may have, None where a policy sets no limit
    limit: int | None
    # by name of a module, why it is no unit, or is never recomputed
    left_out: Mapping[str, str]
    # why no segment offloads its input; None without offload=True
    declined: str | None = None

    @property
    def chain(self) -> Chain:
        """The units."""
        return self.measured.chain

    @property
    def step(self) -> Step:
        """A step of the model without a plan."""
        return self.measured.step

    def _plan(self, outcome: Outcome) -> Plan:
        model = self.step.model
        names = ["", *(name for unit in self.chain.units for name in unit.modules)]
        return Plan(
            model=type(model).__name__,
            policy=self.title,
            budget_bytes=self.limit,
            chain=self.chain,
            items=outcome.items,
            predicted_bytes=outcome.peak_bytes,
            extra_ms=outcome.extra_ms,
            lower_bound_ms=outcome.lower_bound_ms,
            left_out=dict(self.left_out),
            structure={name: structure_of(model.get_submodule(name)) for name in names},
            offload=self.declined,
        )

    @contextmanager
    def _under(self, plan: Plan) -> Iterator[None]:
        plan.apply(self.step.model)
        try:
            yield
        finally:
            plan.undo()

    def try_plan(self, outcome: Outcome) -> Plan:
        """Run a step under a plan; return the plan with the peak of that step."""
        plan = self._plan(outcome)
        with self._under(plan):
            return replace(plan, measured_bytes=peak_of(self.step))

    def within(self, limit: int, outside: int) -> Plan:
        """Return the fastest plan with a step that, when run, stays within the limit.

        outside: bytes of the limit that the caller's budget does not count. The budget of each
        search is lowered by the bytes by which the step before it went beyond the limit.
        """
        chain = self.chain
        searched = limit
        lowest = least_peak(chain)
        for _ in range(_TRIES):
            if searched < lowest.peak_bytes:
                break
            plan = self.try_plan(self._solved(searched))
            if (excess := _peak(plan) - limit) <= 0:
                return plan
            # the prediction may miss the same bytes again
            searched = min(searched, plan.predicted_bytes) - excess
        needed = lowest.peak_bytes
        spare = spare_bytes(self.step.device)
        # a plan that may not fit the device at all is not run
        if needed <= max(_DOUBT * limit, chain.resident_bytes + spare):
            plans = self._lowest()
            if fitting := [plan for plan in plans if _peak(plan) <= limit]:
                return min(fitting, key=lambda plan: plan.extra_ms)
            needed = min(map(_peak, plans))
        needed = max(0, needed - outside)
        kind = "activation budget" if outside else "budget"
        raise ValueError(
            f"plan: the least feasible {kind} is {needed} bytes ({enough(needed)}), "
            f"got {limit - outside} bytes; the peak is in the {lowest.where}: raise the budget, or "
            f"name modules inside in units={_left_out(self.left_out)}"
        )

    def _solved(self, limit: float) -> Outcome:
        """Return the fastest plan within a limit."""
        if not self.chain.to_host:
            return solve(self.chain, limit)
        outcome, self.declined = choose(self.chain, limit)
        return outcome

    def by_policy(self, policy: Policy) -> Plan:
        """Return the plan of a rule."""
        if policy == "memory":
            return self.least()
        if policy == "speed":
            return self.try_plan(_saving_products(self.chain))
        # modules that were listed: each on its own
        return self.try_plan(by_rule(self.chain, policy if isinstance(policy, str) else "all"))

    def least(self) -> Plan:
        """Return the plan of the least measured peak."""
        return min(self._lowest(), key=lambda plan: (_peak(plan), plan.extra_ms))

    def _lowest(self) -> list[Plan]:
        """Try the plan of least peak, and rules that may come near it, or the limit."""
        least = least_peak(self.chain)
        rules = [by_rule(self.chain, name) for name in ("all", "sqrt", "none")]
        # the prediction may be off by more than the gap between them
        most = _DOUBT * max(least.peak_bytes, self.limit or 0)
        outcomes = [least, *(rule for rule in rules if rule.peak_bytes <= most)]
        # equal plans are tried once
        distinct = {outcome.items: outcome for outcome in reversed(outcomes)}
        return [*map(self.try_plan, distinct.values())]

    def timed(self, plan: Plan) -> Plan:
        """Return the plan with its extra ms in whole steps, predicted where these may not fit."""
        pairs = self._pairs(plan)
        # one pair is noise, units on their own miss costs that add up in a step
        predicted = [plan.extra_ms] if len(pairs) < _FEW else []
        extras = [pair.planned.step_ms - pair.plain.step_ms for pair in pairs] + predicted
        low, extra, high = quantiles(extras, n=4) if pairs else 3 * extras
        error = (high - low) / math.sqrt(len(extras))
        slowdown = max(_LEAST, extra / plan.extra_ms) if plan.extra_ms else 1.0
        rounds = len(pairs)
        if slowdown * plan.extra_ms < 2 * error:
            # the steps differ by too much to tell
            slowdown = 1.0
            rounds = 0
        chain = replace(plan.chain, slowdown=slowdown)
        extra = simulate(chain, plan.items).extra_ms
        return replace(
            plan,
            chain=chain,
            extra_ms=extra,
            lower_bound_ms=min(slowdown * plan.lower_bound_ms, extra),
            rounds=rounds,
            error_ms=error,
            forward_ms=self._forward_ms(pairs),
        )

    def _forward_ms(self, pairs: Sequence[StepPair]) -> float:
        """Return the ms of the model's forward, no less than those of its units."""
        plain = self.measured.plain
        measured = median(
            [pair.plain.forward_ms for pair in pairs] or [plain.forward_ms if plain else 0.0]
        )
        return max(measured, self.chain.forward_ms)

    def _pairs(self, plan: Plan) -> list[StepPair]:
        """Time steps that save everything and steps under a plan, in turns; none that may not fit.

        In turns, as other load of the machine slows both down.
        """
        everything = by_rule(self.chain, "none")
        may_fit = everything.peak_bytes - self.chain.resident_bytes <= spare_bytes(self.step.device)
        if not (plan.extra_ms and may_fit):
            return []
        key = step_kind(self.step), plan.items
        return once(key, lambda: self._timed_pairs(self._plan(everything), plan))

    def _timed_pairs(self, plain: Plan, plan: Plan) -> list[StepPair]:
        pairs = [StepPair(self.measured.plain or self._times(plain), self._times(plan))]
        count = int(1e3 * _SECONDS / sum(times.step_ms for times in pairs[0]))
        more = min(count, _PAIRS) - 1 if count >= _FEW else 0
        pairs += [StepPair(self._times(plain), self._times(plan)) for _ in range(more)]
        return pairs

    def _times(self, plan: Plan) -> Times:
        with self._under(plan):
            return times_of(self.step)


def _peak(plan: Plan) -> int:
    assert plan.measured_bytes is not None
    return plan.measured_bytes


def _left_out(reasons: Mapping[str, str]) -> str:
    """Say which modules are never recomputed, by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    clauses = [
        f"{alike[0]}{f' and {len(alike) - 1} more' if alike[1:] else ''} ({reason})"
        for reason, alike in names.items()
    ]
    advice = f"; {ADVICE}" if any(reason.startswith(CHANGES) for reason in names) else ""
    return f"; not planned: {', '.join(clauses)}{advice}" if clauses else ""


def _saving_products(chain: Chain) -> Outcome:
    """Save the outputs of products where a unit saves less that way.

    A unit that is one linear would save its output beside its input.
    """
    items = []
    for i, unit in enumerate(chain.units):
        first = unit.levels[0]
        level = next((x for x in unit.levels if x.name == PRODUCTS), first)
        saves_less = level.added_bytes < first.added_bytes
        items.append(Item(i, i + 1, level.name if saves_less else first.name))
    return simulate(chain, items)
