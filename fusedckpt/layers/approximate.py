"""Activations with an exact value and an approximate derivative, saved in two bits an element.

They are the paper's. No layer uses them by default: a fused layer that saves only its input is
exact, and often saves no more bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, private
from fusedckpt.autograd.backward import is_batch, one_by_one
from fusedckpt.blocks import eager, validate
from fusedckpt.kernels import codes
from fusedckpt.kernels.runtime import as_matrix


class _Coded(torch.autograd.Function):
    """act(x) of rows; backward takes the derivative from its codes alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        """Return act(x); save two bits an element."""
        rows = as_matrix(x.detach())
        kernel = "aten" if dispatch.is_aten(x.device, x.dtype, *x.shape) else "triton"
        y, codes_of_z = codes.coded_act(rows.contiguous(), activation, kernel)
        ctx.activation = activation
        ctx.kernel = kernel
        ctx.save_for_backward(codes_of_z)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return dy times the slopes of the codes."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fusedckpt: create_graph=True cannot differentiate an approximate derivative: "
                "use an exact activation"
            )
        (codes_of_z,) = ctx.saved_tensors

        def gradients(dys: Sequence[Any]) -> list[Any]:
            (dy,) = dys
            rows = as_matrix(dy)
            dx = codes.coded_grad(rows, codes_of_z, ctx.activation, ctx.kernel)
            return [dx.view(dy.shape)]

        is_batched = not torch.compiler.is_compiling() and is_batch((dy,))
        (dx,) = one_by_one(gradients, (dy,)) if is_batched else gradients((dy,))
        return dx, None


def regelu2(x: Tensor) -> Tensor:
    """Return F.gelu(x), saving two bits an element: the derivative has four steps.

    The derivative is 0 up to -3.186, -0.0492 up to -0.0012, 1.0487 up to 3.191 and 1 above, where
    GELU's goes from 0 by -0.13 and 1.13 to 1. The gradient has no derivative of its own.

    Args:
        x: [..., N], float32, bfloat16, float16 or float64.

    Returns:
        The shape and dtype of x. Saves ceil(N / 4) bytes for every N elements.

    Raises:
        TypeError: x is not a dense tensor, or not floating point.
        RuntimeError: in a backward with create_graph=True.

    Under torch.func, torch.compile and torch.export it is F.gelu, derivative included.

    Source: ReGELU2 of Yang et al., "Reducing Fine-Tuning Memory Overhead by Approximate and
    Memory-Sharing Backpropagation", arXiv 2406.16282.
    """
    return _run("regelu2", "gelu", x)


def resilu2(x: Tensor) -> Tensor:
    """Return F.silu(x), saving two bits an element: the derivative has four steps.

    The derivative is 0 up to -6.305, -0.0406 up to -0.0009, 1.0403 up to 6.326 and 1 above. All
    else is as in `regelu2`.
    """
    return _run("resilu2", "silu", x)


def _run(name: str, activation: str, x: Tensor) -> Tensor:
    is_transformed = torch.compiler.is_compiling() or private.are_transforms_active()
    is_seen = is_transformed or dispatch.is_traced(x)
    is_plain = not is_seen and validate.check_dense(name, {"x": x})
    if dispatch.DISABLED or not is_plain:
        return eager.hidden((x,), activation)
    return _Coded.apply(x if x.dim() else x.view(1), activation).view(x.shape)


class _Approximate:
    """A module without arguments, of an activation with an approximate derivative."""

    options: tuple[str, str]

    def __init__(self) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        """Return act(input)."""
        return _run(*self.options, input)

    def extra_repr(self) -> str:
        """Show no arguments."""
        return ""


class ReGELU2(_Approximate, nn.GELU):
    """nn.GELU with the derivative of `functional.regelu2`, which saves two bits an element."""

    options = "regelu2", "gelu"


class ReSiLU2(_Approximate, nn.SiLU):
    """nn.SiLU with the derivative of `functional.resilu2`, which saves two bits an element."""

    options = "resilu2", "silu"
