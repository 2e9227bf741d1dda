"""The functions that backward may run again, and those that read their results.

A cheap function costs a few operations for each element; GEMMs, convolutions and
attention never run again. Random functions do not either, but for dropout by its random state.
`obstacle_of_recipes` says why none may save recipes in a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt.autograd import phases, private, tracker
from fusedckpt.autograd.dispatch import is_traced

# by name, of torch, its functional module and Tensor; pointwise ones also with an underscore.
# Those of the first table save no tensor for backward
_UNSAVED = """
    add sub subtract rsub neg negative to float half bfloat16 double type type_as
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __neg__
"""
_POINTWISE = """
    mul multiply div divide true_divide pow square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p
    abs sign clamp clamp_min clamp_max clip where lerp addcmul addcdiv masked_fill reciprocal
    sin cos tan atan erf erfc maximum minimum fmax fmin heaviside logaddexp xlogy sinh cosh asinh
    __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __pow__ __rpow__
    relu silu gelu sigmoid tanh softplus softsign softshrink hardshrink mish hardswish hardsigmoid
    hardtanh relu6 leaky_relu elu glu logsigmoid threshold selu celu prelu tanhshrink logit
"""
_MOVES = """
    contiguous clone reshape flatten cat concat concatenate stack hstack vstack dstack mean sum pad
    roll flip repeat tile repeat_interleave pixel_shuffle pixel_unshuffle channel_shuffle
"""
_OTHERS = """
    layer_norm group_norm rms_norm local_response_norm normalize
    softmax log_softmax var var_mean std std_mean norm cumsum amax amin complex polar
    interpolate upsample avg_pool1d avg_pool2d avg_pool3d index_select gather take_along_dim
"""
# functions that autocast runs in its lower precision; they save recipes, and have none
_GEMMS = """
    linear bilinear matmul __matmul__ __rmatmul__ bmm baddbmm addmm addbmm mm mv einsum
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention
"""
# others that save recipes, and have none
_READERS = """
    max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d max min prod unfold fold
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    binary_cross_entropy binary_cross_entropy_with_logits embedding
"""


def _functions(names: str, suffix: str = "") -> frozenset[Any]:
    """Return torch's functions and methods of these names."""
    keys = [name + suffix for name in names.split()]
    named = [getattr(owner, key, None) for key in keys for owner in (torch, F, Tensor)]
    # torch.float is a dtype
    return frozenset(function for function in named if callable(function))


_SAVES_NOTHING = _functions(_UNSAVED) | _functions(_UNSAVED, "_") | _functions(_MOVES)
_CHEAP = _SAVES_NOTHING | _functions(_OTHERS)
_CHEAP |= _functions(_POINTWISE) | _functions(_POINTWISE, "_")
# functions that write over their first tensor, those with an argument `inplace` aside
WRITES = frozenset(
    function
    for function in _CHEAP
    if function.__name__.endswith("_") and not function.__name__.endswith("__")
) | _functions("__iadd__ __isub__ __imul__ __itruediv__")
# functions that write over it if an argument says so
_MAY_WRITE = frozenset(
    function
    for function in _CHEAP
    if "inplace" in getattr(getattr(function, "__code__", None), "co_varnames", ())
)
KINDS = {
    **dict.fromkeys(_functions(_READERS), "reader"),
    **dict.fromkeys(_functions(_GEMMS), "gemm"),
    **dict.fromkeys(_CHEAP, "cheap"),
    **dict.fromkeys(_SAVES_NOTHING, "sum"),
    **dict.fromkeys(WRITES | _MAY_WRITE, "writing"),
    F.batch_norm: "batch_norm",
    F.instance_norm: "instance_norm",
    F.dropout: "dropout",
    # by these, code writes to a tensor without raising its version
    Tensor.data.__get__: "exposes",  # type: ignore[reportAttributeAccessIssue]  # of a descriptor
    Tensor.numpy: "exposes",
    Tensor.__array__: "exposes",
    # kernels of other code mostly read
    Tensor.data_ptr: "shows",
    Tensor.__dlpack__: "shows",
}

_NAMES = " ".join((_UNSAVED, _POINTWISE, _MOVES, _OTHERS, _GEMMS, _READERS, "dropout")).split()


def _named_in(space: Any) -> dict[str, Any]:
    """Return the functions that a namespace has under these names."""
    keys = [key for name in _NAMES for key in (name, f"{name}_")]
    return {key: vars(space)[key] for key in keys if callable(vars(space).get(key))}


# by one call of C each
_NAMED = [
    (vars(space), itemgetter(*named), tuple(named.values()))
    for space, named in ((space, _named_in(space)) for space in (torch, F, Tensor))
]
# methods that Tensor has from its base
_INHERITED = frozenset(_named_in(Tensor.__base__)) - frozenset(vars(Tensor))


def obstacle_of_recipes(args: Sequence[Any]) -> str | None:
    """Return why functions may not save recipes in this call, None if they may."""
    if not torch.is_grad_enabled():
        return "it ran without gradients"
    if private.are_transforms_active() or is_traced(args[0] if args else None):
        return "it was traced or transformed"
    if private.num_function_modes() and tracker.has_foreign_modes():
        return "a TorchFunctionMode of other code was active"
    if _is_any_replaced():
        return "other code replaced functions of torch"
    if tracker.active() is not None:
        return "it ran inside another model with recipes"
    return phases.hooks_obstacle()


def _is_any_replaced() -> bool:
    """Whether other code has replaced a function by its name since.

    torch hands a mode the function that has the name now, which would call itself once more.
    """
    if not _INHERITED.isdisjoint(vars(Tensor)):
        return True
    return any(
        get(space) != functions and not all(map(_is_own, get(space), functions))
        for space, get, functions in _NAMED
    )


def _is_own(now: Any, before: Any) -> bool:
    """Whether a function is torch's, or ours in its place, as that of attention is meanwhile."""
    if now is before:
        return True
    names = getattr(now, "__globals__", {})
    return names.get("__name__", "").startswith("fusedckpt.")
