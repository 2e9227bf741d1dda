"""Private touches of torch by reports of memory: CUDA's allocator, and meta tensors.

As in `private`, a name that this torch lacks has a fallback. A CPU's torch lacks the allocator's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# whether the allocator records its history, starts or ends that, and the history with all blocks
_is_recording: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
_record: Any = getattr(torch.cuda.memory, "_record_memory_history", None)
_snapshot: Any = getattr(torch.cuda.memory, "_snapshot", None)
# has a function called with device, requested, total and free bytes before an out-of-memory error
_attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)


def has_history() -> bool:
    """Whether the allocator has a history: torch's own has, cudaMallocAsync's has not."""
    has_names = None not in (_is_recording, _record, _snapshot)
    return has_names and torch.cuda.get_allocator_backend() == "native"


@contextmanager
def allocator_history(device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Yield a list that has the actions of CUDA's allocator when the context ends.

    A history that the caller records goes on, and its actions come first. Without it report() sees
    the free of a tensor that Python drops only when its memory is allocated again.
    """
    actions: list[dict[str, Any]] = []
    if not has_history():
        yield actions
        return
    is_callers = _is_recording()
    if not is_callers:
        _record("all", context=None, stacks="python")
    try:
        yield actions
        actions += snapshot(device)["device_traces"]
    finally:
        if not is_callers:
            _record(None)


def snapshot(device: torch.device) -> dict[str, Any]:
    """Return the allocator's snapshot, of one device: `segments` and `device_traces`."""
    whole = _snapshot()
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in whole["segments"] if segment["device"] == index]
    return {"segments": segments, "device_traces": whole["device_traces"][index]}


def record_lines(count: int) -> Callable[[], None]:
    """Record the lines of Python that allocate, for the last `count` actions; return the end of it.

    A history that the caller records goes on as it is.
    """
    if _is_recording():
        return lambda: None
    _record("all", context="alloc", stacks="python", max_entries=count)
    return lambda: _record(None)


def attach_to_out_of_memory(observer: Callable[[int, int, int, int], None]) -> bool:
    """Have a function called before each out-of-memory error, for good; return whether it will be.

    It gets the device's index, and requested, total and free bytes.
    """
    if _attach is not None:
        _attach(observer)
    return _attach is not None


_aten = torch.ops.aten
# the implementation that attention would take, its number for fused kernels, the fused kernel of
# a CPU, and the formula. Without one of them attention runs as its formula, and saves more
_choose: Any = getattr(torch, "_fused_sdp_choice", None)
_fused: Any = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_formula: Any = getattr(_aten, "_scaled_dot_product_attention_math", None)
_FUSED_CHOICE = 1

# the op that reads a number. Without it a read raises an error of torch's own
READ: Any = getattr(_aten, "_local_scalar_dense", None)

# the op of grouped GEMMs, whose shapes torch computes for bfloat16 alone
GROUPED_MM: Any = getattr(_aten, "_grouped_mm", None)

# the op of histograms: a model that takes its meta tensors for a GPU's gives it integers, whose
# shapes torch does not compute for a CPU
HISTC: Any = getattr(_aten, "histc", None)

# where torch has shapes of meta tensors; some depend on a device, which it asks `device_hint` for
_registrations: Any = sys.modules.get("torch._meta_registrations")

# the op of embedding bags, whose second result has one element more in memory on a CPU
EMBEDDING_BAG: Any = getattr(_aten, "_embedding_bag", None)

# the node whose backward runs, and the number of the next node that a forward makes. Without them
# the backward of an estimate names no modules
_current_node: Any = getattr(torch._C, "_current_autograd_node", None)
_next_number: Any = getattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr", None)

# where optimizers ask for the devices on which they update all parameters at once by default
_optimizers: Any = sys.modules.get("torch.optim.optimizer")
_FOREACH_DEVICES = "_get_foreach_kernels_supported_devices"
# and those with kernels for a whole update, and the ops of these, which have no shapes on meta
_FUSED_DEVICES = "_get_fused_kernels_supported_devices"
_FUSED_PREFIX = "aten::_fused_"

