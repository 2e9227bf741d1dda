"""Ranks that plan together: the first one measures, all take its plan."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch.distributed as dist

from fusedckpt.planning.plans import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "ProcessGroup | DeviceMesh | Literal[False] | None"

# the time within which all ranks of a group must call plan; only gloo can tell which rank did not
_PATIENCE = timedelta(seconds=60)


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
            raise ValueError(f"plan: group must be a mesh of one dimension, got {group}: slice it")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "plan: group does not contain this rank: pass a group of this rank, or group=False"
        )
    if not (group is None or group is False or isinstance(group, dist.ProcessGroup)):
        came = type(group).__name__
        raise TypeError(
            f"plan: group must be a ProcessGroup, a DeviceMesh, None or False, got {came}"
        )
    if group is False or not dist.is_initialized():
        return None
    ranks = group or default or dist.group.WORLD
    assert ranks is not None
    return ranks if ranks.size() > 1 else None


def broadcast(
    group: ProcessGroup | None,
    make: Callable[[], Plan],
    prepare: Callable[[], object] | None = None,
) -> Plan:
    """Return the plan that the first rank of a group makes, on all ranks of the group.

    prepare: is called before, on all ranks at once; it raises nothing.

    `Plan.apply` compares the structure of each rank's model with the first one's.

    Raises:
        ValueError: the first rank has no plan; with gloo, a rank does not call this in time.
    """
    if group is None:
        if prepare is not None:
            prepare()
        return make()
    ranks = dist.get_process_group_ranks(group)
    rank = dist.get_rank()
    _meet(group, ranks)
    if prepare is not None:
        dist.barrier(group)
        prepare()
    results = list[Any]([None])
    error: BaseException | None = None
    if rank == ranks[0]:
        try:
            results = [make()]
        except BaseException as raised:
            # an interrupt, too: or the others would wait for ever
            error = raised
            reason = f"plan: rank {rank} raised {type(raised).__name__}: {raised}"
            results = [raised if isinstance(raised, ValueError) else RuntimeError(reason)]
    dist.broadcast_object_list(results, ranks[0], group)
    (result,) = results
    if error is not None:
        raise error
    if isinstance(result, Exception):
        raise result
    return result


def _meet(group: ProcessGroup, ranks: list[int]) -> None:
    if dist.get_backend(group) == "gloo":
        try:
            dist.monitored_barrier(group, _PATIENCE)
        except RuntimeError as error:
            raise ValueError(
                f"plan: all ranks of the group {ranks} must call plan within "
                f"{_PATIENCE.total_seconds():.0f} s: pass group= for another group, or "
                f"group=False for each rank to plan by itself: {error}"
            ) from error
