"""Memory-sharing norms: they save their result, which the next linear saves anyway, and rstd.

They have no weights: `merge_affine` multiplies a norm's into the linears that read it. Exact up to
rounding; they save bytes only where a linear that reads the result saves it.

Source: MS-LayerNorm and MS-RMSNorm of Yang et al., "Reducing Fine-Tuning Memory Overhead by
Approximate and Memory-Sharing Backpropagation", arXiv 2406.16282.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch
from fusedckpt.blocks import validate


class _MSNorm(torch.autograd.Function):
    """y = norm(x) of rows, and rstd [..., 1]. Backward computes dx from y and rstd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float, is_layer: bool) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if is_layer:
            y, _, rstd = torch.native_layer_norm(wide, x.shape[-1:], None, None, eps)
        else:
            rstd = wide.square().mean(-1, keepdim=True).add(eps).rsqrt()
            y = wide * rstd
        return y.to(x.dtype), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output)
        ctx.set_materialize_grads(False)
        ctx.is_layer = inputs[2]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, drstd: Tensor | None) -> Any:  # type: ignore[override]
        y, rstd = ctx.saved_tensors
        row = y.to(rstd.dtype)
        dx = None
        if dy is not None:
            wide = dy.to(rstd.dtype)
            dx = wide - row * (row * wide).mean(-1, keepdim=True)
            dx = (dx - wide.mean(-1, keepdim=True) if ctx.is_layer else dx) * rstd
        if drstd is not None:
            # only second derivatives reach rstd
            share = row * (drstd * rstd.square() / -row.shape[-1])
            dx = share if dx is None else dx + share
        return None if dx is None else dx.to(y.dtype), None, None


def _width(name: str, shape: Any, eps: Any = None) -> int:
    """Return the one size of normalized_shape; refuse more, and an invalid eps."""
    if eps is not None:
        arguments.number(name, "eps", eps, 0)
    shape = validate.normalized_shape(name, shape)
    if len(shape) != 1:
        raise ValueError(f"{name}: normalized_shape must be one size, got {list(shape)}")
    return shape[0]


def _normalized(norm: nn.LayerNorm | nn.RMSNorm, x: Any) -> Tensor:
    """Return the norm of x."""
    name = type(norm).__name__
    shape = norm.normalized_shape
    eps = norm.eps
    validate.check_tensor(name, "x", x)
    if not x.is_floating_point():
        raise TypeError(f"{name}: x must be floating point, got {x.dtype}")
    if x.shape[-1:] != shape:
        raise ValueError(f"{name}: x must end in {list(shape)}, got {list(x.shape)}")
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return _MSNorm.apply(x, eps, isinstance(norm, nn.LayerNorm))[0]


class MSLayerNorm(nn.LayerNorm):
    """nn.LayerNorm without weights, over the last dimension, that saves its result and rstd.

    Saves 4 bytes a row besides the result, 8 of float64. In half precision backward reads the
    rounded result.
    """

    def __init__(self, normalized_shape: int | tuple[int], eps: float = 1e-5) -> None:
        arguments.number("MSLayerNorm", "eps", eps, 0)
        super().__init__(_width("MSLayerNorm", normalized_shape), eps, elementwise_affine=False)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., normalized_shape]; return the dtype of the input."""
        return _normalized(self, input)


class MSRMSNorm(nn.RMSNorm):
    """nn.RMSNorm without a weight, which saves its result and rstd as `MSLayerNorm` does."""

    def __init__(self, normalized_shape: int | tuple[int], eps: float | None = None) -> None:
        width = _width("MSRMSNorm", normalized_shape, eps)
        super().__init__(width, eps, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., normalized_shape]; return the dtype of x."""
        return _normalized(self, x)


def merge_affine(norm: nn.Module, *linears: nn.Linear) -> nn.Module:
    """Multiply a norm's weight and bias into its linears; return the norm without both.

        W' = W diag(weight), b' = b + W bias

    in float64, rounded once. A linear without a bias gets one where the norm has one. Training then
    differs: an optimizer moves the product. Put the returned norm in the place of `norm`.

    The readers of the norm's result are not checked. The model computes the same only if no other
    layer reads it, the linears read nothing else, and they share their weights with no other layer.
    A router, or a residual taken after the norm, would also read it.

    Args:
        norm: nn.LayerNorm, nn.RMSNorm, or fusedckpt's, over one dimension.
        linears: nn.Linear, all that read the result of `norm`.

    Raises:
        ValueError: shapes do not fit, or the norm has no weight.
        TypeError: norm or linears are of other classes.
    """
    scale, shift = _affine("merge_affine", norm, linears)
    for linear in linears:
        weight = linear.weight.double()
        _write(linear, weight * scale, None if shift is None else weight @ shift)
    kind = MSLayerNorm if isinstance(norm, nn.LayerNorm) else MSRMSNorm
    return kind(norm.normalized_shape, norm.eps).train(norm.training)  # type: ignore[arg-type]


def unmerge_affine(norm: nn.Module, *linears: nn.Linear) -> None:
    """Undo `merge_affine` of the same norm and linears, up to rounding, after training as well.

    A bias that it added stays, at zero without training. Put `norm` back in its place.

    Raises:
        ValueError: as `merge_affine`, and where a weight of the norm is zero.
    """
    scale, shift = _affine("unmerge_affine", norm, linears)
    if not bool(scale.all()):
        raise ValueError(
            "unmerge_affine: norm.weight must not have zeros, because the linears divide by it"
        )
    for linear in linears:
        weight = linear.weight.double() / scale
        _write(linear, weight, None if shift is None else -(weight @ shift))


@torch.no_grad()
def _write(linear: nn.Linear, weight: Tensor, shift: Tensor | None) -> None:
    """Write a weight, and add to the bias."""
    linear.weight.copy_(weight)
    if shift is not None and linear.bias is None:
        linear.bias = nn.Parameter(shift.to(linear.weight), linear.weight.requires_grad)
    elif shift is not None:
        linear.bias.copy_(linear.bias.double() + shift)


def _affine(name: str, norm: Any, linears: Any) -> tuple[Tensor, Tensor | None]:
    """Return a norm's scale and bias in float64; refuse a norm that cannot be merged."""
    if not isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        arguments.wrong_type(name, "norm", "an nn.LayerNorm or nn.RMSNorm", norm)
    width = _width(name, norm.normalized_shape)
    if norm.weight is None:
        raise ValueError(f"{name}: norm must have a weight, got elementwise_affine=False")
    arguments.modules(name, "linears", linears)
    for i, linear in enumerate(linears):
        if type(linear).forward is not nn.Linear.forward:
            arguments.wrong_type(name, f"linears[{i}]", "an nn.Linear", linear)
        if linear.in_features != width:
            raise ValueError(f"{name}: linears[{i}] must have {width} in_features, got {linear}")
        if (
            not dispatch.are_plain(*linear._parameters.values())
            or "weight" not in linear._parameters
        ):
            raise ValueError(f"{name}: linears[{i}] must have a dense weight of its own")
    scale = norm.weight.detach().double() + getattr(norm, "offset", 0.0)
    bias = getattr(norm, "bias", None)
    return scale, None if bias is None else bias.detach().double()
