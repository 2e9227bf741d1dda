"""Copies of modules that record which attributes their forward reads and writes.

A copy is of a subclass of the module's class, with meta parameters. Immutable attributes are the
module's own, mutable ones are copied. At one that cannot be copied the forward is stopped, and the
attribute is named.
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

from fusedckpt.fusing import reasons
from fusedckpt.fusing.held import MISSING, Held, Path, is_function, is_simple
from fusedckpt.fusing.replica import replica
from fusedckpt.layers.styles import style_of

# attributes that every module has, and those by which modules call each other
_OF_MODULES = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
_LOG = "_fusedckpt_log"
_CONTAINERS = (list, dict, set, deque)


class Stopped(Exception):
    """A forward did something that a recording cannot cover; the message names it."""


class Log:
    """Reads and writes by the copies of one module tree, and the tensors that they hold."""

    def __init__(self) -> None:
        self.reads: dict[Path, dict[Path, Any]] = {}
        self.containers: list[tuple[str, Any, Any]] = []
        self.parameters: dict[int, tuple[Path, Tensor]] = {}
        self.kinds: dict[Path, tuple[type[nn.Module], int]] = {}
        # of the calls of F.dropout
        self.dropped: list[float] = []
        self.stop: str | None = None

    def stopped(self, reason: str) -> Stopped:
        """Remember the first reason, and return the exception to raise."""
        self.stop = self.stop or reason
        return Stopped(reason)


def held_by(logs: Sequence[Log], leave: Collection[tuple[Path, str]] = ()) -> tuple[Held, ...]:
    """Return the state that runs of one module tree have read, without some attributes."""
    found = []
    for path, (kind, children) in logs[0].kinds.items():
        reads = {names: value for log in logs for names, value in log.reads.get(path, {}).items()}
        kept = ((n, v) for n, v in sorted(reads.items()) if (path, n[0]) not in leave)
        found.append(Held(path, kind if path else None, children, tuple(kept)))
    return tuple(found)


class _Spy:
    """Base class that records which attributes of an object its methods read and write."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in _OF_MODULES or name.startswith("__") or name == _LOG:
            return found
        attributes = object.__getattribute__(self, "__dict__")
        if name not in attributes:
            static = getattr_static(type(self), name, None)
            # attributes computed from others, and methods
            if static is None or hasattr(type(static), "__get__"):
                return found
        log, path, before = attributes[_LOG]
        return _handed_out(log, path, (*before, name), found)

    def __getattr__(self, name: str) -> Any:
        found: Any = MISSING
        try:
            # where a module has its parameters; plain objects have no such method
            found = super().__getattr__(name)  # type: ignore[misc]
            return found
        finally:
            # an attribute that is missing, or a bias that is None, may be set later
            if (found is MISSING or found is None) and not name.startswith("__"):
                log, path, before = object.__getattribute__(self, "__dict__")[_LOG]
                log.reads.setdefault(path, {})[(*before, name)] = found

    def __setattr__(self, name: str, value: Any) -> None:
        log, path, before = object.__getattribute__(self, "__dict__")[_LOG]
        raise log.stopped(f"its forward sets {'.'.join((*path, *before, name))}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


class _SpyModule(_Spy):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # past the hooks on all modules
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]  # of the module's class


def _handed_out(log: Log, path: Path, names: Path, value: Any) -> Any:
    reads = log.reads.setdefault(path, {})
    where = ".".join(path + names)
    if is_simple(value) or is_function(value):
        reads[names] = value
        return value
    if type(value) in _CONTAINERS and all(
        is_simple(item) or is_function(item)
        for item in (value.items() if isinstance(value, dict) else value)
    ):
        reads[names], given = copy.copy(value), copy.copy(value)
        log.containers.append((where, reads[names], given))
        return given
    is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor))
    if len(names) < 3 and is_object and type(value).__flags__ & (1 << 9):
        try:
            clone = object.__new__(_spying(_Spy, type(value)))
        except TypeError:
            pass
        else:
            vars(clone).update(vars(value), **{_LOG: (log, path, names)})
            return clone
    raise log.stopped(f"its forward reads {where}, a {type(value).__name__} that may change")


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
) -> Any:
    """Return a copy of a module tree over meta tensors; shared modules are copied once per place.

    dtype: of all floating parameters and buffers, their own if None; rate: the path of a dropout
    rate and its value. While training, all others are 0.
    """

    def meta(given: Tensor) -> Tensor:
        to = dtype if dtype is not None and given.is_floating_point() else given.dtype
        return torch.empty(tuple(given.shape), dtype=to, device="meta")

    def parameter(given: Tensor, path: Path) -> Tensor:
        made = nn.Parameter(meta(given), requires_grad=given.is_floating_point())
        log.parameters[id(made)] = path, made
        return made

    def enter(part: nn.Module, path: Path) -> tuple[type, dict[str, Any]]:
        name = ".".join(path)
        watched = reasons.of_hooks(name, part)
        if path and watched is not None and style_of(part) is None:
            raise log.stopped(watched)
        if path and type(part).__call__ is not nn.Module.__call__:
            raise log.stopped(f"{name}: a {type(part).__name__} has its own __call__")
        log.kinds[path] = type(part), len(part._modules)
        buffers = {n: None if b is None else meta(b) for n, b in part._buffers.items()}
        return _spying(_SpyModule, type(part)), {_LOG: (log, path, ()), "_buffers": buffers}

    dropping, value = rate or ((), 0.0)
    rates = (lambda path: value if path == dropping else 0.0) if training else None
    return replica(module, parameter, training=training, rate=rates, enter=enter)
