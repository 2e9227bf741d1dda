"""Ranks that plan together: the first one measures, all take its plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch.distributed as dist
from torch import Tensor

from fusedckpt.autograd.private import pytree
from fusedckpt.memory import nbytes_of
from fusedckpt.planning.plans import Plan
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.tables import size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "ProcessGroup | DeviceMesh | Literal[False] | None"

# in which all ranks of a group are to call plan; only gloo can tell which one did not
_PATIENCE = timedelta(seconds=60)

Facts = Mapping[str, str]
Prepare = Callable[[], tuple[Facts, Callable[[], Plan]]]


def group_of(group: Any, default: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group of ranks that plan together, None where this rank plans alone.

    default: the group that a model's wrapper shows, if one does.

    Raises:
        TypeError: `group` is no group.
        ValueError: it is a mesh of several dimensions, or this rank is not in it.
    """
    if not dist.is_available():
        return None
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(f"plan: expected a mesh of one dimension, got {group}: slice it")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("plan: expected a group that this rank is in")
    if not (group is None or group is False or isinstance(group, dist.ProcessGroup)):
        came = type(group).__name__
        raise TypeError(
            f"plan: group must be a ProcessGroup, a DeviceMesh, None or False, got {came}"
        )
    if group is False or not dist.is_initialized():
        return None
    found = group or default or dist.group.WORLD
    assert found is not None
    return found if found.size() > 1 else None


def facts_of(
    step: Step, names: Sequence[str], policy: Any, limit: int | None, is_rest: bool
) -> Facts:
    """Return facts that are to be the same on all ranks, each by the name of its subject."""
    optimizer = ", ".join(type(x).__name__ for x in step.optimizers) or "none"
    facts = {
        f"the {'activation ' * is_rest}budget": "none" if limit is None else _bytes(limit),
        "the policy": policy if isinstance(policy, str) else "a list of modules",
        "the optimizer": f"{optimizer} with {_bytes(nbytes_of(step.state()))} of state",
        "what gradients hold": _bytes(nbytes_of(step.gradients.values()) + step.beside),
        "the list of units": ", ".join(names),
    }
    for name, module in step.model.named_modules():
        # addresses are each rank's own
        extra = re.sub(r" at 0x\w+", "", module.extra_repr())
        mode = "" if module.training else ", in eval mode"
        facts[f"module {name}" if name else "the model"] = f"{type(module).__name__}({extra}){mode}"
    for name, x in [*step.model.named_parameters(), *step.model.named_buffers()]:
        facts[name] = f"{_like(x)}, {'trained' if x.requires_grad else 'not trained'}"
    for path, leaf in pytree.tree_flatten_with_path((step.args, step.kwargs))[0]:
        facts[f"argument {pytree.keystr(path)}"] = _like(leaf)
    return facts


def _bytes(count: int) -> str:
    return f"{size(count)} ({count} bytes)"


def _like(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    return type(x).__name__


def together(group: ProcessGroup | None, prepare: Prepare) -> Plan:
    """Return the first rank's plan once all ranks have the same facts.

    prepare: returns the facts, and a function that makes the plan.

    Raises:
        ValueError: facts differ, or the first rank has no plan, on all ranks.
    """
    if group is None:
        return prepare()[1]()
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    _meet(group, ranks)
    facts, made = list[Any]([None] * len(ranks)), list[Any]([None])
    error: BaseException | None = None
    make: Any = None
    try:
        own, make = prepare()
    except Exception as raised:
        error = raised
        own = ValueError(f"plan: rank {rank} raised {type(raised).__name__}: {raised}")
    dist.all_gather_object(facts, own, group)
    if error is not None:
        raise error
    _compare(ranks, facts)
    if rank == ranks[0]:
        try:
            made = [make()]
        except BaseException as raised:
            # an interrupt, too: or the others would wait for ever
            error, told = raised, f"plan: rank {rank} raised {type(raised).__name__}: {raised}"
            made = [raised if isinstance(raised, ValueError) else RuntimeError(told)]
    dist.broadcast_object_list(made, ranks[0], group)
    (found,) = made
    if error is not None or isinstance(found, Exception):
        raise error or found
    return found


def _meet(group: ProcessGroup, ranks: list[int]) -> None:
    if dist.get_backend(group) == "gloo":
        try:
            dist.monitored_barrier(group, _PATIENCE)
        except RuntimeError as error:
            raise ValueError(
                f"plan: all ranks of the group {ranks} must call it within "
                f"{_PATIENCE.total_seconds():.0f} s; pass group= to plan with others, or "
                f"group=False to plan alone: {error}"
            ) from error


def _compare(ranks: list[int], facts: list[Facts | ValueError]) -> None:
    """Raise the error of a rank that has one, or the first difference from the first rank."""
    first = facts[0]
    for rank, found in zip(ranks, facts, strict=True):
        if isinstance(found, ValueError):
            raise found
        assert not isinstance(first, ValueError)
        for name in dict.fromkeys([*first, *found]):
            one, other = first.get(name, "not there"), found.get(name, "not there")
            if one != other:
                raise ValueError(
                    f"plan: {name} is {one} on rank {ranks[0]} and {other} on rank {rank}: all "
                    "ranks of a group plan the same; those that train another model, such as "
                    "stages of a pipeline, pass a group= of their own, or group=False to plan alone"
                )
