"""Samples of saved tensors, by which a recompute that brings back other values is an error.

A function may read any state: a gradient is wrong only where the recompute brings back another
tensor than autograd saved. So the forward takes 64 elements of each tensor that it drops,
and the recompute compares those of its own.

One kernel takes the elements of all tensors of a dtype: they are taken when the call returns, or
when the tensors that wait for it are `_MOST_WAITING` times as large as the call's arguments. At the
end of a backward one comparison of bits serves all its segments; only where bits differ are numbers
compared, but for rounding.

The result of that comparison is a flag on the device. The modules that `fuse` runs again wait for
nothing: the flag is copied to pinned memory, and read when the device has passed it, at the next
call of such a module or end of a backward; the end of a backward waits for flags of the last but
two. So their error may come one or two steps late, and not at all for the last steps of a process;
with `torch.autograd.detect_anomaly()` it comes at the end of its backward.

`checkpoint(debug="samples")`, and all samples on a CPU, compare at the end of each recompute, and
raise at the end of the backward, before an optimizer's step. Some operations save memory that they
have not written, as ctc_loss does: where samples differ, one more recompute runs, in memory that is
filled with NaN, and elements that become NaN there are not compared.

torch._assert_async would wait for nothing, too, but its error names no function and ends all use of
the GPU by the process: it serves where a CUDA graph is captured, and nothing can be read.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from fusedckpt.autograd import private
from fusedckpt.autograd.private import Hooks, local_of
from fusedckpt.autograd.recipes import CHECKS, COMPARISONS
from fusedckpt.autograd.storages import is_dense, storage_of
from fusedckpt.checkpointing.surroundings import NOTHING

# elements of each tensor, and how many tensors in a row have samples at other places
_COUNT = 64
_PLACES = 16
# tensors wait for the one kernel until they have so many times the bytes of a call's arguments
_MOST_WAITING = 8
# flags of as many backwards may be unread
_MOST_UNREAD = 2
# a share of the magnitudes of the result of a norm or linear that reads a rounded input: a write to
# the input is seen if it changes the result's elements by more
_ROUNDED_SLACK = 0.25
# elements of a whole tensor that are compared at once
_MOST_AT_ONCE = 1 << 22
# the dtypes of indices
_INDICES = (torch.int64, torch.int32)
# those with a kernel of torch.take
_DTYPES = frozenset(
    (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128)
    + (torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
)


class SampledTensors(NamedTuple):
    """Elements of tensors of one dtype and device, as many of each, one tensor behind another."""

    # the places of the tensors among those that a segment saved
    indices: tuple[int, ...]
    elements: Tensor

    def row(self, number: int) -> Tensor:
        """Return the elements of one tensor."""
        size = self.elements.numel() // len(self.indices)
        return self.elements.narrow(0, number * size, size)


class Gather:
    """Takes elements of tensors, by one kernel for all tensors of a dtype.

    room: the bytes of tensors that may wait for it.
    """

    def __init__(self, room: int):
        self.room = room
        self._bytes = 0
        # by index: a tensor, the strides by which its elements are chosen, and its version, None of
        # an inference tensor; one that is written since has no sample
        self._waiting: dict[int, tuple[Tensor, tuple[int, ...], int | None]] = {}
        self.blocks: list[SampledTensors] = []

    def add(self, index: int, tensor: Tensor, strides: Any = None, key: int = 0) -> Any:
        """Add the tensor that is saved at an index; return its strides, None for no sample.

        strides: those of the forward's tensor, by which elements are chosen in a recompute. key: of
        its storage, if known.
        """
        local = _local(tensor)
        if not _has_elements(local, key):
            return None
        count = local.numel()
        layout = local.stride()
        version = None if local.is_inference() else local._version
        self._waiting[index] = local, strides or layout, version
        self._bytes += count * local.itemsize
        if self._bytes > self.room:
            self.take()
        return layout

    def drop(self, index: int) -> None:
        """Drop the tensor at an index, if it waits."""
        self._waiting.pop(index, None)

    def clear(self) -> None:
        """Drop the tensors that wait."""
        self._waiting.clear()
        self._bytes = 0

    def take(self) -> None:
        """Take the elements of the tensors that wait."""
        if not self._waiting:
            return
        rows: dict[int, Tensor] = {}
        # a view would hold the graph of its tensor
        with private.unseen(), private.unrecorded():
            for index, (tensor, strides, version) in self._waiting.items():
                is_written = version is not None and tensor._version != version
                if not is_written and tensor.untyped_storage().nbytes():
                    rows[index] = _elements_of(tensor, index, strides)
            self.blocks += _blocks_of(rows)
        # `clear`, without a call
        self._waiting.clear()
        self._bytes = 0


def _local(tensor: Tensor) -> Any:
    """Return a tensor, this process's part of one that lies on several."""
    return tensor if type(tensor) is Tensor else local_of(tensor)


