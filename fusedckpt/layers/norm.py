"""RMSNorm and LayerNorm that save only x: backward recomputes mean and rstd from it.

The residual-add forms save the new residual, which is one of their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch, private, tracker
from fusedckpt.blocks import reader, validate
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import NormSpec
from fusedckpt.blocks.programs import NormOptions
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import NO_NOTES, NOTES, notes_of

Shape = int | Sequence[int]

# of torch's norms
_RMS_FORWARD = dispatch.own_forward(nn.RMSNorm)
_LAYER_FORWARD = dispatch.own_forward(nn.LayerNorm)
# the functions that they call
_RMS_FUNCTION = dispatch.own_function(F, "rms_norm")
_LAYER_FUNCTION = dispatch.own_function(F, "layer_norm")


def _remembered(shape: Shape) -> Shape:
    """Return a shape by which a decision may be remembered: True equals 1 in a tuple."""
    return list(shape) if isinstance(shape, tuple) and bool in map(type, shape) else shape


def _called(norm: nn.Module, options: NormOptions, x: Tensor, weight: Any, bias: Any) -> Tensor:
    """Run a module's call; note the inputs for readers of its result, or why eager ran."""
    if private.num_function_modes() and tracker.sees_alone():
        return tracker.outside_mode(_called, norm, options, x, weight, bias)
    y = run_layer(options, x, (weight, bias))
    if y is not None:
        return reader.note_norm(norm, y, weight, bias)
    if sharded.is_sharded(x):
        run = partial(_called, norm, options)
        y = sharded.on_rows(run, len(options.normalized_shape), x, weight, bias)
        if y is not None:
            return y
    is_complex = isinstance(x, Tensor) and x.is_complex()
    if is_complex or not dispatch.are_plain(x, weight, bias):
        fallbacks.note_fallback(norm, fallbacks.fallback_of(x, weight=weight, bias=bias))
    return options.reference(x, (weight, bias))


def is_patched(norm: nn.Module) -> bool:
    """Whether the class of a swapped norm, or torch, has got another forward since."""
    original = norm.__dict__.get(NOTES, NO_NOTES).original
    if original is None:
        return False
    forward = original.kind.forward
    if forward is _LAYER_FORWARD:
        return F.layer_norm is not _LAYER_FUNCTION
    return forward is not _RMS_FORWARD or F.rms_norm is not _RMS_FUNCTION


def _run_patched(norm: nn.Module, x: Tensor) -> Any:
    kind = notes_of(norm).original.kind
    is_own = kind.forward in (_RMS_FORWARD, _LAYER_FORWARD)
    changed = "the function of torch that it calls" if is_own else f"{kind.__name__}.forward"
    fallbacks.note_fallback(norm, NotFused("changed", changed))
    return kind.forward(norm, x)


