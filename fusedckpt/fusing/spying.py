"""Copies of modules that tell which attributes their forward reads and writes.

A copy is of a subclass of the module's class, over parameters without values. What it reads is
the module's own where that cannot change, a copy where it can; what cannot be copied is not handed
out: the forward is stopped, and the attribute is named.
"""

from __future__ import annotations

import copy
from collections import deque
from functools import cache, partial
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing.held import MISSING, Held, Path, is_function, is_simple

# what every module has, and how modules call each other
_OF_MODULES = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
_LOG = "_fusedckpt_log"
_CONTAINERS = (list, dict, set, deque)


class Stopped(Exception):
    """A forward did what no proof covers; the message says what."""


class Log:
    """What the copies of one module tree read and wrote, and the tensors that they hold."""

    def __init__(self) -> None:
        self.reads: dict[Path, dict[Path, Any]] = {}
        self.containers: list[tuple[str, Any, Any]] = []
        self.parameters: dict[int, tuple[Path, Tensor]] = {}
        self.kinds: dict[Path, tuple[type[nn.Module], int]] = {}
        self.stop: str | None = None

    def stopped(self, reason: str) -> Stopped:
        """Remember the first reason, and return the exception to raise."""
        self.stop = self.stop or reason
        return Stopped(reason)

    def held(self, leave: set[tuple[Path, str]]) -> tuple[Held, ...]:
        """Return what must hold of every module, but for some attributes."""
        return tuple(
            Held(
                path,
                kind if path else None,
                children,
                tuple(
                    (names, value)
                    for names, value in sorted(self.reads.get(path, {}).items())
                    if (path, names[0]) not in leave
                ),
            )
            for path, (kind, children) in self.kinds.items()
        )


class _Spy:
    """Comes before a class, and tells what its methods read and write of an object."""

    def __getattribute__(self, name: str) -> Any:
        try:
            found = super().__getattribute__(name)
        except AttributeError:
            # some look elsewhere for it then, as modules do among their parameters
            if not hasattr(type(self), "__getattr__"):
                _note(self, name, MISSING)
            raise
        if name in _OF_MODULES or name.startswith("__") or name == _LOG:
            return found
        attributes = object.__getattribute__(self, "__dict__")
        if name not in attributes:
            static = getattr_static(type(self), name, None)
            # what is computed from others, and methods
            if static is None or hasattr(type(static), "__get__"):
                return found
        log, path, before = attributes[_LOG]
        return _handed_out(log, path, (*before, name), found)

    def __setattr__(self, name: str, value: Any) -> None:
        log, path, before = object.__getattribute__(self, "__dict__")[_LOG]
        raise log.stopped(f"its forward sets {_name(path, (*before, name))}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


def _note(spy: Any, name: str, value: Any) -> None:
    if not name.startswith("__"):
        log, path, before = object.__getattribute__(spy, "__dict__")[_LOG]
        log.reads.setdefault(path, {})[(*before, name)] = value


class _SpyModule(_Spy):
    def __getattr__(self, name: str) -> Any:
        try:
            found = super().__getattr__(name)  # type: ignore[misc]  # nn.Module's
        except AttributeError:
            _note(self, name, MISSING)
            raise
        if found is None:
            # a bias that is not there may come
            _note(self, name, None)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # past the hooks on all modules
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]  # of the module's class


def _handed_out(log: Log, path: Path, names: Path, value: Any) -> Any:
    reads = log.reads.setdefault(path, {})
    where = _name(path, names)
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
            return _copied(_Spy, value, (log, path, names))
        except TypeError:
            pass
    raise log.stopped(f"its forward reads {where}, a {type(value).__name__} that may change")


def _name(path: Path, names: Path) -> str:
    return ".".join(path + names)


@cache
def _spying(spy: type, kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (spy, kind), names)


def _copied(spy: type, given: Any, log: tuple[Log, Path, Path]) -> Any:
    kind = _spying(spy, type(given))
    found = object.__new__(kind)
    object.__getattribute__(found, "__dict__").update(given.__dict__, **{_LOG: log})
    return found


def spied(
    module: nn.Module,
    log: Log,
    dtype: torch.dtype | None,
    training: bool,
    dropping: Path | None = None,
    path: Path = (),
) -> Any:
    """Return a copy of a module tree over meta tensors; every place in it has a copy of its own.

    dtype: of all floating parameters and buffers, their own if None. While training, dropouts and
    rates are 0, but for the dropout at `dropping`, whose rate is 1.
    """
    if path and has_hooks(module):
        reason = f"{'.'.join(path)}: a hook watches it, or its forward was replaced"
        raise log.stopped(reason)
    if path and type(module).__call__ is not nn.Module.__call__:
        raise log.stopped(f"{'.'.join(path)}: a {type(module).__name__} is called in its own way")
    clone = _copied(_SpyModule, module, (log, path, ()))
    attributes = object.__getattribute__(clone, "__dict__")
    log.kinds[path] = type(module), len(module._modules)

    def meta(given: Tensor | None, name: str, is_parameter: bool) -> Tensor | None:
        if given is None:
            return None
        to = dtype if dtype is not None and given.is_floating_point() else given.dtype
        made = torch.empty(tuple(given.shape), dtype=to, device="meta")
        if is_parameter:
            made = nn.Parameter(made, requires_grad=to.is_floating_point)
            log.parameters[id(made)] = (*path, name), made
        return made

    below = partial(spied, log=log, dtype=dtype, training=training, dropping=dropping)
    attributes["training"] = training
    attributes["_parameters"] = {n: meta(p, n, True) for n, p in module._parameters.items()}
    attributes["_buffers"] = {n: meta(b, n, False) for n, b in module._buffers.items()}
    attributes["_modules"] = {
        name: None if child is None else below(child, path=(*path, name))
        for name, child in module._modules.items()
    }
    if training:
        for name in rates_of(module):
            attributes[name] = float(path == dropping)
    return clone


def rates_of(module: nn.Module) -> list[str]:
    """Return the attributes that are numbers by which a forward drops while training."""
    if type(module) is nn.Dropout:
        return ["p"]
    own = vars(module).items()
    return [n for n, v in own if "drop" in n and type(v) in (int, float) and n[0] != "_"]