def _has_elements(tensor: Tensor, key: int = 0) -> bool:
    """Whether a tensor has memory with numbers; key: of its storage, if known."""
    if tensor.dtype not in _DTYPES or tensor.is_meta or not (key or storage_of(tensor)):
        return False
    # memory of nothing is freed between uses
    return bool(tensor.numel() and tensor.untyped_storage().nbytes())


def _blocks_of(rows: Mapping[int, Tensor]) -> list[SampledTensors]:
    """Return elements of tensors, by their indices, in memory of their own."""
    groups: dict[Any, dict[int, Tensor]] = {}
    for index, elements in rows.items():
        kind = elements.dtype, elements.device, elements.numel()
        groups.setdefault(kind, {})[index] = elements
    blocks = []
    for (_, _, size), samples in groups.items():
        parts = [*samples.values()]
        # autocast refuses half precision of another kind, unless there is a result
        elements = parts[0].new_empty(len(parts) * size)
        torch.cat(parts, out=elements)
        blocks.append(SampledTensors(tuple(samples), elements))
    return blocks


def _elements_of(tensor: Tensor, number: int, strides: tuple[int, ...]) -> Tensor:
    """Return 64 elements of a tensor as a view of its memory, others for another number.

    strides: of the forward's tensor. Where those leave gaps in memory, or this tensor has others,
    the elements are a copy, by one kernel.
    """
    shape = tensor.shape
    line = _line(shape, strides, number % _PLACES)
    if line is None:
        is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        # a tensor made in a capture lives in the graph's memory
        places = _places if is_captured else _known_places
        return torch.take(tensor, places(tensor.numel(), number % _PLACES, tensor.device))
    size, step, start = line
    if tensor.stride() == strides:
        return tensor.as_strided((size,), (step,), tensor.storage_offset() + start)
    indices = [_index_of(start + step * i, shape, strides) for i in range(size)]
    return torch.take(tensor, torch.tensor(indices, device=tensor.device))


@lru_cache(4096)
def _line(shape: torch.Size, strides: tuple[int, ...], number: int) -> tuple[int, int, int] | None:
    """Return how many of a tensor's elements are taken, their distance, and the first.

    None where its elements do not fill its memory.
    """
    if not is_dense(shape, strides):
        return None
    count = shape.numel()
    size = min(count, _COUNT)
    # an odd step meets all columns of a matrix whose rows are powers of two
    step = count // _COUNT * 61 // 64 | 1 if count >= 2 * _COUNT else 1
    return size, step, (count - (size - 1) * step - 1) * number // (_PLACES - 1)


