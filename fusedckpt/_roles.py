"""How a module of someone's model is made to run under a plan: by a class that asks its role.

The module's class becomes a subclass made for it, so that its parameters, hooks, names, state_dict,
isinstance and attributes stay; `release` puts the class back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as stock_checkpoint

from fusedckpt._segment import Segment
from fusedckpt.checkpointing import checkpoint, conditions_of, is_plain_call
from fusedckpt.levels import LEVELS, saving

_ROLE = "_fusedckpt_role"


class Role(Protocol):
    """What happens in place of a module's forward."""

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module's own forward in some way, and return what it returns."""
        ...


class Planned(nn.Module):
    """The base of every class made here."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in its role."""
        return self.__dict__[_ROLE].call(super().forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class was made here, and has no name to be found by
        return _rebuild, (type(self).__mro__[2],), self.__dict__


@cache
def _planned(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (Planned, kind), {"__module__": kind.__module__})


def _rebuild(kind: type[nn.Module]) -> nn.Module:
    return object.__new__(_planned(kind))


def assign(module: nn.Module, role: Role) -> None:
    """Let `module` run in `role`."""
    module.__dict__[_ROLE] = role
    module.__class__ = _planned(type(module))


def release(module: nn.Module) -> None:
    """Undo `assign`."""
    module.__class__ = type(module).__mro__[2]
    del module.__dict__[_ROLE]


def is_assigned(module: nn.Module) -> bool:
    """Whether a module runs in a role."""
    return isinstance(module, Planned)


def inner_level(level: str) -> str:
    """Return what fused layers keep in a segment's recompute, by the name of the unit's level."""
    return level if level in LEVELS else "preact"


class Keeping(NamedTuple):
    """Keep what autograd keeps, fused layers inside at `level`; None leaves them as they are."""

    level: str | None

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it under `saving`."""
        if self.level is None:
            return forward(*args, **kwargs)
        with saving(self.level):
            return forward(*args, **kwargs)


class Selecting(NamedTuple):
    """Keep the outputs of matrix products and convolutions, recompute the rest."""

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it under torch's selective checkpointing."""
        contexts = functools.partial(create_selective_checkpoint_contexts, _keeps_products)
        run = functools.partial(forward, **kwargs)
        return stock_checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")


def _keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().split("::")[-1].split(".")[0]
    product = op.namespace == "fusedckpt" or name in _PRODUCTS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


class Chained:
    """Several modules, called one after the other, checkpointed as one segment."""

    def __init__(self, levels: tuple[str, ...]):
        self.levels = levels
        self._running = _Running()

    def __reduce__(self) -> Any:
        return Chained, (self.levels,)

    def run(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run member `index`; called out of order, it starts a segment of its own."""
        running = self._running
        if is_plain_call():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, **kwargs)
        if index == 0 or running.expected != index or running.segment is None:
            running.segment = Segment()
        segment, running.segment = running.segment, None
        output = segment.run(
            forward, args, kwargs, conditions_of(forward, args, kwargs), self.levels[index]
        )
        if index + 1 < len(self.levels):
            segment.hand_on(output)
            running.segment, running.expected = segment, index + 1
        return output


class _Running(threading.local):
    """The segment that the next member goes on with."""

    segment: Segment | None = None
    expected = 0


class Member(NamedTuple):
    """One module of several that are checkpointed as one."""

    chained: Chained
    place: int

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it as its part of the segment."""
        return self.chained.run(self.place, forward, args, kwargs)