def rms_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> Tensor:
    """Return F.rms_norm(x, normalized_shape, weight + offset, eps), saving only x for backward.

    Args:
        x: [..., *normalized_shape], float32, bfloat16, float16 or float64; statistics are computed
            in float32 (float64 for float64).
        normalized_shape: sizes of the last dimensions, which are normalized together.
        weight: normalized_shape, of any floating dtype, or None.
        eps: added to the mean square; None means the machine epsilon of the statistics' dtype.
        offset: added to the weight in float32; Gemma stores w and scales by 1 + w.
        cast: where half precision is rounded. "torch" and "gemma" round once, at the end. "llama"
            rounds the normalized x before the weight, and returns the promoted dtype.

    Returns:
        The shape and dtype of x, but for `cast`; under GPU autocast the dtype of F.rms_norm.

    Raises:
        ValueError: invalid shapes, devices or options.
        TypeError: tensors are not dense or not floating point, or an argument has another type.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    shape = _remembered(normalized_shape)
    options = NormOptions("rms_norm", "rms", shape, eps, offset=offset, cast=cast)
    return run_layer(options, x, (weight, None))


def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.layer_norm(x, normalized_shape, weight, bias, eps), saving only x for backward.

    Arguments, result and errors are those of `rms_norm`; bias has normalized_shape or is None.
    Dtypes that F.layer_norm rejects on x's device raise.

    Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450.
    """
    options = NormOptions("layer_norm", "layer", _remembered(normalized_shape), eps)
    return run_layer(options, x, (weight, bias))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual, ...) and x + residual in one pass.

    Saves only x + residual, the second output. x and residual must have the same shape; dtypes
    promote as in x + residual. For other arguments and errors see `rms_norm`.
    """
    name = "add_rms_norm"
    validate.check_tensor(name, "residual", residual)
    shape = _remembered(normalized_shape)
    options = NormOptions(name, "rms", shape, eps, offset=offset, cast=cast, adds=True)
    return run_layer(options, x, (residual, weight, None))


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return layer_norm(x + residual, ...) and x + residual in one pass.

    Saves only x + residual, the second output. x and residual must have the same shape; dtypes
    promote as in x + residual. For other arguments and errors see `layer_norm`.
    """
    name = "add_layer_norm"
    validate.check_tensor(name, "residual", residual)
    options = NormOptions(name, "layer", _remembered(normalized_shape), eps, adds=True)
    return run_layer(options, x, (residual, weight, bias))


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that saves only its input, and recomputes the statistics in backward.

    Constructor, parameters and state_dict are nn.RMSNorm's; `offset` and `cast` are those of
    `functional.rms_norm`. The weight starts at 1 - offset, so that the scale starts at one.
    """

    # fused, but without a choice
    save_levels = ()

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        cast: str = "torch",
    ):
        affine = arguments.flag("RMSNorm", "elementwise_affine", elementwise_affine)
        spec = NormSpec("rms", affine or None, None, eps, offset, cast)  # type: ignore[arg-type]  # no weight yet
        validate.check_norm("RMSNorm", spec)
        arguments.factory("RMSNorm", device, dtype)
        shape = validate.normalized_shape("RMSNorm", normalized_shape)
        self.offset = offset
        super().__init__(shape, eps, affine, device, dtype=dtype)  # type: ignore[arg-type]
        self.cast = cast

    def reset_parameters(self) -> None:
        """Set the scale, weight + offset, to one."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., *normalized_shape]."""
        # without a call, as mostly it is torch's
        notes = self.__dict__.get(NOTES, NO_NOTES)
        original = notes.original
        if original is not None and (
            original.kind.forward is not _RMS_FORWARD or F.rms_norm is not _RMS_FUNCTION
        ):
            return _run_patched(self, x)
        # once: a parametrization computes it
        weight = self.weight
        shape = self.normalized_shape
        eps = self.eps
        offset = self.offset
        cast = self.cast
        store = notes.store
        options = NormOptions("rms_norm", "rms", shape, eps, offset, cast, True, store=store)
        return _called(self, options, x, weight, bias=None)

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"

    def extra_repr(self) -> str:
        """Describe the layer as nn.RMSNorm does, with the options that differ from it."""
        offset = f", offset={self.offset}" if self.offset else ""
        cast = f", cast={self.cast}" if self.cast != "torch" else ""
        return super().extra_repr() + offset + cast


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that saves only its input, and recomputes the statistics in backward.

    Constructor, parameters and state_dict are nn.LayerNorm's; errors are those of
    `functional.layer_norm`.
    """

    save_levels = ()

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        shape = validate.normalized_shape("LayerNorm", normalized_shape)
        arguments.number("LayerNorm", "eps", eps, 0)
        affine = arguments.flag("LayerNorm", "elementwise_affine", elementwise_affine)
        bias = arguments.flag("LayerNorm", "bias", bias)
        arguments.factory("LayerNorm", device, dtype)
        super().__init__(shape, eps, affine, bias, device=device, dtype=dtype)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., *normalized_shape]."""
        # without a call, as mostly it is torch's
        notes = self.__dict__.get(NOTES, NO_NOTES)
        original = notes.original
        if original is not None and (
            original.kind.forward is not _LAYER_FORWARD or F.layer_norm is not _LAYER_FUNCTION
        ):
            return _run_patched(self, input)
        # once: a parametrization computes them
        weight = self.weight
        bias = self.bias
        shape = self.normalized_shape
        eps = self.eps
        store = notes.store
        options = NormOptions("layer_norm", "layer", shape, eps, is_module=True, store=store)
        return _called(self, options, input, weight, bias=bias)

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"
