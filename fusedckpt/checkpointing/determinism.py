"""The debug mode of a checkpoint: does the recompute give, bit for bit, the forward's outputs?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fusedckpt.autograd.private import TorchDispatchMode, disable_current_modes, pytree, uncompiled


class Run(TorchDispatchMode):
    """The record of a forward: its operations, and the outputs of every module and of the segment.

    Given that one, a recompute: it notes the first difference instead.
    """

    def __init__(self, fn: Any, forward: Run | None = None):
        super().__init__()
        self._forward, self._thread = forward, 0
        module = getattr(fn, "__self__", fn)
        modules = module.named_modules() if isinstance(module, nn.Module) else ()
        self._names = {m: f"{name} ({type(m).__name__})" for name, m in modules if name}
        self._operations: list[str] = []
        self._outputs: list[tuple[str, list[Tensor]]] = []
        self._expected = iter(forward._outputs if forward else ())
        # last hooks of modules that have hooks, while calls of these modules run
        self._last: list[RemovableHandle] = []
        # regions that run, which the recompute does not run
        self._num_pauses = 0
        self.difference: str | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no note of the operations and module calls inside."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the operations and module calls inside."""
        self._thread = threading.get_ident()
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._before).remove)
            hooks.callback(register_module_forward_hook(self._after).remove)
            try:
                with self:
                    yield
            finally:
                while self._last:
                    self._last.pop().remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._num_pauses:
            self._operations.append(str(func))
        return func(*args, **(kwargs or {}))

    @uncompiled
    def _before(self, module: nn.Module, args: Any) -> None:
        if module._forward_hooks and self._is_seen():
            # global hooks run before a module's own, which may replace its output
            self._last.append(module.register_forward_hook(self._see_last))

    @uncompiled
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not module._forward_hooks and self._is_seen():
            self._see_module(module, output)

    def _is_seen(self) -> bool:
        # hooks are global: calls in other threads are not seen
        is_here = threading.get_ident() == self._thread and not torch.compiler.is_compiling()
        return is_here and not self._num_pauses

    def _see_last(self, module: nn.Module, args: Any, output: Any) -> None:
        self._last.pop().remove()
        self._see_module(module, output)

    def _see_module(self, module: nn.Module, output: Any) -> None:
        self.see(self._names.get(module, type(module).__name__), output)

    def see(self, name: str, output: Any) -> None:
        """Note an output, or how it differs from the forward's."""
        if self.difference is not None:
            return
        tensors = [leaf.detach() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        with disable_current_modes():
            if self._forward is None:
                # copies: a later operation may write over an output
                self._outputs.append((name, [tensor.clone() for tensor in tensors]))
                return
            expected, before = next(self._expected, ("nothing more", []))
            if name != expected:
                self.difference = f"{expected} ran in forward where {name} runs when recomputed"
            elif by := _difference(before, tensors):
                self.difference = (
                    f"the output of {name} in the recompute is not the forward's: {by}"
                )

    def listed(self) -> str:
        """Return the operations of the forward and of this recompute."""
        forward = self._forward._operations if self._forward else []
        return (
            "\n\nOperations executed during the original forward:\n" + "\n".join(forward) + "\n\n"
            "Operations executed during recomputation:\n" + "\n".join(self._operations) + "\n\n"
            "You are seeing these because you passed `debug=True` to checkpoint."
        )


def _difference(before: list[Tensor], after: list[Tensor]) -> str | None:
    was, now = ([(t.dtype, [*t.shape]) for t in tensors] for tensors in (before, after))
    if was != now:
        return f"{was} was, {now} is"
    for a, b in zip(before, after, strict=True):
        if not same_bits(a, b):
            difference = a.to(torch.complex128) - b.to(torch.complex128)
            return f"by up to {difference.abs().max().item():.3g}"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN to itself too."""
    with disable_current_modes():
        return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, where NaN equals itself."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
