"""The fastest way to train a model within a budget of bytes: measured, solved, and tried.

`plan` checks its arguments, `_plan` does the work; README.md has the steps with their files.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedckpt.autograd import arguments, levels
from fusedckpt.autograd.accumulation import gradient_dtype
from fusedckpt.fusing.first_step import learn_from
from fusedckpt.memory import nbytes_of
from fusedckpt.planning.budget import Policy, limit_of
from fusedckpt.planning.measure import measure_chain
from fusedckpt.planning.offloading import CopyRates, copy_rates
from fusedckpt.planning.plans import Plan
from fusedckpt.planning.products import WRITES_PRODUCT
from fusedckpt.planning.ranks import Group, broadcast, group_of
from fusedckpt.planning.skipped import running_all
from fusedckpt.planning.survey import Survey, survey
from fusedckpt.planning.trials import Trials
from fusedckpt.planning.units import check_count, check_model, default_units, unit_names
from fusedckpt.reporting.out_of_memory import note_plan
from fusedckpt.reporting.progress import progress
from fusedckpt.reporting.step import (
    Step,
    check_step,
    default_loss,
    optimizers_of,
    replayable,
)
from fusedckpt.reporting.trial import tensors_of, trial
from fusedckpt.reporting.wrappers import bucket_bytes, inside_of, stand_ins
from fusedckpt.state import rng


def plan(
    model: nn.Module,
    *args: Any,
    budget: int | float | str | None = None,
    activation_budget: int | float | str | None = None,
    policy: Policy = "budget",
    units: Iterable[str | nn.Module] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    accumulate: bool | int = False,
    zero_grad: str = "forward",
    offload: bool = False,
    store: str | None = None,
    group: Group = None,
    progress: bool = True,
    **kwargs: Any,
) -> Plan:
    """Find the fastest plan for training steps of `model` that fits a memory budget.

        plan = fusedckpt.plan(model, tokens, budget="20GiB", optimizer=optimizer)
        print(plan)
        plan.apply(model)

    The model is cut into units that run one after the other. They are measured where they run, in
    one step with each in a checkpoint of its own and one at each level of the fused layers inside.
    The plan gives each unit a level, or checkpoints it in a segment, so that the peak of the step
    stays below the budget at the least extra time. One step under the plan then measures its peak;
    its excess over the budget is taken off the limit, at most four times. Some more steps, in
    turns with steps that save everything where these fit, measure its extra time. Afterwards model,
    optimizer and RNG states are restored.

    The planned step begins with the gradients that exist when this is called, as after
    `zero_grad(set_to_none=False)`; where the loop calls `zero_grad()` between forward and backward,
    pass zero_grad="backward": the gradients of the step before live through the forward. With
    `accumulate` it begins with all of them, outside of any bucket, as
    under `no_sync()`. The output of the step before is counted until the model returns again, as in
    `output = model(x)`; so are tensors that live on in its graph (attributes of `ctx`), or in
    attributes of modules, until the loss is computed.

    A unit that modifies its arguments in place is left unchanged. A unit is never recomputed if its
    forward is not the same twice from the same arguments and random states (torch's, Python's and
    NumPy's); `left_out` names it. So it does with a unit that gets another unit's output which code
    in between writes without a new version (`.data`, NumPy): a segment begins there. Later steps
    are not watched for a first such write. Of a model that skips units at random (LayerDrop) steps
    are measured that run all of them. For a DistributedDataParallel the module inside is planned
    and its buckets are counted. Plan a model first, then shard it, then compile it.

    Where torch.distributed is initialized, all ranks of a group call this with the same model,
    budget and shapes; the first rank measures, and all get its plan. The forward must not
    communicate.

    Args:
        model: any module; its step must fit in memory with all units but one checkpointed.
        args, kwargs: the model's arguments, without a key-value cache.
        budget: for the peak of a whole step: parameters, gradients, optimizer state, activations.
            In bytes, a size such as "20GiB", or a fraction of the device's memory, 0.0 to 1.0.
        activation_budget: the same without parameters, gradients, optimizer state and the
            optimizer's step, for a step that accumulates into existing gradients.
        policy: "budget"; or, without a budget, "none" (save everything), "all" (checkpoint every
            unit), "sqrt", "uniform:k" (k segments), "memory" (the least measured peak of four
            plans: the predicted best, "all", "sqrt" and "none"), "speed" (save matmul and
            convolution outputs, in units that save less that way and write none of them), or a list
            of modules, or their names, to checkpoint one by one.
        units: the modules to plan, or their names. By default the entries of every nn.Sequential,
            nn.ModuleList and nn.ModuleDict; in place of an entry that has repeated blocks inside,
            such as a stage, those blocks, if a forward runs one after the other. Without any
            containers, the fused layers; else the model's children.
        loss, optimizer: as in `report`; pass all optimizers that live meanwhile, as a list.
        accumulate: True, or a number of micro-batches, if gradients accumulate over several: the
            budget then holds for each micro-batch.
        zero_grad: "forward" or "backward": the phase before which the loop frees the gradients of
            the step before.
        offload: let segments offload their inputs to host memory, as `checkpoint(offload=True)`
            does, where a plan within the budget is faster for it, or possible only so. The rate of
            copies is measured on all ranks at once; the time that they add is arithmetic. The
            printed plan says why no segment offloads: the device cannot, the budget fits without
            it, another plan costs less, or the plan would have fewer than four such segments.
        store: "int8" lets units keep the inputs of their fused layers in nine bits a value, as
            fuse(store="int8") does, where a plan within the budget is faster for it, or possible
            only so: the level "inputs, int8". Inputs of segments stay as they are.
        group: the ranks that plan together, a ProcessGroup or a DeviceMesh of one dimension: those
            that train replicas, or shards, of this model. None means the group of a
            DistributedDataParallel, else all ranks. A pipeline stage passes its data-parallel
            group; False plans only on this rank.
        progress: show the current activity on stderr, in a terminal.

    Returns:
        A Plan, not yet applied.

    Raises:
        TypeError: an argument has another type.
        ValueError: no plan fits the budget (the message names the least feasible one), no module
            runs exactly once, units are skipped at random and no step runs all, a unit changes an
            object among its arguments, the model has a plan applied, is sharded or compiled, or an
            argument is invalid. On all ranks of a group: the first one raised; with gloo, one did
            not call within a minute.
    """
    model, parallel = inside_of(model)
    args, kwargs = replayable((args, kwargs))
    ranks = group_of(group, None if parallel is None else parallel.process_group)
    rates = list[CopyRates]()

    def measure_copies() -> None:
        tensors = _tensors_of_step(model, (args, kwargs))
        # `make` names a bad argument
        rates.extend([copy_rates(tensors[0].device)] if tensors else [])

    def make() -> Plan:
        optimizers = optimizers_of("plan", optimizer)
        check_step("plan", model, loss, optimizers, (args, kwargs))
        check_model(model)
        device = _tensors_of_step(model, (args, kwargs))[0].device
        goal = _Goal(
            policy=policy,
            limit=limit_of(budget, activation_budget, policy, device),
            is_of_activations=activation_budget is not None,
            accumulates=_accumulates(accumulate) or activation_budget is not None,
            frees_late=_frees_late(zero_grad),
            has_default_units=units is None and isinstance(policy, str),
            rates=rates[0] if rates else None,
            rounds=store is not None,
            progress=progress,
        )
        _check_gradients(goal)
        if ranks is None:
            # else this rank would swap modules that others do not
            learn_from(model, args, kwargs)
        names = unit_names(model, policy, units)
        step = Step(model, args, kwargs, loss or default_loss, optimizers, caller="plan")
        reseed = rng.RandomStates(rng.everywhere()).restore
        step = step._replace(is_last=not goal.is_of_activations, reseed=reseed)
        start = _with_gradients(step, parallel, goal.accumulates)
        return _plan(start, names, goal, parallel)

    offloads = arguments.flag("plan", "offload", offload)
    levels.check_store("plan", store)
    made = broadcast(ranks, make, prepare=measure_copies if offloads else None)
    note_plan(model, made)
    return made


def _tensors_of_step(model: Any, inputs: Any) -> list[Tensor]:
    """Return the tensors that exist before a step; the first has the device of the step."""
    owned = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return [*owned, *tensors_of(inputs)]


def _accumulates(accumulate: Any) -> bool:
    """Whether gradients accumulate over several micro-batches."""
    # numpy's integers count, too
    count = operator.index(accumulate) if hasattr(accumulate, "__index__") else -1
    if count < 0:
        raise ValueError(
            f"plan: accumulate must be True, False or a number of micro-batches, got {accumulate!r}"
        )
    return accumulate is True or count > 1


def _frees_late(zero_grad: Any) -> bool:
    """Whether the loop frees gradients between forward and backward."""
    arguments.choice("plan", "zero_grad", zero_grad, ("forward", "backward"))
    return zero_grad == "backward"


class _Goal(NamedTuple):
    """The goal of a plan: a policy and a limit, and the step for which both hold."""

    # as the caller wrote it
    policy: Policy
    # the most bytes of the peak, None for a policy without a budget
    limit: int | None
    # whether the limit is one of activations alone
    is_of_activations: bool
    # whether the step begins with a gradient of every parameter that ever gets one
    accumulates: bool
    # whether gradients of the step before live until backward begins
    frees_late: bool
    # whether the units are the default ones
    has_default_units: bool
    # the rates of copies to the host, None without offload=True
    rates: CopyRates | None
    # whether fused layers may keep their inputs in nine bits
    rounds: bool
    # whether the current activity is shown
    progress: bool


def _check_gradients(goal: _Goal) -> None:
    if goal.frees_late and goal.accumulates:
        raise ValueError(
            "plan: zero_grad='backward' frees the gradients to which a step with accumulate= or "
            "activation_budget= adds: pass only one of them"
        )


class _StartingStep(NamedTuple):
    """A step, and the gradients with which it begins."""

    step: Step
    # parameters that begin it with a gradient of zeros, if they ever get a gradient
    assumed: AbstractSet[Tensor]


def _with_gradients(
    step: Step, parallel: DistributedDataParallel | None, accumulates: bool
) -> _StartingStep:
    """Return the step with the gradients, and the bytes of buckets, that exist when it begins."""
    trained = [p for p in step.parameters() if p.requires_grad]
    has_views = getattr(parallel, "gradient_as_bucket_view", False)
    bytes_beside = 0
    # gradients that no_sync makes are allocated beside the buckets
    makes = accumulates and any(p.grad is None for p in trained)
    if parallel is not None and (makes or not has_views):
        bytes_beside = bucket_bytes(parallel)
    existing = {p: p.grad for p in step.parameters() if p.grad is not None}
    # buckets outlive the gradients in them, and hold all
    is_full = accumulates or has_views
    absent = [p for p in trained if p not in existing] if is_full else []
    gradients = {**existing, **{p: torch.zeros_like(p, dtype=gradient_dtype(p)) for p in absent}}
    step = step._replace(gradients=gradients, bytes_beside=bytes_beside)
    return _StartingStep(step, set(absent if accumulates else ()))


def _plan(
    start: _StartingStep,
    names: list[str],
    goal: _Goal,
    parallel: DistributedDataParallel | None,
) -> Plan:
    """Return the plan: survey the model, measure its units, solve, and try plans in steps."""
    step = start.step
    policy = goal.policy
    limit = goal.limit
    model: nn.Module = step.model
    if isinstance(step.loss, nn.Module):
        model = nn.ModuleList([step.model, step.loss])
    inputs = step.args, step.kwargs, [p.grad for p in step.parameters() if p.grad is not None]
    with (
        trial(model, step.optimizers, inputs, limit or 0, step.loss),
        stand_ins(parallel) as replaced,
        torch.enable_grad(),
        progress("plan", 3, goal.progress) as tell,
        running_all(step.with_stand_ins(replaced), names) as step,
    ):
        start = _StartingStep(step, {replaced.get(x, x) for x in start.assumed})
        tell("running the model")
        if goal.has_default_units:
            names = default_units(step, names)
            check_count(policy, names)
        surveyed = survey(step, names, rounds=goal.rounds)
        step = _surveyed_step(start, surveyed, goal)
        step.make_state(surveyed.trained)
        step.fresh()
        held = [*step.parameters(), *step.gradients.values(), *step.state()]
        bytes_outside_budget = step.resident(held) if goal.is_of_activations else 0

        tell("measuring units")
        rates = goal.rates or CopyRates()
        measurement = measure_chain(step, surveyed.units, policy == "speed", rates)
        tell("trying plans")
        trials = Trials(
            measurement,
            title=policy if isinstance(policy, str) else f"checkpoint: {', '.join(names)}",
            limit=None if limit is None else limit + bytes_outside_budget,
            left_out=surveyed.left_out | dict.fromkeys(measurement.writing, WRITES_PRODUCT),
            declined=None if goal.rates is None else rates.obstacle,
        )
        if trials.limit is None:
            best = trials.by_policy(policy)
        else:
            best = trials.within(trials.limit, bytes_outside_budget)
        best = trials.timed(best)
    gradient_bytes = nbytes_of([*step.gradients.values(), *step.stale])
    return replace(best, gradient_bytes=gradient_bytes, is_training=step.model.training)


def _surveyed_step(start: _StartingStep, surveyed: Survey, goal: _Goal) -> Step:
    """Return the step with the gradients of the parameters that ever get one."""
    never = start.assumed - surveyed.trained
    gradients = {p: grad for p, grad in start.step.gradients.items() if p not in never}
    stale: tuple[Tensor, ...] = ()
    if goal.frees_late:
        stale = tuple(surveyed.trained | gradients.keys())
        gradients = {}
    return start.step._replace(output_bytes=surveyed.output_bytes, gradients=gradients, stale=stale)
