"""Whether a call does the same when it is made again: the tensors of both runs, compared in order.

Two users. A checkpoint with `debug=True` compares the outputs of all modules inside, bit for bit,
with copies of the forward's. A plan calls a unit again before it may be recomputed: it compares
checksums of outputs and saved tensors, see `repeat_check`.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fusedckpt.autograd.private import TorchDispatchMode, disable_current_modes, pytree, uncompiled

# devices with tensors noted by checksums of their bits; those of other devices by copies
CHECKSUMMED = ("cpu",)
# by so many eps of the largest value two results may differ where atomics add in any order
_ROUNDING = 64


class Checksum(NamedTuple):
    """The shape and dtype of a tensor, and a checksum of its bits."""

    shape: torch.Size
    dtype: torch.dtype
    crc: int


# a note of a tensor of an earlier run: a copy, or a checksum
Note = Tensor | Checksum


def note_of(tensor: Tensor) -> Note:
    """Return a checksum of a tensor on a CPU, a copy of another."""
    if tensor.device.type not in CHECKSUMMED:
        return tensor.detach().to("cpu", copy=True)
    bits = tensor.detach().resolve_conj().resolve_neg()
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    # a copy in memory that no profiler counts, where it is not contiguous
    array = np.ascontiguousarray(bits.view(kind).numpy())
    return Checksum(tensor.shape, tensor.dtype, zlib.crc32(array.data))


class Results:
    """The tensors of a run, by name and in order.

    Given those of an earlier run, it notes the first difference instead. note_of: returns a note of
    a tensor. rounds: whether tensors may differ by rounding.
    """

    def __init__(
        self, note_of: Callable[[Tensor], Note], before: Results | None = None, rounds: bool = False
    ):
        self._note_of = note_of
        self._before = before
        self._rounds = rounds
        # a name and notes of each result
        self._entries: list[tuple[str, list[Note]]] = []
        self._expected = iter(before._entries if before is not None else ())
        self.difference: str | None = None

    def see(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Note the tensors of a result, or how they differ from those of the earlier run."""
        if self.difference is None:
            self.see_notes(name, [self._note_of(tensor.detach()) for tensor in tensors])

    def see_notes(self, name: str, notes: list[Note]) -> None:
        """Note a result of which only notes are left."""
        if self._before is None:
            self._entries.append((name, notes))
            return
        if self.difference is not None:
            return
        expected, before = next(self._expected, ("nothing more", []))
        if name != expected:
            self.difference = f"the recompute runs {name} where the forward ran {expected}"
        elif by := _difference(before, notes, self._rounds):
            self.difference = (
                f"the output of {name} in the recompute differs from the forward's: {by}"
            )


def _difference(before: list[Note], after: list[Note], rounds: bool) -> str | None:
    was, now = ([(note.dtype, [*note.shape]) for note in notes] for notes in (before, after))
    if was != now:
        return f"{was} in the forward, {now} in the recompute"
    for a, b in zip(before, after, strict=True):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if a != b:
                return "its bits differ"
        elif not (_is_close(a, b) if rounds else same_bits(a, b)):
            difference = a.to(torch.complex128) - b.to(torch.complex128)
            return f"by up to {difference.abs().max().item():.3g}"
    return None


def _is_close(before: Tensor, after: Tensor) -> bool:
    """Whether tensors of one shape and dtype are equal but for rounding."""
    atol = 0.0
    if before.numel() and (before.is_floating_point() or before.is_complex()):
        largest = before.abs().nan_to_num(0.0, 0.0).max().item()
        atol = _ROUNDING * torch.finfo(before.dtype).eps * largest
    return torch.allclose(after, before, rtol=0, atol=atol, equal_nan=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN to itself too."""
    with disable_current_modes():
        return torch.equal(_bytes(a), _bytes(b))


def same_note(a: Note, b: Note) -> bool:
    """Whether two notes are of tensors with equal bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and same_bits(a, b)
    return isinstance(a, Checksum) and a == b


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, where NaN equals itself."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


class WatchedRun(TorchDispatchMode):
    """The operations of a forward, and copies of the outputs of every module and of the segment.

    Given that of the forward, a recompute: it finds the first difference.
    """

    def __init__(self, fn: Any, forward: WatchedRun | None = None):
        super().__init__()
        self._forward = forward
        self._thread = 0
        module = getattr(fn, "__self__", fn)
        modules = module.named_modules() if isinstance(module, nn.Module) else ()
        self._names = {m: f"{name} ({type(m).__name__})" for name, m in modules if name}
        self._operations: list[str] = []
        if forward is None:
            # copies: a later operation may write over an output
            self._results = Results(Tensor.clone)
        else:
            self._results = Results(Tensor.detach, forward._results)
        # last hooks of modules that have hooks, while calls of these modules run
        self._last: list[RemovableHandle] = []
        # regions that run, which the recompute does not run
        self._num_pauses = 0

    @property
    def difference(self) -> str | None:
        """The first difference from the forward."""
        return self._results.difference

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
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        with disable_current_modes():
            self._results.see(name, tensors)

    def listed(self) -> str:
        """Return the operations of the forward and of this recompute."""
        forward = self._forward._operations if self._forward else []
        return (
            "\n\nOperations executed during the original forward:\n" + "\n".join(forward) + "\n\n"
            "Operations executed during recomputation:\n" + "\n".join(self._operations) + "\n\n"
            "You are seeing these because you passed `debug=True` to checkpoint."
        )
