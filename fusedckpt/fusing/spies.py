"""Copies of modules that log the state which a forward reads, while it is recorded.

The copies are of subclasses, over meta tensors. Immutable attributes are the module's own, mutable
ones are copied, and at one that cannot be copied the forward is stopped. Proxies around modules
would not do: the forward's code asks isinstance, calls super() and passes modules to functions of
torch, which all need the class itself.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from inspect import getattr_static
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import private
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing.code_watch import CodeWatch
from fusedckpt.fusing.match_reader import Guard, Guards
from fusedckpt.fusing.outside_code import outside_reads
from fusedckpt.fusing.replica import Path, replica
from fusedckpt.fusing.simple_values import MISSING, is_function, is_simple
from fusedckpt.layers.fallbacks import NotFused

# containers of simple values, which are copied
_READ_CONTAINERS = (list, dict, set, deque)
# attributes that every module has, and those by which modules call each other
_MODULE_NAMES = private.MODULE_ATTRIBUTES | {"_is_full_backward_hook"}
# the attribute of a spy with its place
_PLACE = "_fusedckpt_place"


class Stopped(Exception):
    """A forward did something that a recording cannot cover; the message names it."""


class ForwardLog:
    """Reads and writes by the copies of one module tree, and the tensors that they hold."""

    def __init__(self) -> None:
        # by a module's path, the attributes that were read, as names, and their values
        self.reads: dict[Path, dict[Path, Any]] = {}
        # containers that were read: the name, the contents before, and the copy that may be written
        self.containers: list[tuple[str, Any, Any]] = []
        # the copies' parameters by their ids, with their paths
        self.parameters: dict[int, tuple[Path, Tensor]] = {}
        self.buffers: list[Tensor] = []
        # by a module's path, its class and the number of its children
        self.kinds: dict[Path, tuple[type[nn.Module], int]] = {}
        # the rates of the calls of F.dropout
        self.dropout_rates: list[float] = []
        # the code that ran
        self.watch = CodeWatch()
        # why the forward was stopped, if it was
        self.stop: NotFused | None = None

    def stopped(self, key: str, about: Any = "") -> Stopped:
        """Remember the first reason, and return the exception to raise."""
        self.stop = self.stop or NotFused(key, about)
        return Stopped(key)

    def read(self, path: Path, names: Path, value: Any) -> Any:
        """Note the value of an attribute, and return the value that the forward gets."""
        reads = self.reads.setdefault(path, {})
        if is_simple(value) or is_function(value):
            reads[names] = value
            return value
        full_name = ".".join(path + names)
        items = value.items() if isinstance(value, dict) else value
        if type(value) in _READ_CONTAINERS and all(is_simple(i) or is_function(i) for i in items):
            before = copy.copy(value)
            copied = copy.copy(value)
            reads[names] = before
            self.containers.append((full_name, before, copied))
            return copied
        is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor))
        # the flag of classes that Python code defines
        if len(names) < 3 and is_object and type(value).__flags__ & (1 << 9):
            clone = object.__new__(_spying(_Spy, type(value)))
            vars(clone).update(vars(value), **{_PLACE: _SpyPlace(self, path, names)})
            return clone
        raise self.stopped("state", f"{full_name}, a {type(value).__name__}")


def guards_of(
    logs: Sequence[ForwardLog], leave: Collection[tuple[Path, str]] = ()
) -> Guards | NotFused:
    """Return guards for the state that runs of one module tree have read, or why there are none.

    leave: paths and names of attributes that may change, as they are read in every call.
    """
    guards = []
    for path, (kind, num_children) in logs[0].kinds.items():
        reads = {names: value for log in logs for names, value in log.reads.get(path, {}).items()}
        guarded = ((n, v) for n, v in sorted(reads.items()) if (path, n[0]) not in leave)
        guards.append(Guard(path, kind if path else None, num_children, tuple(guarded)))
    kinds = {path: kind for path, (kind, _) in logs[0].kinds.items()}
    values = (value for log in logs for reads in log.reads.values() for value in reads.values())
    functions = [value for value in values if is_function(value)]
    outside = outside_reads([log.watch for log in logs], kinds, functions)
    return outside if isinstance(outside, NotFused) else Guards(tuple(guards), outside)


class _SpyPlace(NamedTuple):
    """The place of a spy: a module, or an object in its attributes."""

    log: ForwardLog
    # of the module
    path: Path
    # the attributes that lead from the module to the object, none for the module itself
    names: Path


def _attributes_of(spy: Any) -> Mapping[str, Any]:
    """Return a spy's attributes, without logging a read."""
    return object.__getattribute__(spy, "__dict__")


class _Spy:
    """Base class that records which attributes of an object its methods read and write."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in _MODULE_NAMES or name.startswith("__") or name == _PLACE:
            return value
        attributes = _attributes_of(self)
        if name not in attributes:
            static = getattr_static(type(self), name, None)
            # attributes computed from others, and methods
            if static is None or hasattr(type(static), "__get__"):
                return value
        log, path, names = attributes[_PLACE]
        return log.read(path, (*names, name), value)

    def __getattr__(self, name: str) -> Any:
        value: Any = MISSING
        try:
            # where a module has its parameters; plain objects have no such method
            value = super().__getattr__(name)  # type: ignore[misc]
            return value
        finally:
            # an attribute that is missing, or a bias that is None, may be set later
            if (value is MISSING or value is None) and not name.startswith("__"):
                log, path, names = _attributes_of(self)[_PLACE]
                log.read(path, (*names, name), value)

    def __setattr__(self, name: str, value: Any) -> None:
        log, path, names = _attributes_of(self)[_PLACE]
        raise log.stopped("sets", ".".join((*path, *names, name)))

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


def spied_copy(
    module: nn.Module,
    log: ForwardLog,
    dtype: torch.dtype | None,
    training: bool,
    rate: tuple[Path, float] | None,
) -> Any:
    """Return a copy of a module tree over meta tensors; shared modules are copied once per place.

    dtype: of all floating parameters and buffers, their own if None; rate: the path of a dropout
    rate and its value. While training, all others are 0.
    """

    def meta(tensor: Tensor) -> Tensor:
        is_cast = dtype is not None and tensor.is_floating_point()
        return torch.empty(
            tuple(tensor.shape), dtype=dtype if is_cast else tensor.dtype, device="meta"
        )

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
        place = _SpyPlace(log, path, ())
        return _spying(_SpyModule, type(part)), {_PLACE: place, "_buffers": buffers}

    dropping, value = rate or ((), 0.0)
    rates = (lambda path: value if path == dropping else 0.0) if training else None
    return replica(module, parameter, training=training, rate=rates, enter=enter)
