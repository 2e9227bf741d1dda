"""Whether a unit does the same each time it is called, as a recompute expects."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fusedckpt.autograd.private import storage_key
from fusedckpt.checkpointing.calls import ATOMS, Argument
from fusedckpt.checkpointing.chain import ChainedSegment
from fusedckpt.checkpointing.module_calls import recomputed
from fusedckpt.memory import storages_of, strided
from fusedckpt.planning.roles import OPTIONS
from fusedckpt.reporting.containers import nested, restorer
from fusedckpt.reporting.trial import is_state, tensors_of

CHANGES = "changes its argument"
NOT_THE_SAME = "its forward is not the same twice"
_OVERWRITTEN = "its input is modified later in the step"

# devices whose tensors are noted by checksums of their bits, those of others by copies
_CHECKSUMMED = ("cpu",)
# by so many eps of the largest value two results may differ where atomics add in any order
_ROUNDING = 64


class Noting(ChainedSegment):
    """A segment of one unit that notes the tensors which its call saves and returns.

    On a CPU it notes checksums of their bits; on other devices copies of the outputs alone, as
    atomics add in any order, and attention kernels leave parts of saved tensors unwritten.
    """

    def __init__(self, module: nn.Module):
        super().__init__(OPTIONS)
        self.module, self._saved, self._late = module, list[tuple[int, Any]](), list[Tensor]()
        # by storage the bytes and the kind of device of the weights that autocast cast
        self.casts: dict[int, tuple[int, str]] = {}
        # the objects among its arguments that the call changed, by place and class
        self.changed: dict[str, Any] = {}
        self._before = {(id(at), name): _state_of(x) for at, name, x in _states_in(module)}

    def pack(self, tensor: Tensor) -> Any:
        """Note a tensor that is saved."""
        if _is_cast(tensor):
            storage = tensor.untyped_storage()
            self.casts[storage_key(storage)] = storage.nbytes(), tensor.device.type
        # integers may be a workspace that nobody wrote; random masks change the output
        if tensor.is_floating_point() and tensor.device.type == "cpu":
            if tensor.requires_grad:
                self._note(tensor)
            else:
                # rrelu saves its noise, and draws it then
                self._late.append(tensor)
        return super().pack(tensor)

    def _note(self, tensor: Tensor) -> None:
        for part in strided(tensor.detach()):
            self._saved.append((storage_key(part.untyped_storage()), _noted(part)))

    def finish(self, output: Any) -> Any:
        """Note the output and the tensors of the unit that the call wrote; return the output."""
        while self._late:
            self._note(self._late.pop())
        states = [*_states_in(self.module)]
        # batch_norm saves running statistics, and does not read them
        own = set(map(storage_key, storages_of(x for *_, x in states)))
        parts = [part for x in tensors_of([output]) for part in strided(x.detach())]
        self.results = [*map(_noted, parts), *(x for at, x in self._saved if at not in own)]
        self.written = [
            (at, name)
            for at, name, x in states
            if not _is_unwritten(self._before.get((id(at), name)), x)
        ]
        return output


def _is_cast(tensor: Tensor) -> bool:
    """Whether a tensor is a weight as autocast casts it and keeps it, or a view of that."""
    owner = tensor if tensor._base is None else tensor._base
    node: Any = owner.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    # below autocast, where a tensor is saved, nothing tells whether that is enabled
    return torch.is_autocast_cache_enabled() and hasattr(node.next_functions[0][0], "variable")


def why_not_again(segment: Noting) -> str:
    """Make a segment's call again as its recompute would; return why that cannot be, or "".

    The call finds counters and generators as the model's forward left them. Of tensors of the unit
    that its own call wrote it finds other values, as they may equal those before: a power iteration
    may have converged, and a state may depend on the last arguments alone.
    """
    (call,) = segment.calls
    try:
        for held in call.held:
            if isinstance(held, Argument):
                held.tensor()
        if call.inner is not None:
            call.inner.read()
    except RuntimeError:
        return _OVERWRITTEN
    again, values = Noting(segment.module), [(at, x, at[x]) for at, x in segment.written if x in at]
    contents = {name: _contents_of(x) for name, x in segment.changed.items()}
    restorers = [restorer(part) for x in segment.changed.values() for part in nested(x)]
    try:
        for at, name, x in values:
            at[name] = 2 * x + 1
        args, kwargs = call.arguments({})
        hooks = torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack)
        with call.surroundings.restored(), recomputed(call.fn), hooks:
            again.finish(call.fn(*args, **kwargs))
        for name, x in segment.changed.items():
            # layers that share keys and values write the same ones again, a cache grows
            if not _are_close(_contents_of(x), contents[name]):
                return f"{CHANGES} {name}"
    except Exception:
        # so would a recompute
        return NOT_THE_SAME
    finally:
        for at, name, x in values:
            at[name] = x
        for restore in restorers:
            restore()
    return "" if _are_close(again.results, segment.results) else NOT_THE_SAME


def _contents_of(value: Any) -> list[Any]:
    """Return the tensors, as noted, and the data in an object; of others their classes."""
    contents = list[Any]()
    for part in nested(value):
        if isinstance(part, Tensor):
            contents.append(_noted(part))
        else:
            contents.append(part if type(part) in ATOMS else type(part))
    return contents


def _are_close(again: list[Any], results: list[Any]) -> bool:
    return len(again) == len(results) and all(map(_is_close, again, results))


def _states_in(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the floating-point buffers of modules, and such tensors among attributes."""
    for child in module.modules():
        for place in (child._buffers, vars(child)):
            for name, x in place.items():
                if is_state(x) and x.is_floating_point():
                    yield place, name, x


def _state_of(tensor: Tensor) -> Any:
    # batch_norm writes without a new version, a power iteration may write the same values
    return id(tensor), tensor._version, _noted(tensor)


def _is_unwritten(before: Any, tensor: Tensor) -> bool:
    """Whether a tensor is as noted before, or was made since."""
    if before is None:
        return True
    *known, value = before
    *present, now = _state_of(tensor)
    if known != present:
        return False
    return _has_same_bits(value, now) if isinstance(value, Tensor) else value == now


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*bits)


def _noted(tensor: Tensor) -> Any:
    """Return shape, dtype and a checksum of the bits of a tensor on a CPU, a copy of another."""
    if tensor.device.type not in _CHECKSUMMED:
        return tensor.detach().to("cpu", copy=True)
    bits = tensor.detach().resolve_conj().resolve_neg()
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    # a copy in memory that no profiler counts, where it is not contiguous
    array = np.ascontiguousarray(bits.view(kind).numpy())
    return tensor.shape, tensor.dtype, zlib.crc32(array.data)


def _is_close(again: Any, result: Any) -> bool:
    """Whether checksums are equal, or tensors but for rounding."""
    if not isinstance(result, Tensor):
        return again == result
    if again.shape != result.shape or again.dtype != result.dtype:
        return False
    atol = 0.0
    if result.numel() and (result.is_floating_point() or result.is_complex()):
        largest = result.abs().nan_to_num(0.0, 0.0).max().item()
        atol = _ROUNDING * torch.finfo(result.dtype).eps * largest
    return torch.allclose(again, result, rtol=0, atol=atol, equal_nan=True)
