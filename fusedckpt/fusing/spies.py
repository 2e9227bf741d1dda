"""Copies of modules that log the state which a forward reads, while it is recorded.

The copies are of subclasses, over meta tensors. Immutable attributes are the module's own, mutable
ones are copied, and at one that cannot be copied the forward is stopped.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Sequence
from functools import cache
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing.guards import MISSING, Held, is_function, is_simple
from fusedckpt.fusing.replica import Path, replica
from fusedckpt.layers.fallbacks import NotFused

# containers of simple values, which are copied
CONTAINERS = (list, dict, set, deque)
# attributes that every module has, and those by which modules call each other
_OF_MODULES = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
_LOG = "_fusedckpt_log"


class Stopped(Exception):
    """A forward did something that a recording cannot cover; the message names it."""


class Log:
    """Reads and writes by the copies of one module tree, and the tensors that they hold."""

    def __init__(self) -> None:
        self.reads: dict[Path, dict[Path, Any]] = {}
        self.containers: list[tuple[str, Any, Any]] = []
        self.parameters: dict[int, tuple[Path, Tensor]] = {}
        self.buffers: list[Tensor] = []
        self.kinds: dict[Path, tuple[type[nn.Module], int]] = {}
        # the rates of the calls of F.dropout
        self.dropped: list[float] = []
        self.stop: NotFused | None = None

    def stopped(self, key: str, about: Any = "") -> Stopped:
        """Remember the first reason, and return the exception to raise."""
        self.stop = self.stop or NotFused(key, about)
        return Stopped(key)

    def read(self, spy: Any, name: str, value: Any) -> Any:
        """Note an attribute's value, and return the one that the forward gets."""
        path, before = object.__getattribute__(spy, "__dict__")[_LOG][1:]
        names = (*before, name)
        reads, where = self.reads.setdefault(path, {}), ".".join(path + names)
        if is_simple(value) or is_function(value):
            reads[names] = value
            return value
        items = value.items() if isinstance(value, dict) else value
        if type(value) in CONTAINERS and all(is_simple(i) or is_function(i) for i in items):
            reads[names], copied = copy.copy(value), copy.copy(value)
            self.containers.append((where, reads[names], copied))
            return copied
        is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor))
        # the flag of classes that Python code defines
        if len(names) < 3 and is_object and type(value).__flags__ & (1 << 9):
            clone = object.__new__(_spying(_Spy, type(value)))
            vars(clone).update(vars(value), **{_LOG: (self, path, names)})
            return clone
        raise self.stopped("state", f"{where}, a {type(value).__name__}")


def held_by(logs: Sequence[Log], leave: Collection[tuple[Path, str]] = ()) -> tuple[Held, ...]:
    """Return the state that runs of one module tree have read, without some attributes."""
    states = []
    for path, (kind, children) in logs[0].kinds.items():
        reads = {names: value for log in logs for names, value in log.reads.get(path, {}).items()}
        kept = ((n, v) for n, v in sorted(reads.items()) if (path, n[0]) not in leave)
        states.append(Held(path, kind if path else None, children, tuple(kept)))
    return tuple(states)


class _Spy:
    """Base class that records which attributes of an object its methods read and write."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in _OF_MODULES or name.startswith("__") or name == _LOG:
            return value
        attributes = object.__getattribute__(self, "__dict__")
        if name not in attributes:
            static = getattr_static(type(self), name, None)
            # attributes computed from others, and methods
            if static is None or hasattr(type(static), "__get__"):
                return value
        return attributes[_LOG][0].read(self, name, value)

    def __getattr__(self, name: str) -> Any:
        value: Any = MISSING
        try:
            # where a module has its parameters; plain objects have no such method
            value = super().__getattr__(name)  # type: ignore[misc]
            return value
        finally:
            # an attribute that is missing, or a bias that is None, may be set later
            if (value is MISSING or value is None) and not name.startswith("__"):
                object.__getattribute__(self, "__dict__")[_LOG][0].read(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        log, path, before = object.__getattribute__(self, "__dict__")[_LOG]
        raise log.stopped("sets", ".".join((*path, *before, name)))

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


class _SpyModule(_Spy):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # past the hooks on all modules
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]  # of the module's class


@cache
def _spying(spy: type, kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (spy, kind), names)


def spied(
    module: nn.Module,
    log: Log,
    dtype: torch.dtype | None,
    training: bool,
    rate: tuple[Path, float] | None,
    keeps_rates: bool,
) -> Any:
    """Return a copy of a module tree over meta tensors; shared modules are copied once per place.

    dtype: of all floating parameters and buffers, their own if None; rate: the path of a dropout
    rate and its value. While training, all others are 0, unless `keeps_rates`.
    """

    def meta(tensor: Tensor) -> Tensor:
        to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tuple(tensor.shape), dtype=to, device="meta")

    def parameter(tensor: Tensor, path: Path) -> Tensor:
        made = nn.Parameter(meta(tensor), requires_grad=tensor.is_floating_point())
        log.parameters[id(made)] = path, made
        return made

    def enter(part: nn.Module, path: Path) -> tuple[type, dict[str, Any]]:
        is_watched = has_hooks(part)
        if path and (is_watched or type(part).__call__ is not nn.Module.__call__):
            raise log.stopped("hook", ".".join(path))
        log.kinds[path] = type(part), len(part._modules)
        buffers = {n: None if b is None else meta(b) for n, b in part._buffers.items()}
        log.buffers += [buffer for buffer in buffers.values() if buffer is not None]
        return _spying(_SpyModule, type(part)), {_LOG: (log, path, ()), "_buffers": buffers}

    dropping, value = rate or ((), 0.0)
    is_set = training and not keeps_rates
    rates = (lambda path: value if path == dropping else 0.0) if is_set else None
    return replica(module, parameter, training=training, rate=rates, enter=enter)
