"""Modules in a recompute, which calls them a second time: their buffers are put back after it.

So of the updates of a buffer, as in BatchNorm, only those of the forward remain. A global hook of
torch sees the calls, and exists only while a recompute runs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import register_module_forward_pre_hook

from fusedckpt.autograd import private
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import uncompiled

# compiled modules warn that they call global hooks too, as they are meant to. The filter is for the
# whole process: catch_warnings around a recompute would change the filters of other threads
warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")


class _Local(threading.local):
    # recomputes that run, one inside another
    recomputes = 0


_local = _Local()


class Buffers:
    """Puts back, at its end, the buffers of the modules that this thread calls.

    With `attributes`, all other attributes of modules with buffers, too. is_constant: whether no
    call writes a buffer, so that it needs no copy.
    """

    def __init__(
        self, attributes: bool = False, is_constant: Callable[[Tensor], bool] | None = None
    ):
        self._thread = threading.get_ident()
        self._attributes = attributes
        self._is_constant = is_constant
        self._modules: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self._copies: list[tuple[Any, str, Tensor | None, Tensor | None]] = []

    def __enter__(self) -> Buffers:
        self._hook = register_module_forward_pre_hook(self.before)
        return self

    @uncompiled
    def before(self, module: nn.Module, args: Any) -> None:
        """Copy a module's buffers, and those of all modules that it runs without calling them."""
        runs_as_one = (
            private.compiled_call(module) is not None
            or private.COMPILED_CHILD in module._modules
            or isinstance(module, torch.jit.ScriptModule)
        )
        if not (module._buffers or runs_as_one):
            # most
            return
        if threading.get_ident() != self._thread or torch.compiler.is_compiling():
            return
        for part in module.modules() if runs_as_one else (module,):
            if id(part) not in self._modules and part._buffers:
                is_lazy = isinstance(part, LazyModuleMixin)
                self._modules[id(part)] = part, {} if is_lazy else dict(vars(part))
                with private.unseen():
                    for name, buffer in part._buffers.items():
                        self._copies.append((part._buffers, name, buffer, self._copy(buffer)))

    def _copy(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or type(buffer) is not Tensor or buffer.is_inference():
            return None
        if self._is_constant is not None and self._is_constant(buffer):
            return None
        return buffer.data.clone()

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()
        with private.unseen():
            # of a buffer that modules share, the first copy comes last
            for buffers, name, buffer, copy in reversed(self._copies):
                if copy is not None and buffer is not None:
                    # no version counts this, as none counts a write by BatchNorm's kernels
                    buffer.data.copy_(copy)
                # TorchScript's have no `get`
                if name in buffers and buffers[name] is not buffer:
                    buffers[name] = buffer
        for module, attributes in self._modules.values() if self._attributes else ():
            if attributes:
                vars(module).clear()
                vars(module).update(attributes)
            elif hasattr(module, "reset_running_stats"):
                # it stays initialised, but its statistics are yet to begin
                module.reset_running_stats()  # type: ignore[operator]  # a method


def is_state(value: Any) -> TypeGuard[Tensor]:
    """Whether an attribute of a module is a tensor that calls of the module may write."""
    if type(value) is not Tensor or value.layout != torch.strided:
        return False
    return not (value.requires_grad or value.is_meta or value.is_inference())


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
def recomputed(fn: Any) -> Iterator[None]:
    """Put back, at the end of a recompute of `fn`, the buffers of the modules that it calls.

    If `fn` is a bound method of a module, also that module's: its forward, without its hooks. `fn`
    may say by `is_constant` which buffers it writes in no call.
    """
    module = getattr(fn, "__self__", None)
    module = module if isinstance(module, nn.Module) else None
    _local.recomputes += 1
    try:
        is_constant = getattr(fn, "is_constant", None)
        with Buffers(is_constant=is_constant) as buffers, ExitStack() as around:
            if module is not None:
                buffers.before(module, ())
            for watcher in _watchers:
                around.enter_context(watcher(module))
            yield
    finally:
        _local.recomputes -= 1


def is_recomputing() -> bool:
    """Return whether a checkpoint, ours or torch's, is recomputing at the moment.

    For forward hooks and counters that should act once per step.
    """
    if _local.recomputes:
        return True
    phase = current()
    return phase is not None and phase.recomputes
