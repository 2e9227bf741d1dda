"""How a module of someone's model is made to run under a plan: by a class that asks its role.

The module's class becomes a subclass made for it, so that its parameters, hooks, names, state_dict,
isinstance and attributes stay; `release` puts the class back.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as stock_checkpoint

from fusedckpt.autograd.levels import LEVELS, saving
from fusedckpt.autograd.phases import current
from fusedckpt.checkpointing.checkpoint import checkpoint, conditions_of, is_plain_call
from fusedckpt.checkpointing.segment import Segment

# in the module's __dict__: its role, and a forward that was set on it and not on its class
_ROLE, _FORWARD = "_fusedckpt_role", "_fusedckpt_forward"


class Role(Protocol):
    """What happens in place of a module's forward."""

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module's own forward in some way, and return what it returns."""
        ...


class Planned(nn.Module):
    """The base of every class made here."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in its role."""
        own = self.__dict__.get(_FORWARD) or super().forward
        return self.__dict__[_ROLE].call(own, args, kwargs)

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
    module.__class__ = _planned(type(module))
    module.__dict__[_ROLE] = role
    if "forward" in module.__dict__:
        module.__dict__[_FORWARD] = module.__dict__.pop("forward")


def release(module: nn.Module) -> None:
    """Undo `assign`."""
    module.__class__ = type(module).__mro__[2]
    del module.__dict__[_ROLE]
    if _FORWARD in module.__dict__:
        module.__dict__["forward"] = module.__dict__.pop(_FORWARD)


@contextmanager
def assigned(roles: Mapping[nn.Module, Role]) -> Iterator[None]:
    """Let modules run in roles meanwhile."""
    with ExitStack() as undo:
        for module, role in roles.items():
            assign(module, role)
            undo.callback(release, module)
        yield


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
        if is_plain_call() or current() is not None:
            return forward(*args, **kwargs)
        run: Callable[..., Any] = functools.partial(forward, **kwargs)
        if not torch.compiler.is_compiling():
            run = _once(run, args)
        return stock_checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


def _once(forward: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """Let what is run again change buffers as they were: else they change twice."""
    conditions = conditions_of(forward, pytree.tree_leaves(args), rng=False)
    ran: list[bool] = []

    def run(*args: Any) -> Any:
        if ran:
            with ExitStack() as stack:
                # unseen by selective checkpointing, which counts the ops of both runs
                with _disable_current_modes():
                    stack.enter_context(conditions.restored())
                return forward(*args)
        output = forward(*args)
        conditions.settle()
        ran.append(True)
        return output

    return run


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")


def _keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().split("::")[-1].split(".")[0]
    product = (
        getattr(op, "namespace", "") == "fusedckpt" or name in _PRODUCTS or "attention" in name
    )
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
        # inside a checkpoint it is run again anyway, and perhaps without the members before it
        if is_plain_call() or current() is not None:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, **kwargs)
        segment = running.segment() if index and running.expected == index else None
        running.segment = _no_segment
        if segment is None:
            segment = Segment()
        flat = pytree.tree_flatten((args, kwargs))
        conditions = conditions_of(forward, flat[0])
        output = segment.run(forward, args, kwargs, flat, conditions, self.levels[index])
        if index + 1 < len(self.levels):
            segment.hand_on(output)
            running.segment, running.expected = weakref.ref(segment), index + 1
        return output


def _no_segment() -> None:
    return None


class _Running(threading.local):
    """The segment that the next member goes on with, while a graph holds it."""

    def __init__(self) -> None:
        self.segment: Callable[[], Segment | None] = _no_segment
        self.expected = 0


class Member(NamedTuple):
    """One module of several that are checkpointed as one."""

    chained: Chained
    place: int

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it as its part of the segment."""
        return self.chained.run(self.place, forward, args, kwargs)
