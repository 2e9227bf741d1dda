"""The fastest way to train a model within a budget of bytes: measured, solved, and tried."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt import _roles
from fusedckpt._budget import bytes_of
from fusedckpt._step import Step, default_loss
from fusedckpt._text import size
from fusedckpt._unit_costs import PRODUCTS
from fusedckpt.chain import Chain, Item, Keep, simulate
from fusedckpt.costs import Survey, chain_of
from fusedckpt.plans import Plan
from fusedckpt.policies import policy as by_rule
from fusedckpt.reporting import MemoryReport, check_step, measure
from fusedckpt.solver import Solution, least_peak, solve
from fusedckpt.trial import aliased, tensors_of, trial
from fusedckpt.units import candidates, named

__all__ = ["plan"]

# plans tried for a budget before it is given up
_TRIES = 4


def plan(
    model: nn.Module,
    *args: Any,
    budget: int | float | str | None = None,
    activation_budget: int | float | str | None = None,
    policy: str | Sequence[str] = "budget",
    units: Iterable[str | nn.Module] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Plan:
    """Find the fastest way to run training steps of `model` within a budget of bytes.

        plan = fusedckpt.plan(model, tokens, budget="20GiB", optimizer=optimizer)
        print(plan)
        plan.apply(model)

    The model is cut into units, which run one after the other. Each is measured on the arguments
    that it gets, with what fused layers inside keep at every level; the units are then given
    levels, or run again in backward as segments, so that the peak of the step stays below the
    budget at the least extra time. At last one step is run under the plan, and its peak measured.
    Afterwards everything is as before (see `trial`).

    Args:
        model: any module; it must fit while one unit at a time keeps what it keeps.
        args, kwargs: what the model gets.
        budget: of the peak of a whole step: parameters, gradients, optimizer state, activations.
            Bytes, a size such as "20GiB", or a share of the device's memory, 0.0 to 1.0.
        activation_budget: the same without parameters, gradients and optimizer state.
        policy: "budget"; or, without a budget, "none" (keep everything), "all" (every unit runs
            again on its own), "sqrt", "uniform:k" (k segments), "memory" (the least peak that any
            plan reaches), "speed" (keep the outputs of matrix products and convolutions), or the
            names of modules to be run again, each on its own.
        units: the modules to plan, or their names, if not the children of every nn.Sequential and
            nn.ModuleList; where there are none, fused layers; else the model's own children.
        loss, optimizer: as in `report`.
        progress: show on stderr how many units are measured, where rich is installed.

    Returns:
        A Plan, not yet applied. Under torch.distributed that of rank 0.

    Raises:
        TypeError: `model` is no nn.Module, or as `report`.
        ValueError: no plan fits the budget (the message names the least that would), no module runs
            exactly once, or an argument is none of the above.
    """
    check_step("plan", model, loss, optimizer, (args, kwargs))
    names = _names(model, policy, units)
    parts = nn.ModuleList([model, loss]) if isinstance(loss, nn.Module) else model
    step = Step(model, args, kwargs, loss or default_loss, optimizer)
    device = next(iter([*model.parameters(), *tensors_of((args, kwargs))])).device
    limit = _limit(budget, activation_budget, policy, device)
    with trial(parts, optimizer, (args, kwargs)), torch.enable_grad():
        _fill(optimizer)
        chain, left_out = _chain(step, names, progress, selective=policy == "speed")
        if activation_budget is not None and limit is not None:
            limit += chain.base + sum(unit.left for unit in chain.units)
        if limit is None:
            found = _by_policy(policy, step, chain)
        else:
            found = _within(limit, step, chain)
    return _agreed(replace(found, left_out=left_out))


def _names(model: nn.Module, policy: Any, units: Any) -> list[str]:
    given = units if isinstance(policy, str) else policy
    return candidates(model) if given is None else named(model, given)


def _limit(budget: Any, activation_budget: Any, policy: Any, device: torch.device) -> int | None:
    given = [x for x in (budget, activation_budget) if x is not None]
    if len(given) != (policy == "budget"):
        raise ValueError(
            "plan: expected one of budget and activation_budget, or neither and another policy, "
            f"got {len(given)} and policy {policy!r}"
        )
    return bytes_of("plan", given[0], device) if given else None


def _fill(optimizer: Optimizer | None) -> None:
    """Let an optimizer make its state, which is there in every step but the first."""
    if optimizer is None or optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def _chain(
    step: Step, names: Sequence[str], progress: bool, selective: bool
) -> tuple[Chain, dict[str, str]]:
    """Measure the units that run exactly once, in the order in which they run; say why not others."""
    modules = {name: step.model.get_submodule(name) for name in names}
    with _ticking(len(modules), progress) as tick:
        survey = Survey(tick, selective)
        try:
            for name, module in modules.items():
                _roles.assign(module, survey.probe(name, module))
            args, kwargs = aliased((step.args, step.kwargs))
            step.model(*args, **kwargs)
        finally:
            for module in modules.values():
                if _roles.is_assigned(module):
                    _roles.release(module)
    left_out = survey.left_out(names)
    if len(left_out) == len(names):
        reasons = "; ".join(f"{name} {why}" for name, why in left_out.items())
        raise ValueError(
            f"plan: expected a unit in {type(step.model).__name__} that runs exactly once, name some "
            f"with units=: {reasons or 'it has no parts'}"
        )
    return chain_of(step, survey.units()), left_out


@contextmanager
def _ticking(total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """Yield what is to be called for every unit that is done."""
    if not progress or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    console = importlib.import_module("rich.console").Console(stderr=True)
    with importlib.import_module("rich.progress").Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring units", total=total)
        yield lambda: bar.advance(task)


def _within(limit: int, step: Step, chain: Chain) -> Plan:
    """Return the fastest plan whose step, when run, stays within the limit."""
    least, target = least_peak(chain), limit
    for _ in range(_TRIES):
        if target < least.peak:
            break
        found = _plan(step, "budget", chain, solve(chain, target), limit)
        tried = _tried(step, found)
        if tried.peak_bytes <= limit:
            return replace(found, measured_bytes=tried.peak_bytes)
        if tried.peak.phase == "optimizer":
            raise ValueError(
                f"plan: the optimizer's step takes {tried.peak_bytes} bytes, the budget is {limit}"
            )
        # what the model of memory missed, it may miss again
        target = min(target, found.predicted_bytes) - (tried.peak_bytes - limit)
    feasible = least.peak + limit - target
    raise ValueError(
        f"plan: the least feasible budget is {feasible} bytes ({size(feasible)}), got {limit} bytes"
    )


def _by_policy(policy: str | Sequence[str], step: Step, chain: Chain) -> Plan:
    """Return the plan of a rule, with the peak of a step under it."""
    if policy == "memory":
        found = _plan(step, "memory", chain, least_peak(chain))
    else:
        rule = policy if isinstance(policy, str) else "all"
        items = _selective(chain) if rule == "speed" else by_rule(chain, rule)
        outcome = simulate(chain, items)
        name = rule if rule == policy else f"again: {', '.join(policy)}"
        found = _plan(step, name, chain, Solution(items, outcome.peak, outcome.extra, 0.0))
    return replace(found, measured_bytes=_tried(step, found).peak_bytes)


def _plan(
    step: Step, policy: str, chain: Chain, solution: Solution, limit: int | None = None
) -> Plan:
    costs = solution.peak, solution.extra, solution.lower_bound
    return Plan(type(step.model).__name__, policy, limit, chain, solution.items, *costs)


def _tried(step: Step, found: Plan) -> MemoryReport:
    """Run a step under the plan."""
    found.apply(step.model)
    try:
        return measure(step)
    finally:
        found.undo()


def _selective(chain: Chain) -> tuple[Item, ...]:
    """Keep the outputs of products, but where the next unit writes into what it is given."""
    overwritten = [unit.fixed and unit.input > 0 for unit in chain.units[1:]]
    return tuple(
        Keep(i, PRODUCTS if unit.has(PRODUCTS) and not spoilt else unit.levels[0].name)
        for i, (unit, spoilt) in enumerate(zip(chain.units, [*overwritten, False], strict=True))
    )


def _agreed(found: Plan) -> Plan:
    """Return rank 0's plan, so that all ranks run the same collectives in the same order."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return found
    plans = [found]
    dist.broadcast_object_list(plans, src=0)
    return plans[0]
