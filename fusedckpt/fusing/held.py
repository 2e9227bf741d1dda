"""State that a module's forward depends on, besides parameters and input: recorded, then compared.

A forward is proven equal for the state that it read: classes, numbers, flags and callables of the
module and its children. Copies of the modules, of subclasses over meta tensors, record it:
immutable attributes are the module's own, mutable ones are copied, and at one that cannot be copied
the forward is stopped. The state is stored by name, and compared in every call.
"""

from __future__ import annotations

import copy
import enum
import types
from collections import deque
from collections.abc import Collection, Sequence
from functools import cache, partial
from inspect import getattr_static
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing.adapters import base_of, is_dequantising
from fusedckpt.fusing.replica import Path, replica
from fusedckpt.layers.fallbacks import NotFused

_SIMPLE = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, partial)
# containers of simple values, which are copied
CONTAINERS = (list, dict, set, deque)
# the value of a missing attribute
MISSING = "no value"
# attributes that every module has, and those by which modules call each other
_OF_MODULES = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
_LOG = "_fusedckpt_log"
# the attribute of a swapped module that has its `Original`
MARK = "_fusedckpt_original"


class Part(NamedTuple):
    """A swapped module or block, as reports name it."""

    # "norm", "mlp", "linear", "attention" or "experts"
    kind: str
    # the text of the report
    change: str
    # bytes per token before and after the swap, None where they are not known
    saved: tuple[float, float] | None


class Original(NamedTuple):
    """The state of a module before it was swapped."""

    # its class
    kind: type[nn.Module]
    # the attributes that `unfuse` deletes
    attributes: tuple[str, ...]
    # its swapped parts, by the name below the module
    parts: dict[str, Part]


class Weight(NamedTuple):
    """A linear of a block."""

    # the attributes that lead to its weight
    weight: Path
    # those that lead to its bias, None without one
    bias: Path | None
    # whether the weight lies as [in, out]
    transposed: bool


class MatchedBlock(NamedTuple):
    """The block that a forward computes: the arguments of one of our functions."""

    # the function: "mlp", "gated_mlp" or "linear_act"
    kind: str
    # in the order of the function's arguments
    linears: tuple[Weight, ...]
    # its name in the table of activations
    activation: str
    # the half of the first weight that comes first, "gate" or "up"; "" where it has no halves
    packed: str = ""


class Held(NamedTuple):
    """The state of one module that must not change."""

    # the names of the children that lead to it
    path: Path
    # its class, None for the swapped module itself
    kind: type[nn.Module] | None
    # the number of its children, None for any
    children: int | None
    # attributes that were read, each as the names that lead to it, and their values
    reads: tuple[tuple[Path, Any], ...]


def is_simple(value: Any) -> bool:
    """Whether a value is immutable, and compared by value."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_simple, value))
    return isinstance(value, _SIMPLE)


def is_function(value: Any) -> bool:
    """Whether a value is code, compared by identity."""
    # torch's builtins and the jit's functions are of classes of their own
    is_code = isinstance(value, _FUNCTIONS) or type(value).__name__.endswith("ScriptFunction")
    return is_code and not isinstance(getattr(value, "__self__", None), nn.Module)


def child_at(module: nn.Module, path: Path) -> nn.Module | None:
    """Return the module at a path of names, below adapters; None if there is none."""
    child: nn.Module | None = module
    for name in path:
        child = None if child is None else child._modules.get(name)
        if child is not None and "base_layer" in child._modules:
            child = base_of(child)
    return child


def broken(module: nn.Module, held: tuple[Held, ...]) -> NotFused | None:
    """Return the first change in a module since it was recorded, None if nothing changed.

    The reason names the child that was replaced or has hooks, or the changed attribute.
    """
    for path, kind, children, reads in held:
        part = child_at(module, path)
        if part is None or (kind is not None and kind is not _kind(part)):
            return NotFused("child", ".".join(path))
        if kind is not None and has_hooks(part):
            return NotFused("hook", ".".join(path))
        if children is not None and len(part._modules) != children:
            return NotFused("child", ".".join(path))
        for names, value in reads:
            now: Any = part
            for name in names:
                now = getattr(now, name, MISSING)
            if now is not value and not (type(now) is type(value) and now == value):
                return NotFused("changed", ".".join(path + names))
    return None


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before it was swapped, nn.Linear for a linear that dequantises."""
    if is_dequantising(module):
        return nn.Linear
    return module.__dict__[MARK].kind if MARK in module.__dict__ else type(module)


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
