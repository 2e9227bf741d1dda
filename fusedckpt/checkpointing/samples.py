"""Samples of saved tensors, by which a recompute that brings back other values is an error.

Whatever state a function reads, a gradient can be wrong only where the recompute brings back
another tensor than autograd saved. So the forward takes 64 elements of each tensor that it drops,
and the recompute compares those of its own: 256 bytes and one kernel a tensor in float32, and one
kernel again in the recompute.

The result is a flag on the tensors' device, so that no GPU is waited for within a backward. The end
of the backward reads the flags of all segments at once. torch._assert_async would spare that one
wait, but its error names no function and ends all use of the GPU by the process; here it is a
Python error, and comes before an optimizer's step. Where a CUDA graph is captured nothing can be
read, and under torch.cuda.set_sync_debug_mode nothing may be waited for: torch._assert_async takes
the place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from fusedckpt.autograd import private
from fusedckpt.autograd.private import Hooks, pytree
from fusedckpt.autograd.private_sharding import local_of
from fusedckpt.checkpointing.calls import storage_of

# elements of each tensor, and how many tensors in a row have samples at other places
_COUNT = 64
_PLACES = 16
# those with a kernel of torch.take
_DTYPES = frozenset(
    (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128)
    + (torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
)


def sampled(tensor: Tensor, number: int) -> Tensor | None:
    """Return elements of a tensor, of other places for another number; None where it has none.

    One kernel, which reads any layout as it is.
    """
    local = local_of(tensor).detach()
    if not storage_of(local) or local.is_meta or local.dtype not in _DTYPES or not local.numel():
        return None
    if not local.untyped_storage().nbytes():
        # its memory is freed between uses
        return None
    with private.unseen():
        is_captured = local.is_cuda and torch.cuda.is_current_stream_capturing()
        # a tensor made in a capture lives in the graph's memory
        places = (_places if is_captured else _known_places)(
            local.numel(), number % _PLACES, local.device
        )
        return torch.take(local, places)


def _places(numel: int, number: int, device: torch.device) -> Tensor:
    """Return an index in each of 64 parts of a tensor."""
    part = torch.arange(_COUNT, device=device)
    # an odd multiplier spreads them within their parts
    within = (part + number * _COUNT) * 2654435761 % numel
    return (part * numel + within) // _COUNT


_known_places = lru_cache(4096)(_places)


def may_change(hooks: Hooks | None) -> bool:
    """Whether hooks on saved tensors may hand out other values, as those that compress do."""
    where = getattr(hooks[0], "__module__", None) or "" if hooks is not None else "torch"
    return where.partition(".")[0] not in ("torch", "fusedckpt")


def name_of(fn: Any) -> str:
    """Return the name of a checkpointed function for errors; a callable object may say its own."""
    name = getattr(fn, "name_in_errors", None)
    if isinstance(name, str):
        return name
    module = getattr(fn, "__self__", fn)
    return f"checkpoint: {getattr(fn, '__qualname__', type(module).__name__)}"


class Samples:
    """Those of a segment's forward.

    name: of the function, for errors.
    """

    def __init__(self, name: str):
        self.name = name
        self._of: dict[int, Tensor] = {}
        # storages of arguments: their versions are checked
        self._given: frozenset[int] = frozenset()
        # bytes of the tensors that were dropped, and the storage of the last one
        self.nbytes = 0
        self._last = 0
        # the last tensor that requires no grad, which may yet be written: index, shape and dtype
        self._noise: tuple[int, Any] = -1, None

    def begin(self, args: Iterable[Any]) -> None:
        """Take note of the arguments of a call."""
        tensors = (leaf for leaf in pytree.tree_leaves([*args]) if isinstance(leaf, Tensor))
        self._given = frozenset(storage_of(tensor) for tensor in tensors) - {0}

    def take(self, index: int, tensor: Tensor) -> None:
        """Take those of the tensor that is saved at an index."""
        like = tensor.shape, tensor.dtype
        if like == self._noise[1]:
            # rrelu saves its noise, then its input, and then draws the noise
            self._of.pop(self._noise[0], None)
        self._noise = (index, None if tensor.requires_grad else like)
        key = storage_of(tensor)
        if key not in self._given:
            # saved again by the operation that reads it
            self.nbytes += 0 if key and key == self._last else tensor.numel() * tensor.itemsize
            self._last = key
            sample = sampled(tensor, index)
            if sample is not None:
                self._of[index] = sample

    def drop(self, indices: Iterable[int]) -> None:
        """Drop those of tensors that no recompute brings back."""
        for index in indices:
            self._of.pop(index, None)

    def has(self, index: int) -> bool:
        """Whether there is one of the tensor at an index."""
        return index in self._of

    def pairs(self, recomputed: Mapping[int, Tensor]) -> list[Pair]:
        """Return the samples with those of a recompute."""
        return [Pair(self.name, self._of[i], sample) for i, sample in recomputed.items()]


class Pair(NamedTuple):
    """Elements of a tensor in the forward of a function, and in its recompute."""

    name: str
    before: Tensor
    now: Tensor


class _Pairs(list[Pair]):
    """Those of one backward, which alone holds them: they go with one that fails."""

    def read(self) -> None:
        """Raise where they differ; a GPU's thread may hold a backward beyond its end."""
        pairs = [*self]
        self.clear()
        compare(pairs)


