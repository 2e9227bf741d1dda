"""Plans for a chain, tried in whole steps: these show their peaks and their extra time.

Units are timed only to choose between plans. The cost of the chosen one is the difference between
steps under it and steps that save everything, in turns: every cost that adds up in a step is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median, quantiles

from fusedckpt.planning.budget import Policy, spare_bytes
from fusedckpt.planning.chain import Chain, Item, Outcome, simulate
from fusedckpt.planning.changed_arguments import ADVICE, CHANGES
from fusedckpt.planning.measure import Measured
from fusedckpt.planning.meter import Times, once, peak_of, step_kind, times_of
from fusedckpt.planning.offloading import choose
from fusedckpt.planning.plans import Plan, structure_of
from fusedckpt.planning.roles import PRODUCTS
from fusedckpt.planning.solver import by_rule, least_peak, solve
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.tables import enough

# plans tried for a budget before it is given up
_TRIES = 4
# how far off a prediction may be
_DOUBT = 1.1
# pairs of steps, as many as end within so many seconds: a few are no better than one, many enough
_SECONDS, _FEW, _PAIRS = 0.25, 3, 15
# a plan costs at least so much of the extra ms of its units: less is noise
_LEAST = 0.5


@dataclass
class Trials:
    """Steps of a measured model under plans."""

    step: Step
    measured: Measured
    # the policy, as the plan prints it
    title: str
    # bytes that the peak of a step may have, None where a policy sets no limit
    limit: int | None
    # by name, why modules are no units, or are never recomputed
    left_out: Mapping[str, str]
    # why no segment offloads its input; None where this was not asked for
    declined: str | None = None

    @property
    def chain(self) -> Chain:
        """The units."""
        return self.measured.chain

    def _plan(self, solution: Outcome) -> Plan:
        model, names = self.step.model, [x for unit in self.chain.units for x in unit.modules]
        return Plan(
            type(model).__name__, self.title, self.limit, self.chain, solution.items,
            solution.peak, solution.extra, solution.lower_bound, left_out=dict(self.left_out),
            structure={x: structure_of(model.get_submodule(x)) for x in ["", *names]},
            offload=self.declined,
        )  # fmt: skip

    @contextmanager
    def _under(self, plan: Plan) -> Iterator[None]:
        plan.apply(self.step.model)
        try:
            yield
        finally:
            plan.undo()

    def tried(self, solution: Outcome) -> Plan:
        """Run a step under a plan; add its peak."""
        with self._under(plan := self._plan(solution)):
            return replace(plan, measured_bytes=peak_of(self.step))

    def within(self, limit: int, outside: int) -> Plan:
        """Return the fastest plan with a step that, when run, stays within the limit.

        outside: bytes of the limit that the caller's budget does not count. The budget of each
        search is lowered by what the step before it went beyond the limit.
        """
        chain, searched = self.chain, limit
        lowest = least_peak(chain)
        for _ in range(_TRIES):
            if searched < lowest.peak:
                break
            plan = self.tried(self._solved(searched))
            if (excess := _peak(plan) - limit) <= 0:
                return plan
            # the prediction may miss the same bytes again
            searched = min(searched, plan.predicted_bytes) - excess
        needed, spare = lowest.peak, spare_bytes(self.step.device)
        # a plan that may not fit the device at all is not run
        if lowest.peak <= max(_DOUBT * limit, chain.base + spare):
            plans = self._lowest()
            if fitting := [plan for plan in plans if _peak(plan) <= limit]:
                return min(fitting, key=lambda plan: plan.extra_ms)
            needed = min(map(_peak, plans))
        needed = max(0, needed - outside)
        kind = "activation budget" if outside else "budget"
        raise ValueError(
            f"plan: the least feasible {kind} is {needed} bytes ({enough(needed)}), "
            f"got {limit - outside} bytes; the peak is in the {lowest.where}, which units= of "
            f"modules inside may lower{_left_out(self.left_out)}"
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
            return self.tried(_selective(self.chain))
        # modules that were listed: each on its own
        return self.tried(by_rule(self.chain, policy if isinstance(policy, str) else "all"))

    def least(self) -> Plan:
        """Return the plan of the least measured peak."""
        return min(self._lowest(), key=lambda plan: (_peak(plan), plan.extra_ms))

    def _lowest(self) -> list[Plan]:
        """Try the plan of least peak, and rules that may come near it, or the limit."""
        least = least_peak(self.chain)
        rules = [by_rule(self.chain, name) for name in ("all", "sqrt", "none")]
        # the prediction may be off by more than the gap between them
        most = _DOUBT * max(least.peak, self.limit or 0)
        ways = [least, *(rule for rule in rules if rule.peak <= most)]
        # a way that is there twice is tried once
        distinct = {way.items: way for way in reversed(ways)}
        return [*map(self.tried, distinct.values())]

    def timed(self, plan: Plan) -> Plan:
        """Return the plan with its cost in steps, where one that saves everything fits."""
        everything, pairs = by_rule(self.chain, "none"), list[tuple[Times, Times]]()
        device, plain = self.step.device, self.measured.plain
        if plan.extra_ms and everything.peak - self.chain.base <= spare_bytes(device):
            key = step_kind(self.step), plan.items
            pairs = once(key, lambda: self._pairs(self._plan(everything), plan))
        forwards = [theirs.forward for theirs, _ in pairs] or [plain.forward if plain else 0.0]
        forward = median(forwards) or self.chain.forward_ms
        adds = [mine.both - theirs.both for theirs, mine in pairs]
        if len(pairs) < _FEW:
            # one pair is noise, units on their own miss costs that add up in a step
            adds.append(plan.extra_ms)
        low, extra, high = quantiles(adds, n=4) if pairs else 3 * adds
        ratio = max(_LEAST, extra / plan.extra_ms) if plan.extra_ms else 1.0
        error, rounds = (high - low) / math.sqrt(len(adds)), len(pairs)
        if ratio * plan.extra_ms < 2 * error:
            # steps cannot tell
            ratio, rounds = 1.0, 0
        chain = replace(plan.chain, slower=ratio)
        extra = simulate(chain, plan.items).extra
        return replace(
            plan, chain=chain, extra_ms=extra,
            lower_bound_ms=min(ratio * plan.lower_bound_ms, extra),
            rounds=rounds, error_ms=error, forward_ms=max(forward, plan.chain.forward_ms),
        )  # fmt: skip

    def _pairs(self, plain: Plan, plan: Plan) -> list[tuple[Times, Times]]:
        """Return the times of steps of two plans, in turns: other load slows both down."""
        theirs = self.measured.plain or self._ms(plain)
        pairs = [(theirs, self._ms(plan))]
        count = int(1e3 * _SECONDS / sum(times.both for times in pairs[0]))
        more = min(count, _PAIRS) - 1 if count >= _FEW else 0
        return pairs + [(self._ms(plain), self._ms(plan)) for _ in range(more)]

    def _ms(self, plan: Plan) -> Times:
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
    told = [
        f"{alike[0]}{f' and {len(alike) - 1} more' if alike[1:] else ''} ({reason})"
        for reason, alike in names.items()
    ]
    advice = f"; {ADVICE}" if any(reason.startswith(CHANGES) for reason in names) else ""
    return f"; not planned: {', '.join(told)}{advice}" if told else ""


def _selective(chain: Chain) -> Outcome:
    """Save the outputs of products where a unit saves less that way.

    A unit that is one linear would save its output beside its input.
    """
    items = []
    for i, unit in enumerate(chain.units):
        first = unit.levels[0]
        products = (x for x in unit.levels if x.name == PRODUCTS and x.kept < first.kept)
        items.append(Item(i, i + 1, next(products, first).name))
    return simulate(chain, items)