def _index_of(place: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the index, in order of the dimensions, of the element at a place in dense memory."""
    index = 0
    for stride, size in zip(strides, shape, strict=True):
        index = index * size + place // stride % size
    return index


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

    name: of the function, for errors. is_late: whether no backward waits for their comparison.
    is_rounded: whether the recompute begins with rounded values: then only indices must be
    the same.
    """

    def __init__(self, name: str, is_late: bool = False, is_rounded: bool = False):
        self.name = name
        self.is_late = is_late
        self.is_rounded = is_rounded
        self._gather = Gather(0)
        # storages of arguments: their versions are checked
        self._given: frozenset[int] = frozenset()
        # bytes of the tensors that were dropped, and the storage of the last one
        self.nbytes = 0
        self._last = 0
        # of the tensors with samples
        self.strides: dict[int, tuple[int, ...]] = {}
        # the last tensor that requires no grad, which may yet be written: its index; the operation,
        # its shape and dtype
        self._noise: tuple[int, Any] = -1, None

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Take note of the arguments of a call; raise where an earlier backward was wrong."""
        if _unread:
            read_passed()
        self._given = frozenset(map(storage_of, tensors)) - {0}
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        self._gather.room = _MOST_WAITING * nbytes

    def take(self, index: int, tensor: Tensor, key: int = 0) -> None:
        """Take those of the tensor that is saved at an index; key: of its storage, if known."""
        like = private.num_nodes(), tensor.shape, tensor.dtype
        if like == self._noise[1] and (tensor.requires_grad or tensor.dim() == 1):
            # rrelu saves its noise, then its input, and then draws the noise; batch norm saves its
            # running statistics, and writes them without a version
            self.drop([self._noise[0]])
        if not tensor.requires_grad:
            self._noise = index, like
        key = key or storage_of(tensor)
        if key not in self._given:
            # saved again by the operation that reads it
            self.nbytes += 0 if key and key == self._last else tensor.numel() * tensor.itemsize
            self._last = key
            # the few integers that attention saves may be memory that nothing has written
            is_index = tensor.dtype in _INDICES and tensor.numel() >= _COUNT
            if self.is_rounded and not is_index:
                return
            strides = self._gather.add(index, tensor, key=key)
            if strides is not None:
                self.strides[index] = strides

    def drop(self, indices: Iterable[int]) -> None:
        """Drop those of tensors that no recompute brings back."""
        for index in indices:
            if self.strides.pop(index, None) is not None:
                self._gather.drop(index)

    def clear(self) -> None:
        """Drop the tensors that wait, of a call that raised."""
        self._gather.clear()

    def end(self, staying: Iterable[int]) -> None:
        """End a call; staying: indices of tensors that no recompute brings back."""
        self.drop(staying)
        self._gather.take()

    def recompute(self) -> Gather:
        """Return the object that takes those of a recompute."""
        return Gather(self._gather.room)

    def pairs(self, recompute: Gather) -> list[Pair]:
        """Return the samples with those of a recompute."""
        recompute.take()
        return _paired(
            self._gather.blocks, recompute.blocks, self.name, self.is_late, self.is_rounded
        )


class Pair(NamedTuple):
    """Elements of tensors in the forward of a function, and in its recompute."""

    # the function
    name: str
    # of its forward
    before: Tensor
    # of its recompute
    now: Tensor
    # of how many tensors, each of as many elements
    num_tensors: int = 1
    # whether no backward waits for their comparison
    is_late: bool = False
    # whether the recompute began with rounded values
    is_rounded: bool = False
    # the share of the elements' magnitudes by which they may differ, 0 for that of a rounding
    slack: float = 0.0


def _paired(
    before: Sequence[SampledTensors], now: Sequence[SampledTensors], name: str, *options: Any
) -> list[Pair]:
    """Return the elements that two of a function of this name have both taken.

    options: fields of a `Pair` behind the number of tensors.
    """
    if [block.indices for block in before] == [block.indices for block in now]:
        blocks = zip(before, now, strict=True)
        elements = [(a.elements, b.elements, len(a.indices)) for a, b in blocks]
    else:
        rows = _rows_of(before)
        elements = [(rows[i], row, 1) for i, row in _rows_of(now).items() if i in rows]
    return [
        Pair(name, a, b, count, *options)
        for a, b, count in elements
        if (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
    ]


def _rows_of(blocks: Sequence[SampledTensors]) -> dict[int, Tensor]:
    """Return the elements of each tensor, by its index."""
    return {
        index: block.row(number) for block in blocks for number, index in enumerate(block.indices)
    }


class _Pairs(list[Pair]):
    """The pairs of one backward. Only that backward holds them: if it fails, they are freed."""

    def read(self) -> None:
        """Raise where they differ; a GPU's thread may hold a backward beyond its end."""
        pairs = [*self]
        self.clear()
        compare(pairs)


# by the number of their backward
_of_backwards: dict[int, weakref.ref[_Pairs]] = {}


def compare_at_end(pairs: list[Pair]) -> None:
    """Compare samples at the end of the backward that runs now; at once outside of any."""
    if not private.ends_backward():
        return compare(pairs)
    backward = private.backward_id()
    reference = _of_backwards.get(backward)
    known = None if reference is None else reference()
    if known is None:
        known = _Pairs()
        for number, reference in [*_of_backwards.items()]:
            if reference() is None:
                # other threads do the same
                _of_backwards.pop(number, None)
        _of_backwards[backward] = weakref.ref(known)
        private.at_end_of_backward(known.read)
    known += pairs


def compare_recompute(pairs: list[Pair], run_again: Callable[[], list[Pair]]) -> None:
    """Compare samples of a recompute; an error comes at the end of the backward that runs now.

    run_again: makes the recompute once more, and returns its samples. It is called where some
    differ, to tell memory that nothing has written from a real difference.
    """
    if any(_waits(pair) for pair in pairs):
        return compare_at_end(pairs)
    with private.unseen(), torch.no_grad():
        are_same = [bool(_are_same([pair]) or _are_same([pair], True)) for pair in pairs]
    if not all(are_same):
        compare_at_end(_defined(pairs, run_again))


def _waits(pair: Pair) -> bool:
    """Whether the comparison of samples waits for the end of the backward."""
    return pair.before.is_cuda and (pair.is_late or not may_wait(pair.before.device))


def _defined(pairs: list[Pair], run_again: Callable[[], list[Pair]]) -> list[Pair]:
    """Return samples without elements in memory that nothing has written."""
    try:
        with _filled_memory():
            filled = run_again()
    except Exception:
        # another error than a difference would hide it
        return pairs
    if [pair.now.shape for pair in filled] != [pair.now.shape for pair in pairs]:
        return pairs
    with private.unseen(), torch.no_grad():
        return [_where_written(a, b.now) for a, b in zip(pairs, filled, strict=True)]


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Fill new tensors with NaN, or the largest integer."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch makes a class of this module
    memory: Any = torch.utils.deterministic
    was_filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = was_filled
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warning)


