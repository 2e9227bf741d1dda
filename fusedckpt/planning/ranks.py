"""Ranks that plan together: the first one measures, all take its plan.

Their messages go through the store that every process group has, with any backend.
A rank that comes alone is told so after a while, where a collective would hang.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch.distributed as dist
from torch import Tensor

from fusedckpt.autograd.private import default_store, pytree
from fusedckpt.memory import nbytes_of
from fusedckpt.planning.plans import Plan
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.tables import size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "facts_of", "group_of", "together"]

Group: TypeAlias = "ProcessGroup | DeviceMesh | Literal[False] | None"

# seconds in which all ranks of a group are to call plan
_PATIENCE = 60.0
# seconds between two looks into the store, at first and at most
_PAUSES = (0.01, 0.5)

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
    optimizer = "none" if step.optimizer is None else type(step.optimizer).__name__
    facts = {
        f"the {'activation ' * is_rest}budget": "none" if limit is None else _bytes(limit),
        "the policy": policy if isinstance(policy, str) else "a list of modules",
        "the optimizer": f"{optimizer} with {_bytes(nbytes_of(step.state()))} of state",
        "what gradients hold": _bytes(nbytes_of(step.gradients.values()) + step.beside),
    }
    for name, option in getattr(step.optimizer, "defaults", {}).items():
        is_plain = isinstance(option, (bool, int, float, str, type(None)))
        facts[f"the optimizer's {name}"] = repr(option) if is_plain else type(option).__name__
    for name, module in step.model.named_modules():
        # addresses are each rank's own
        extra = re.sub(r" at 0x\w+", "", module.extra_repr())
        mode = "" if module.training else ", in eval mode"
        found = f"{type(module).__name__}({extra}){mode}"
        facts[f"module {name}" if name else "the model"] = found
        for own, x in [*module.named_parameters("", False), *module.named_buffers("", False)]:
            kind = "trained" if x.requires_grad else "not trained"
            facts[f"{name}.{own}" if name else own] = f"{_like(x)}, {kind}"
    facts["the list of units"] = ", ".join(names)
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
        ValueError: facts differ, or ranks do not come, or the first one has no plan: on all ranks.
    """
    return prepare()[1]() if group is None else _Meeting(group).plan(prepare)


class _Meeting:
    """One call of plan by all ranks of a group.

    Every rank puts its facts; the first one compares them and puts the plan. Either may be an error
    instead; a rank that gets it raises it. Each rank counts its calls; one that others gave up
    waiting for has missed theirs, so that later calls meet again.
    """

    def __init__(self, group: ProcessGroup):
        self._ranks = dist.get_process_group_ranks(group)
        self._rank, self._first = dist.get_rank(), self._ranks[0]
        self._store = default_store()
        # disjoint groups may have one name
        self._place = f"fusedckpt.plan/{group.group_name}/{self._first}"
        self._number = self._store.add(self._calls(self._rank), 1)

    def plan(self, prepare: Prepare) -> Plan:
        """Make the plan, or take it from the rank that does."""
        facts = None
        try:
            facts, make = prepare()
            self._put("facts", facts)
            if self._rank != self._first:
                self._wait("facts", [self._first])
                # which takes the time that it takes
                self._wait("plan", [self._first], math.inf)
                return self._get("plan", self._first)
            self._wait("facts", self._ranks)
            self._compare(facts)
            found = make()
            self._put("plan", found)
            return found
        except BaseException as error:
            # an interrupt, too: or the others would wait for ever
            told = f"plan: rank {self._rank} raised {type(error).__name__}: {error}"
            raised = ValueError(told) if facts is None else RuntimeError(told)
            if facts is not None and isinstance(error, ValueError):
                raised = ValueError(str(error))
            self._put("facts", raised)
            self._put("plan", raised)
            raise

    def _compare(self, facts: Facts) -> None:
        for rank in self._ranks:
            theirs = self._get("facts", rank)
            for name in dict.fromkeys([*facts, *theirs]):
                one, other = facts.get(name, "not there"), theirs.get(name, "not there")
                if one != other:
                    raise ValueError(
                        f"plan: {name} is {one} on rank {self._rank} and {other} on rank {rank}: "
                        "all ranks of a group plan the same; those that train another model, such "
                        "as stages of a pipeline, pass a group= of their own, or group=False to "
                        "plan alone"
                    )

    def _wait(self, name: str, ranks: list[int], seconds: float | None = None) -> None:
        """Wait for values that ranks put in plan; the store's own wait would print warnings."""
        patience = _PATIENCE if seconds is None else seconds
        end, (pause, longest) = time.monotonic() + patience, _PAUSES
        while missing := [r for r in ranks if not self._store.check([self._key(name, r)])]:
            if time.monotonic() > end:
                self._skip(missing)
                who = "rank" if len(missing) < 2 else "ranks"
                raise ValueError(
                    f"plan: {who} {', '.join(map(str, missing))} did not call plan within "
                    f"{patience:.0f} s of rank {self._rank}: all ranks of the group {self._ranks} "
                    "must call it; pass group= to plan with others, or group=False to plan alone"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _skip(self, missing: list[int]) -> None:
        """Count this call for ranks that did not come, but for those that just do."""
        for calls in map(self._calls, missing):
            before = self._store.get(calls).decode() if self._store.check([calls]) else ""
            if int(before or 0) < self._number:
                self._store.compare_set(calls, before, str(self._number))

    def _calls(self, rank: int) -> str:
        return f"{self._place}/calls of {rank}"

    def _key(self, name: str, rank: int) -> str:
        return f"{self._place}/{self._number}/{name} of {rank}"

    def _put(self, name: str, value: Any) -> None:
        # typed as text; get returns bytes
        self._store.set(self._key(name, self._rank), pickle.dumps(value))  # type: ignore[arg-type]

    def _get(self, name: str, rank: int) -> Any:
        found = pickle.loads(self._store.get(self._key(name, rank)))
        if isinstance(found, Exception):
            raise found
        return found
