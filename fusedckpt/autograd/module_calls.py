"""Observes module calls of one thread, and restores buffers after those of a recompute.

A recompute calls modules a second time. Their updates of their own buffers, as in BatchNorm, are
undone right after each call, so that only the forward's update remains.

It replaces `nn.Module._compiled_call_impl`, which every call reads, at the first recompute and for
good, as changing nn.Module invalidates Python's type caches (20 us; 50 us for
`nn.Module.__call__`). Hooks would be visible to other code: Dynamo traces them, and fused layers
fall back for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fusedckpt.autograd.phases import current
from fusedckpt.autograd.uncompiled import never_compile, uncompiled


class Observer(Protocol):
    """Sees the calls of modules."""

    def sees(self, module: nn.Module) -> bool:
        """Whether to be told of the calls of a module."""
        ...

    def enter(self, module: nn.Module) -> Any:
        """Be told of a call; what is returned comes back to `leave`."""
        ...

    def returned(self, module: nn.Module, output: Any) -> None:
        """Be told what a call returned."""
        ...

    def leave(self, entered: Any) -> None:
        """Be told of a call's end, by an exception too."""
        ...


class _Local(threading.local):
    observer: Observer | None = None
    # recomputes that run, one inside another
    recomputes = 0


_local = _Local()
_NAME = "_compiled_call_impl"


class _Seen:
    """What a call of a module runs, its compiled function or its own, seen from outside."""

    def __get__(self, module: nn.Module | None, kind: Any = None) -> Callable[..., Any] | None:
        if module is None:
            return None
        observer, compiled = _local.observer, vars(module).get(_NAME)
        if observer is None or not observer.sees(module) or torch.compiler.is_compiling():
            return compiled
        return partial(_observed_call, observer, module, compiled or module._call_impl)

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[_NAME] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[_NAME]


def _observed_call(
    observer: Observer, module: nn.Module, call: Any, /, *args: Any, **kwargs: Any
) -> Any:
    entered = observer.enter(module)
    try:
        output = call(*args, **kwargs)
        observer.returned(module, output)
        return output
    finally:
        observer.leave(entered)


@contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """Let `observer` see the calls of modules in this thread; None lets nobody."""
    if not isinstance(vars(nn.Module)[_NAME], _Seen):
        setattr(nn.Module, _NAME, _Seen())
    before, _local.observer = _local.observer, observer
    try:
        yield
    finally:
        _local.observer = before


class PutsBackBuffers:
    """Restores the buffers of modules after each of their calls."""

    def sees(self, module: nn.Module) -> bool:
        """Those of modules with buffers, and of what runs other modules unseen."""
        return len(module._buffers) > 0 or _runs_as_one(module)

    def enter(self, module: nn.Module) -> Any:
        """Copy the buffers."""
        return _copied(module.modules() if _runs_as_one(module) else (module,))

    def returned(self, module: nn.Module, output: Any) -> None:
        """Nothing to do."""

    def leave(self, entered: Any) -> None:
        """Put them back."""
        if entered:
            _put_back(entered)


Watcher = Callable[[nn.Module | None], AbstractContextManager[None]]
_watchers: list[Watcher] = []


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` be around the calls of recomputes: of a module's forward, without its hooks."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def recomputed(fn: Any, observer: PutsBackBuffers) -> Iterator[None]:
    """Let `observer` see the calls of modules in a recompute, and put buffers back.

    Also of the module whose bound method `fn` is: its forward, called without its hooks.
    """
    module = getattr(fn, "__self__", None)
    module = module if isinstance(module, nn.Module) else None
    entered = None if module is None else PutsBackBuffers.enter(observer, module)
    _local.recomputes += 1
    try:
        with observed(observer), ExitStack() as around:
            for watcher in _watchers:
                around.enter_context(watcher(module))
            yield
    finally:
        _local.recomputes -= 1
        if entered is not None:
            observer.leave(entered)


def is_recomputing() -> bool:
    """Whether a checkpoint, ours or torch's, is recomputing at the moment.

    For forward hooks and counters that should act once per step.
    """
    if _local.recomputes:
        return True
    phase = current()
    return phase is not None and phase.recomputes


@uncompiled
def _copied(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Any, Tensor | None]]:
    """Return the buffers of modules, each with the dict it is in, its name and a copy."""
    with _unseen():
        return [
            (module._buffers, name, buffer, _copy(buffer))
            for module in modules
            for name, buffer in module._buffers.items()
        ]


@uncompiled
def _put_back(copied: Iterable[tuple[dict[str, Any], str, Any, Tensor | None]]) -> None:
    with _unseen():
        for buffers, name, buffer, copy in copied:
            if copy is not None:
                # no version counts this, as none counts what BatchNorm's kernels write
                buffer.data.copy_(copy)
            # TorchScript's have no `get`
            if name in buffers and buffers[name] is not buffer:
                buffers[name] = buffer


def _unseen() -> AbstractContextManager[Any]:
    """Hide ops from selective checkpointing, which counts those of forward and recompute."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _copy(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or type(buffer) is not Tensor or buffer.is_inference():
        return None
    return buffer.data.clone()


def _runs_as_one(module: nn.Module) -> bool:
    """Whether a module runs those in it without calling them."""
    compiled = vars(module).get(_NAME) is not None or "_orig_mod" in module._modules
    return compiled or isinstance(module, torch.jit.ScriptModule)


# where it is at work, it would compile what it leaves to eager execution elsewhere
never_compile(_Seen.__get__, _observed_call, PutsBackBuffers.sees, _runs_as_one)