def _where_written(pair: Pair, filled: Tensor) -> Pair:
    """Return samples with zeros in place of elements that have the value of filled memory."""
    if filled.itemsize == 1:
        # random numbers of a byte may have that value
        return pair
    # memory that an earlier such run filled may be used again
    is_known = _is_filled(pair.now) & _is_filled(pair.before)
    is_unwritten = _is_filled(filled) & ~is_known
    before, now = (x.masked_fill(is_unwritten, 0) for x in (pair.before, pair.now))
    return pair._replace(before=before, now=now)


def _is_filled(elements: Tensor) -> Tensor:
    """Return which elements have the value of filled memory; most NaN of arithmetic have others."""
    if elements.is_complex():
        return elements.isnan()
    if not elements.is_floating_point():
        return elements == torch.iinfo(elements.dtype).max
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[elements.itemsize]
    return elements.view(bits) == elements.new_full((), torch.nan).view(bits)


class _Unread(NamedTuple):
    """The comparison of one backward's samples, on its way from a device."""

    # whether all bits are the same, in pinned memory
    flag: Tensor
    # recorded behind the copy of the flag
    passed: Any
    pairs: Sequence[Pair]
    # where both wait for their next use
    free: deque[tuple[Tensor, Any]] | None = None


_unread: deque[_Unread] = deque()
# by device: memory of flags that were read, and their events
_free: dict[torch.device, deque[tuple[Tensor, Any]]] = {}


