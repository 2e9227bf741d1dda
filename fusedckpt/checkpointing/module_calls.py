"""Modules in a recompute: torch's global hooks see their calls, and their buffers are put back.

A recompute calls modules a second time. Their updates of their own buffers, as in BatchNorm, are
undone right after each call, so that only the forward's update remains. The hooks exist only while
a recompute runs, or a forward with debug=True.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fusedckpt.autograd import private
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import uncompiled

# compiled modules warn that they call global hooks too, as they shall
warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")

_Copies = list[tuple[dict[str, Any], str, Any, Tensor | None]]


class _Local(threading.local):
    observer: PutsBackBuffers | None = None
    # recomputes that run, one inside another
    recomputes = 0


_local = _Local()


def is_observer(observer: PutsBackBuffers) -> bool:
    """Whether a call is the observer's to see.

    Hooks are global: calls in other threads, and in a recompute inside this one, are not.
    """
    return _local.observer is observer and not torch.compiler.is_compiling()


class PutsBackBuffers:
    """Restores the buffers of modules after each of their calls."""

    def __init__(self) -> None:
        # modules that are being called, with copies of their buffers
        self._called: list[tuple[nn.Module, _Copies]] = []

    @uncompiled
    def before(self, module: nn.Module, args: Any) -> None:
        """Copy a module's buffers, and those of all modules that it runs without calling them."""
        if not is_observer(self):
            return
        if (
            private.compiled_call(module) is not None
            or private.COMPILED_CHILD in module._modules
            or isinstance(module, torch.jit.ScriptModule)
        ):
            self._called.append((module, _copied(module.modules())))
        elif module._buffers:
            self._called.append((module, _copied((module,))))

    @uncompiled
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put them back."""
        if not is_observer(self):
            return
        if self._called and any(called is module for called, _ in self._called):
            # a call inside that raised has not come here
            while self._put_last_back() is not module:
                pass

    def end(self) -> None:
        """Put back the buffers of calls that raised."""
        while self._called:
            self._put_last_back()

    def _put_last_back(self) -> nn.Module:
        module, copies = self._called.pop()
        with _unseen():
            for buffers, name, buffer, copy in copies:
                if copy is not None:
                    # no version counts this, as none counts a write by BatchNorm's kernels
                    buffer.data.copy_(copy)
                # TorchScript's have no `get`
                if name in buffers and buffers[name] is not buffer:
                    buffers[name] = buffer
        return module


@contextmanager
def observed(observer: PutsBackBuffers) -> Iterator[None]:
    """Let `observer` see the calls of modules in this thread."""
    before, _local.observer = _local.observer, observer
    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(observer.before).remove)
        hooks.callback(register_module_forward_hook(observer.after).remove)
        try:
            yield
        finally:
            _local.observer = before


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

    If `fn` is a bound method of a module, also that module's call: its forward, without its hooks.
    """
    module = getattr(fn, "__self__", None)
    module = module if isinstance(module, nn.Module) else None
    _local.recomputes += 1
    try:
        with observed(observer), ExitStack() as around:
            if module is not None:
                observer.before(module, ())
            for watcher in _watchers:
                around.enter_context(watcher(module))
            yield
    finally:
        _local.recomputes -= 1
        observer.end()


def is_recomputing() -> bool:
    """Whether a checkpoint, ours or torch's, is recomputing at the moment.

    For forward hooks and counters that should act once per step.
    """
    if _local.recomputes:
        return True
    phase = current()
    return phase is not None and phase.recomputes


@uncompiled
def _copied(modules: Iterable[nn.Module]) -> _Copies:
    """Return the buffers of modules, each with the dict it is in, its name and a copy."""
    with _unseen():
        return [
            (module._buffers, name, buffer, _copy(buffer))
            for module in modules
            for name, buffer in module._buffers.items()
        ]


def _unseen() -> AbstractContextManager[Any]:
    """Hide ops from selective checkpointing, which counts those of forward and recompute."""
    return private.disable_current_modes() if private.num_dispatch_modes() else nullcontext()


def _copy(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or type(buffer) is not Tensor or buffer.is_inference():
        return None
    return buffer.data.clone()
