"""Private touches of torch for meta tensors: attention and grouped GEMMs as on a CPU, and reads.

As in `private`, a name that this torch lacks has a fallback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
# the implementation that attention would take, its number for fused kernels, the fused kernel of
# a CPU, and the formula. Without one of them attention runs as its formula, and saves more
_choose: Any = getattr(torch, "_fused_sdp_choice", None)
_fused: Any = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_formula: Any = getattr(_aten, "_scaled_dot_product_attention_math", None)
_FLASH = 1

# the op that reads a number. Without it a read raises an error of torch's own
READ: Any = getattr(_aten, "_local_scalar_dense", None)

# the op of grouped GEMMs, whose shapes torch computes for bfloat16 alone
GROUPED_MM: Any = getattr(_aten, "_grouped_mm", None)

# where torch has shapes of meta tensors; some depend on a device, which it asks `device_hint` for
_registrations: Any = sys.modules.get("torch._meta_registrations")

# the op of embedding bags, whose second result has one element more in memory on a CPU
EMBEDDING_BAG: Any = getattr(_aten, "_embedding_bag", None)

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


def embedding_bag(*args: Any, **kwargs: Any) -> Any:
    """Return the results of an embedding bag of meta tensors, as a CPU has them."""
    output, bags, *others = EMBEDDING_BAG.default(*args, **kwargs)
    count = len(bags)
    bags = bags.new_empty(count + 1)[:count] if count else bags
    return (output, bags, *others)


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
    if _choose(*inputs, dropout_p, is_causal, **options) != _FLASH:
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