# by the number of their backward
_of_backwards: WeakValueDictionary[int, _Pairs] = WeakValueDictionary()


def compare_at_end(pairs: list[Pair]) -> None:
    """Compare samples at the end of the backward that runs now; at once outside of any."""
    if not private.ends_backward():
        return compare(pairs)
    backward = private.backward_id()
    # kept by the callback below
    known = _of_backwards.setdefault(backward, new := _Pairs())
    if known is new:
        private.at_end_of_backward(new.read)
    known += pairs


def compare(pairs: list[Pair]) -> None:
    """Raise where samples differ by more than rounding.

    Raises:
        CheckpointError: with the name of the first such function.
    """
    groups: dict[Any, list[Pair]] = {}
    for pair in pairs:
        key = pair.before.dtype, pair.before.device
        if key == (pair.now.dtype, pair.now.device):
            groups.setdefault(key, []).append(pair)
    with private.unseen(), torch.no_grad():
        for (dtype, device), group in groups.items():
            before = torch.stack([pair.before for pair in group])
            now = torch.stack([pair.now for pair in group])
            are_same = _are_same(before, now, dtype)
            if not _may_wait(device):
                private.assert_later(are_same.all(), _message(group[0].name))
                continue
            wrong = [p for p, is_same in zip(group, are_same.tolist(), strict=True) if not is_same]
            if wrong:
                raise CheckpointError(_message(wrong[0].name))


def _may_wait(device: torch.device) -> bool:
    """Whether the result of a kernel may be read now."""
    if device.type != "cuda":
        return True
    return not (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())


def _message(name: str) -> str:
    return (
        f"{name}: its recompute brings back other values than its forward saved: it reads state "
        "that has changed since, or random numbers of a generator that is not restored. The "
        "gradients of this backward are wrong"
    )


def _are_same(before: Tensor, now: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each row whether it is the same but for rounding."""
    if dtype.is_complex:
        before, now = (torch.view_as_real(x).flatten(1) for x in (before, now))
    is_equal = before == now
    if not before.is_floating_point():
        return is_equal.all(1)
    is_equal |= before.isnan() & now.isnan()
    eps = torch.finfo(dtype).eps
    # atomics may add in another order, which a result of 16 bits rounds away
    slack = eps / 2 if eps > 1e-4 else 128 * eps
    # MPS has no float64
    wide = torch.float32 if before.device.type == "mps" else torch.float64
    before = before.to(wide)
    now = now.to(wide)
    # of infinite and undefined values neither is below the other
    error = (before - now).abs().where(~is_equal, 0).sum(1)
    return error <= slack * before.abs().nan_to_num(posinf=0.0).sum(1)
