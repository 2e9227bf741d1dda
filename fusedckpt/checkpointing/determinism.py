"""The debug mode of a checkpoint: does the recompute give, bit for bit, what the forward gave?"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

# its name among those of modules
SEGMENT = "the segment"


class Record:
    """The outputs of every module that a segment called, in order, and then of the segment."""

    def __init__(self, modules: Iterable[nn.Module]):
        self.names: dict[nn.Module, str] = {}
        # from the outermost on, as they are held
        for module in modules:
            for name, child in module.named_modules():
                kind = type(child).__name__
                self.names.setdefault(child, f"{name} ({kind})" if name else kind)
        self._outputs: list[tuple[str, list[Tensor]]] = []
        self._position: int | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record what modules return."""
        with self._watched():
            yield

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Compare what modules return with what was recorded.

        Raises:
            CheckpointError: naming the first module that differs.
        """
        self._position = 0
        with self._watched():
            yield

    def see(self, name: str, output: Any) -> None:
        """Record or compare one output."""
        tensors = [leaf.detach() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if self._position is None:
            # copies: a later operation may write over an output
            self._outputs.append((name, [tensor.clone() for tensor in tensors]))
            return
        expected, before = (
            self._outputs[self._position]
            if self._position < len(self._outputs)
            else ("nothing more", [])
        )
        self._position += 1
        if name != expected:
            raise CheckpointError(
                f"checkpoint: {expected} ran in forward where {name} runs when recomputed"
            )
        if len(before) != len(tensors) or not all(map(_equal, before, tensors)):
            raise CheckpointError(
                f"checkpoint: the output of {name} in the recompute is not that of the forward: "
                f"{_difference(before, tensors)}"
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        thread = threading.get_ident()

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread and module in self.names:
                self.see(self.names[module], output)

        # a hook on the modules themselves would keep them from being fused
        handle = register_module_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    """Return what a tensor is made of, where NaN equals itself."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _difference(before: list[Tensor], after: list[Tensor]) -> str:
    for a, b in zip(before, after, strict=False):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {list(a.shape)} was, {b.dtype} {list(b.shape)} is"
        if not _equal(a, b):
            wide = torch.complex128 if a.is_complex() else torch.float64
            return f"by up to {(a.to(wide) - b.to(wide)).abs().max().item():.3g}"
    return f"{len(before)} tensors were, {len(after)} are"