# whether attention on meta tensors saves the tensors of a fused kernel
HAS_ATTENTION = None not in (_choose, _fused, _formula)


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the result of a grouped GEMM of meta tensors, in any dtype, as a CPU has it."""
    # groups of columns of x and rows of w make a matrix each, else their rows or columns stay
    groups = () if x.dim() + w.dim() == 5 else (len(x) if offs is None else len(offs),)
    return x.new_empty((*groups, x.shape[-2], w.shape[-1]), dtype=out_dtype or x.dtype)


def histc(x: Tensor, bins: int = 100, *limits: Any, **options: Any) -> Tensor:
    """Return the histogram of a meta tensor, in any dtype."""
    return x.new_empty(bins)


def embedding_bag(*args: Any, **kwargs: Any) -> Any:
    """Return the results of an embedding bag of meta tensors, as a CPU has them."""
    output, bags, *others = EMBEDDING_BAG.default(*args, **kwargs)
    count = len(bags)
    bags = bags.new_empty(count + 1)[:count] if count else bags
    return (output, bags, *others)


def current_node() -> Any:
    """Return the node whose backward runs in this thread, None outside of a backward."""
    return None if _current_node is None else _current_node()


def number_of(node: Any) -> int:
    """Return the number of a node, which it got when it was made."""
    read = getattr(node, "_sequence_nr", None)
    return -1 if read is None else read()


def last_number() -> int:
    """Return the number of the last node that a forward made in this thread."""
    return -1 if _next_number is None else _next_number() - 1


@contextmanager
def optimizers_of_a(device: torch.device) -> Iterator[None]:
    """Let optimizers take meta tensors as they take those of a device."""
    foreach = getattr(_optimizers, _FOREACH_DEVICES, list)
    fused = getattr(_optimizers, _FUSED_DEVICES, list)
    if device.type in foreach():
        setattr(_optimizers, _FOREACH_DEVICES, lambda: [*foreach(), "meta"])
    setattr(_optimizers, _FUSED_DEVICES, lambda: [*fused(), "meta"])
    try:
        yield
    finally:
        setattr(_optimizers, _FOREACH_DEVICES, foreach)
        setattr(_optimizers, _FUSED_DEVICES, fused)


def is_fused_update(func: Any) -> bool:
    """Whether an op updates parameters and an optimizer's state, all in place."""
    return func._schema.name.startswith(_FUSED_PREFIX) and not func._schema.returns


def is_autocast_enabled() -> bool:
    """Whether autocast is enabled for a CPU or a GPU; meta tensors know no autocast."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@contextmanager
def without_autocast(refuse: Callable[[], None]) -> Iterator[None]:
    """Call `refuse` where code inside enables autocast."""
    enter = torch.amp.autocast_mode.autocast.__enter__

    def checked(self: Any) -> Any:
        entered = enter(self)
        if is_autocast_enabled():
            self.__exit__(None, None, None)
            refuse()
        return entered

    torch.amp.autocast_mode.autocast.__enter__ = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.autocast_mode.autocast.__enter__ = enter  # type: ignore[method-assign]


# ops that copy a sparse tensor; torch's have none of its elements on meta
SPARSE_COPIES = (_aten.clone.default, _aten._coalesce.default)


def sparse_copy(func: Any, x: Tensor) -> Tensor:
    """Return a copy of a sparse meta tensor; coalesced, none: how many rows differ is a value."""
    count = x._nnz() if func is SPARSE_COPIES[0] else 0
    parts = x._indices()[:, :count].clone(), x._values()[:count].clone()
    return torch.sparse_coo_tensor(*parts, x.shape, check_invariants=False)


@contextmanager
def shapes_of_a_cpu() -> Iterator[None]:
    """Let ops on meta tensors save the tensors that a CPU's do, as embedding_bag's lengths."""
    hint = getattr(_registrations, "device_hint", None)
    if hint is None:
        yield
        return
    _registrations.device_hint = lambda tensor: "cpu"
    try:
        yield
    finally:
        _registrations.device_hint = hint


@contextmanager
def attention_of_a_cpu() -> Iterator[None]:
    """Let F.scaled_dot_product_attention of meta tensors run the kernel that a CPU would run."""
    if not HAS_ATTENTION:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return F.scaled_dot_product_attention; masks become numbers, as they do there."""
    options: Any = {"scale": scale, "enable_gqa": enable_gqa}
    inputs = (None if x is None else _without_memory(x) for x in (q, k, v, attn_mask))
    if _choose(*inputs, dropout_p, is_causal, **options) != _FUSED_CHOICE:
        return _formula(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask, 1.0)
    return _fused(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape, dtype and last stride, all rows in one."""
    stride = tensor.stride(-1)
    row = torch.empty(max(1, tensor.shape[-1] * stride), dtype=tensor.dtype, device="cpu")
    row.requires_grad_(tensor.requires_grad)
    return row.as_strided(tensor.shape, (0,) * (tensor.dim() - 1) + (stride,))