def read_passed(most: int | None = None) -> None:
    """Read the flags that devices have passed; wait for all but the last `most`, if given.

    Raises:
        CheckpointError: where the samples of an earlier backward differ.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    while _unread:
        is_waited_for = most is not None and len(_unread) > most
        try:
            # before anything else: other threads read, too
            unread = _unread.popleft()
        except IndexError:
            return
        if not unread.passed.query():
            if not is_waited_for:
                _unread.appendleft(unread)
                return
            unread.passed.synchronize()
        is_same = unread.flag.item()
        if unread.free is not None:
            unread.free.append((unread.flag, unread.passed))
        if not is_same:
            _check(unread.pairs)


def compare(pairs: list[Pair]) -> None:
    """Raise where samples differ by more than rounding, now or, on a GPU, late.

    Raises:
        CheckpointError: with the name of the first such function.
    """
    groups: dict[Any, list[Pair]] = {}
    is_strict = torch.is_anomaly_enabled()
    for pair in pairs:
        is_late = pair.is_late and not is_strict and pair.before.is_cuda
        groups.setdefault((pair.before.device, is_late, pair.slack), []).append(pair)
    for (device, is_late, pair_slack), group in groups.items():
        with private.unseen(), private.unrecorded():
            is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if is_captured or not (is_late or may_wait(device)):
                _assert_close(group)
                continue
            flag = _are_same(group, pair_slack > 0)
            if is_late:
                _read_late(flag, group)
            elif not flag.item():
                _check(group)
    if _unread:
        read_passed(_MOST_UNREAD)


def _checks_of(
    maker: str, tensors: Sequence[Tensor], is_rounded: bool
) -> Sequence[Callable[[Tensor], None] | None]:
    """Return checks that recipes make the content of tensors, see `recipes.CHECKS`."""
    made = _MadeSamples(maker, tensors, _ROUNDED_SLACK if is_rounded else 0.0)
    return [partial(made.see, i) if i in made.layouts else None for i in range(len(tensors))]


class _MadeSamples:
    """Elements of tensors that recipes replace, to be compared with those of their results."""

    def __init__(self, maker: str, tensors: Sequence[Tensor], slack: float):
        self._maker = maker
        self._slack = slack
        # by number, how each lies in its storage
        self.layouts: dict[int, Any] = {}
        rows: dict[int, Tensor] = {}
        # a view would hold the graph of its tensor
        with private.unseen(), private.unrecorded():
            for i, tensor in enumerate(tensors):
                local = _local(tensor)
                if _has_elements(local):
                    strides = local.stride()
                    self.layouts[i] = tensor.shape, strides, tensor.storage_offset()
                    rows[i] = _elements_of(local, i, strides)
            self._before = _blocks_of(rows)
        # of the results that this backward has read
        self._now: dict[int, Tensor] = {}
        # by number, the last such result, and its version
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def see(self, i: int, value: Tensor) -> None:
        """Take the elements of a result, and compare them when all results were seen."""
        version = 0 if value.is_inference() else value._version
        known = self._seen.get(i)
        if known is not None and known[0]() is value and known[1] == version:
            # another function reads it
            return
        self._seen[i] = weakref.ref(value), version
        rows = self._now
        layout = self.layouts[i]
        with private.unseen(), private.unrecorded():
            if (value.shape, value.stride(), value.storage_offset()) != layout:
                value = value.as_strided(*layout)
            rows[i] = _elements_of(_local(value), i, layout[1])
            if len(rows) < len(self.layouts):
                return
            self._now = {}
            # nodes read them in an order of their own
            now = _blocks_of(dict(sorted(rows.items())))
        name = (
            f"fuse: the result of a {self._maker}, if code writes there without a version, as by "
            ".data"
        )
        compare_at_end(_paired(self._before, now, name, True, False, self._slack))


CHECKS.append(_checks_of)


def are_alike(before: Tensor, now: Tensor, is_rounded: bool) -> bool | None:
    """Return whether each row of a tensor has the values of another, see `recipes.COMPARISONS`."""
    if not may_wait(before.device):
        return None
    if not before.numel():
        return True
    slack = _ROUNDED_SLACK if is_rounded else 0.0
    width = before.shape[-1]
    # errors are computed in float64
    size = max(_MOST_AT_ONCE * len(before) // before.numel(), 1)
    pairs = [
        Pair("", a, b, max(a.numel() // width, 1), slack=slack)
        for a, b in zip(before.split(size), now.split(size), strict=True)
    ]
    return bool(_are_same(pairs, True))


COMPARISONS.append(are_alike)


def may_wait(device: torch.device) -> bool:
    """Whether the result of a kernel may be read now."""
    if device.type != "cuda":
        return True
    return not (torch.cuda.get_sync_debug_mode() or torch.cuda.is_current_stream_capturing())


def _read_late(flag: Tensor, pairs: list[Pair]) -> None:
    device = flag.device
    with NOTHING if torch.cuda.current_device() == device.index else torch.cuda.device(device):
        free = _free.setdefault(device, deque())
        try:
            pinned, passed = free.pop()
        except IndexError:
            pinned = torch.empty((), dtype=torch.bool, pin_memory=True)
            passed = torch.Event(device)
        pinned.copy_(flag, non_blocking=True)
        # torch.cuda.Event's finds the stream in Python, and takes twenty times as long
        passed.record()
    _unread.append(_Unread(pinned, passed, pairs, free))


def _are_same(pairs: Sequence[Pair], rounds: bool = False) -> Tensor:
    """Return whether all elements are the same, bit for bit or but for rounding."""
    if rounds:
        return torch.stack([_are_close(pair).all() for pair in pairs]).all()
    return (_bytes_of([p.before for p in pairs]) == _bytes_of([p.now for p in pairs])).all()


def _bytes_of(blocks: list[Tensor]) -> Tensor:
    in_bytes = [block.view(torch.uint8) for block in blocks]
    return in_bytes[0] if len(in_bytes) == 1 else torch.cat(in_bytes)


def _check(pairs: Iterable[Pair]) -> None:
    """Raise where samples differ by more than rounding; wait for the device."""
    with private.unseen(), torch.no_grad():
        for pair in pairs:
            if not _are_same([pair], True).item():
                raise CheckpointError(_message(pair))


def _assert_close(pairs: Iterable[Pair]) -> None:
    """Have a device raise where samples differ by more than rounding."""
    for pair in pairs:
        # torch takes no longer one
        message = _message(pair)[:254]
        private.assert_later(_are_same([pair], True), message)


def _message(pair: Pair) -> str:
    if pair.is_rounded:
        return (
            f"{pair.name}: the recompute chose other indices than the forward, as a router may, "
            "because store='int8' rounds its input: the gradients of this backward, on a GPU of "
            "one or two before, are wrong. Name that call in save_regions, or leave store out"
        )
    return (
        f"{pair.name}: the recompute gives other values than the forward saved, so gradients of "
        "this backward, on a GPU perhaps of one or two before, are wrong: it reads state that has "
        "changed, so pass that as an argument, or a generator that is not restored"
    )


def _are_close(pair: Pair) -> Tensor:
    """Return for each tensor whether its elements are the same but for rounding."""
    dtype = pair.before.dtype
    before, now = (x.reshape(pair.num_tensors, -1) for x in (pair.before, pair.now))
    if dtype.is_complex:
        before, now = (torch.view_as_real(x).flatten(1) for x in (before, now))
    is_equal = before == now
    if not before.is_floating_point():
        return is_equal.all(1)
    is_equal |= before.isnan() & now.isnan()
    eps = torch.finfo(dtype).eps
    # atomics may add in another order, which a result of 16 bits rounds away
    slack = pair.slack or (eps / 2 if eps > 1e-4 else 128 * eps)
    # MPS has no float64
    wide = torch.float32 if before.device.type == "mps" else torch.float64
    before = before.to(wide)
    now = now.to(wide)
    # of infinite and undefined values neither is below the other
    error = (before - now).abs().where(~is_equal, 0).sum(1)
    return error <= slack * before.abs().nan_to_num(posinf=0.0).sum(1)
