"""Modules in a recompute, which calls them a second time: their buffers are put back after it.

So of the updates of a buffer, as in BatchNorm, only those of the forward remain. A global hook of
torch sees the calls, and exists only while a recompute runs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import register_module_forward_pre_hook

from fusedckpt.autograd import private
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import uncompiled
from fusedckpt.checkpointing.written_buffers import learn_late

# compiled modules warn that they call global hooks too, as they are meant to. The filter is for the
# whole process: catch_warnings around a recompute would change the filters of other threads
warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")


class _Local(threading.local):
    # recomputes that run, one inside another
    recomputes = 0


_local = _Local()


class _Buffer(NamedTuple):
    """A buffer at the first call of its module."""

    # the module that has it
    module: nn.Module
    # the dict of the module that has it then
    buffers: Any
    # its name there
    name: str
    # the buffer
    tensor: Tensor | None
    # its version; None where its values are not put back
    version: int | None
    # its values; None where they are not put back
    copy: Tensor | None


class Buffers:
    """Puts back, at its end, the buffers of the modules that this thread calls.

    With `attributes`, also all other attributes of modules that have buffers. is_constant: whether
    no call writes a buffer, so that it needs no copy.
    """

    def __init__(
        self, attributes: bool = False, is_constant: Callable[[Tensor], bool] | None = None
    ):
        self._thread = threading.get_ident()
        self._attributes = attributes
        self._is_constant = is_constant
        self._modules: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self._copies: list[_Buffer] = []

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
                        copy = self._copy(buffer)
                        version = None if buffer is None or copy is None else buffer._version
                        self._copies.append(
                            _Buffer(part, part._buffers, name, buffer, version, copy)
                        )

    def _copy(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or type(buffer) is not Tensor or buffer.is_inference():
            return None
        if self._is_constant is not None and self._is_constant(buffer):
            return None
        return buffer.data.clone()

    def written(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the buffers that were copied, and written or replaced since: module and name."""
        for module, buffers, name, buffer, version, copy in self._copies:
            if copy is None or isinstance(module, torch.jit.ScriptModule):
                continue
            now = buffers.get(name)
            if now is None or now is not buffer or now._version != version:
                yield module, name

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()
        with private.unseen():
            # of a buffer that modules share, the first copy comes last
            for noted in reversed(self._copies):
                if noted.copy is not None and noted.tensor is not None:
                    # no version counts this, as none counts a write by BatchNorm's kernels
                    noted.tensor.data.copy_(noted.copy)
                # TorchScript's have no `get`
                buffers = noted.buffers
                name = noted.name
                if name in buffers and buffers[name] is not noted.tensor:
                    buffers[name] = noted.tensor
        for module, attributes in self._modules.values() if self._attributes else ():
            if attributes:
                vars(module).clear()
                vars(module).update(attributes)
            elif hasattr(module, "reset_running_stats"):
                # it stays initialized, but its statistics are yet to begin
                module.reset_running_stats()  # type: ignore[operator]  # a method


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


class RecomputedCall:
    """Lets the recompute of a call find buffers as the call did, and puts them back at its end.

    Buffers that the call's forward is known to write have the values before it, see
    `written_buffers`; those of the other modules that are called are put back. If the function is a
    bound method of a module, also that module's: its forward, without its hooks. A function may say
    by `is_constant` which buffers it writes in no call; it brings its state back itself.
    """

    def __init__(self, call: Any):
        self._call = call
        # the context that ends with the call
        self._around: Any = None

    def __enter__(self) -> None:
        call = self._call
        module = getattr(call.fn, "__self__", None)
        module = module if isinstance(module, nn.Module) else None
        self._is_constant = is_constant = getattr(call.fn, "is_constant", None)
        _local.recomputes += 1
        try:
            if call.buffers is None and not _watchers:
                # most
                self._around = self._buffers = Buffers(is_constant=is_constant).__enter__()
                if module is not None:
                    self._buffers.before(module, ())
            else:
                self._around = ExitStack()
                self._enter_in(self._around, module)
        except BaseException:
            _local.recomputes -= 1
            if self._around is not None:
                self._around.__exit__(None, None, None)
            raise

    def _enter_in(self, stack: ExitStack, module: nn.Module | None) -> None:
        """Enter the contexts of a call that writes buffers, or that others watch."""
        is_constant = self._is_constant
        if self._call.buffers is not None:
            copies = stack.enter_context(self._call.buffers.restored())
            is_constant = lambda buffer: id(buffer) in copies  # noqa: E731
        self._buffers = stack.enter_context(Buffers(is_constant=is_constant))
        if module is not None:
            self._buffers.before(module, ())
        for watcher in _watchers:
            stack.enter_context(watcher(module))

    def __exit__(self, *error: Any) -> bool | None:
        try:
            if self._is_constant is None:
                for part, name in self._buffers.written():
                    learn_late(part, name, self._call.fn, self._call.values)
        finally:
            _local.recomputes -= 1
            is_suppressed = self._around.__exit__(*error)
        return is_suppressed


def is_recomputing() -> bool:
    """Return whether a checkpoint, ours or torch's, is recomputing at the moment.

    For forward hooks and counters that should act once per step.
    """
    if _local.recomputes:
        return True
    phase = current()
    return phase is not None and phase.recomputes
