"""The fastest way to train a model within a budget of bytes: measured, solved, and tried."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.planning.budget import Policy, limit_of
from fusedckpt.planning.chain import Chain
from fusedckpt.planning.code_between import chain_of
from fusedckpt.planning.plans import Plan
from fusedckpt.planning.ranks import Group, facts_of, group_of, together
from fusedckpt.planning.solver import least_outcome, solve
from fusedckpt.planning.survey import Kinds, Survey, ticking
from fusedckpt.planning.trials import Trials
from fusedckpt.planning.unit_costs import Ways
from fusedckpt.planning.units import Cut, check_model, cuts_of
from fusedckpt.reporting.memory_report import check_step
from fusedckpt.reporting.step import Step, default_loss
from fusedckpt.reporting.trial import tensors_of, trial

__all__ = ["plan"]


def plan(
    model: nn.Module,
    *args: Any,
    budget: int | float | str | None = None,
    activation_budget: int | float | str | None = None,
    policy: Policy = "budget",
    units: Iterable[str | nn.Module] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    accumulate: bool | int = False,
    group: Group = None,
    progress: bool = True,
    **kwargs: Any,
) -> Plan:
    """Find the fastest way to run training steps of `model` within a budget of bytes.

        plan = fusedckpt.plan(model, tokens, budget="20GiB", optimizer=optimizer)
        print(plan)
        plan.apply(model)

    The model is cut into units, which run one after the other. Each is measured on the arguments
    that it gets, once of a kind (timed once in a process), with what fused layers inside keep at
    every level, and, for a budget, with MLPs cut into chunks; the units are then given levels, or
    run again in backward as segments, so that the peak of the step stays below the budget at the
    least extra time. At last one step is run under the plan, and its peak measured, then some in
    turns with steps that keep everything, where these fit: their difference is the extra time that
    the plan claims. Afterwards everything is as before (see `trial`).

    Gradients that exist when this is called are there when the planned step begins, as after
    `zero_grad(set_to_none=False)`; others are made in it. With `accumulate` all are there. What the
    model returned in the step before lives until it returns again, as in `output = model(x)`.

    A unit that writes into its arguments is kept as it is. Of DistributedDataParallel the module
    inside is planned, its buckets counted. Shard a model after planning it, and compile it after
    that.

    Where torch.distributed is initialised, all ranks of a group call this with the same model,
    budget and shapes; the first one measures, and every rank gets its plan. The forward must not
    communicate.

    Args:
        model: any module; it must fit while one unit at a time keeps what it keeps.
        args, kwargs: what the model gets; a cache of keys and values is not to be among it.
        budget: of the peak of a whole step: parameters, gradients, optimizer state, activations.
            Bytes, a size such as "20GiB", or a share of the device's memory, 0.0 to 1.0.
        activation_budget: the same without parameters, gradients and optimizer state, for a step
            that finds all gradients there; without the optimizer's step.
        policy: "budget"; or, without a budget, "none" (keep everything), "all" (every unit runs
            again on its own), "sqrt", "uniform:k" (k segments), "memory" (the least peak that was
            measured, of the plan that should reach it and of "all", "sqrt" and "none"), "speed"
            (keep the outputs of matrix products and convolutions), or the modules, or their names,
            that are to run again, each on its own.
        units: the modules to plan, or their names, if not what is in every nn.Sequential,
            nn.ModuleList and nn.ModuleDict; where there are none, fused layers; else the model's
            own children. For a budget and for "memory" blocks of layers are cut up, and parts of
            units run again on their own, where that is cheaper; units that are given are not.
        loss, optimizer: as in `report`.
        accumulate: whether gradients add up over several micro-batches, or over how many: the
            budget is then one of every micro-batch.
        group: the ranks that plan together, a ProcessGroup or a DeviceMesh of one dimension: those
            that train copies, or shards, of this model. None is the group of a
            DistributedDataParallel, else all ranks. A stage of a pipeline takes its data-parallel
            group; False lets a rank plan alone.
        progress: show on stderr how many units are measured, where rich is installed.

    Returns:
        A Plan, not yet applied.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no plan fits the budget (the message names the least that one did), no module
            runs exactly once, a unit changes an object that it is given, a plan is applied to the
            model, it is sharded or compiled, or an argument is none of the above; of a group, on
            all ranks: one differs from the first, raised, or did not call within a minute.
    """
    parallel = model if isinstance(model, DistributedDataParallel) else None
    model = model if parallel is None else parallel.module
    ranks = group_of(group, None if parallel is None else parallel.process_group)

    def prepare() -> tuple[Mapping[str, str], Callable[[], Plan]]:
        check_step("plan", model, loss, optimizer, (args, kwargs))
        check_model(model)
        device = next(iter([*model.parameters(), *tensors_of((args, kwargs))])).device
        limit = limit_of(budget, activation_budget, policy, device)
        cuts = cuts_of(model, policy, units)
        is_rest = activation_budget is not None
        is_there = _accumulates(accumulate) or is_rest
        step = Step(model, args, kwargs, loss or default_loss, optimizer, is_last=not is_rest)
        step = _in_state(step._replace(caller="plan"), parallel, is_there)
        facts = facts_of(step, cuts[0].names, policy, limit, is_rest)
        return facts, lambda: _planned(step, cuts, policy, limit, is_rest, progress)

    return together(ranks, prepare)


def _accumulates(accumulate: Any) -> bool:
    # of numpy too
    count = operator.index(accumulate) if hasattr(accumulate, "__index__") else -1
    if count < 0:
        raise ValueError(
            f"plan: accumulate is True, False or a number of micro-batches, got {accumulate!r}"
        )
    return accumulate is True or count > 1


def _in_state(step: Step, parallel: DistributedDataParallel | None, is_there: bool) -> Step:
    """Return the step with the gradients, and the buckets, that are there when it begins.

    is_there: all gradients are.
    """
    trained = [p for p in step.parameters() if p.requires_grad]
    beside = 0
    if parallel is not None and parallel.gradient_as_bucket_view:
        # gradients live in buckets, which outlive them
        is_there = True
    elif parallel is not None:
        ignored = getattr(parallel, "parameters_to_ignore", ())
        reduced = dict(parallel.module.named_parameters())
        beside = nbytes_of(p for n, p in reduced.items() if p.requires_grad and n not in ignored)
    found = {p: p.grad for p in step.parameters() if p.grad is not None}
    made = {p: torch.zeros_like(p) for p in trained if p not in found} if is_there else {}
    return step._replace(gradients={**found, **made}, beside=beside)


def _planned(
    step: Step,
    cuts: Sequence[Cut],
    policy: Policy,
    limit: int | None,
    is_rest: bool,
    progress: bool,
) -> Plan:
    """Measure, solve and try; `is_rest`: the limit is one of activations alone."""
    parts = (
        nn.ModuleList([step.model, step.loss]) if isinstance(step.loss, nn.Module) else step.model
    )
    given = step.args, step.kwargs, [p.grad for p in step.parameters() if p.grad is not None]
    with trial(parts, step.optimizer, given), torch.enable_grad():
        stepping = _stepping(step)
        step.fresh()
        held = [*step.parameters(), *step.gradients.values(), *step.state()]
        rest = step.resident(held) if is_rest else 0
        limit = None if limit is None else limit + rest
        ways = Ways(policy == "speed", policy in ("budget", "memory"))
        surveys = _surveys(step, cuts, ways, progress)
        step = step._replace(last=surveys[0].last)
        chains = [chain_of(step, one.units(), stepping) for one in surveys]
        # of one cut there is nothing to choose
        best = min(range(len(chains)), key=lambda i: len(chains) > 1 and _cost(chains[i], limit))
        title = policy if isinstance(policy, str) else f"again: {', '.join(cuts[0].names)}"
        trials, survey = Trials(step, chains[best], title, limit), surveys[best]
        found = trials.by_policy(policy) if limit is None else trials.within(limit, rest)
        found = trials.timed(found, surveys[0].forward_ms)
    gradients = nbytes_of(step.gradients.values())
    return replace(found, left_out=survey.left_out(), gradient_bytes=gradients)


def _surveys(step: Step, cuts: Sequence[Cut], ways: Ways, progress: bool) -> list[Survey]:
    """Return what the units of cuts cost, of those that have some."""
    kinds: Kinds = {}
    with ticking(sum(len(cut.names) for cut in cuts), progress) as tick:
        surveys = [Survey(cut, kinds, tick, ways) for cut in cuts]
        for survey in surveys:
            survey.run(step)
    if found := [survey for survey in surveys if survey.units()]:
        return found
    why = [f"{name} {reason}" for name, reason in surveys[0].left_out().items()]
    told = "; ".join([*why[:3], f"{len(why) - 3} more"] if len(why) > 4 else why)
    raise ValueError(
        f"plan: expected a unit of {type(step.model).__name__} that runs exactly once, "
        f"name some with units=: {told or 'it has no parts'}"
    )


def _cost(chain: Chain, limit: int | None) -> tuple[float, int]:
    """Return what tells which of several ways to cut a model is the best."""
    least = least_outcome(chain).peak
    if limit is None or least > limit:
        return math.inf, least
    return solve(chain, limit).extra, least


def _stepping(step: Step) -> int:
    """Return the bytes that the optimizer's step takes for a moment, once it has made its state."""
    optimizer = step.optimizer
    if optimizer is None:
        return 0
    for parameter in step.parameters():
        found = step.gradients.get(parameter)
        if found is None and parameter.requires_grad:
            found = torch.zeros_like(parameter)
        parameter.grad = found
    if not optimizer.state:
        optimizer.step()
    return peak_bytes(optimizer.step, step.parameters()[0].device) if step.is_last else 0
