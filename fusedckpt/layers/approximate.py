"""Activations with an exact value and an approximate derivative, saved in two bits an element.

They are the paper's, and no default anywhere: a fused layer that saves its input alone is exact,
and often saves no more.
"""

from __future__ import annotations

from torch import Tensor, nn

from fusedckpt.autograd import dispatch
from fusedckpt.blocks import eager
from fusedckpt.blocks.block import apply
from fusedckpt.blocks.programs import ActOptions


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
    return _run(ActOptions("regelu2", "gelu"), x)


def resilu2(x: Tensor) -> Tensor:
    """Return F.silu(x), saving two bits an element: the derivative has four steps.

    The derivative is 0 up to -6.305, -0.0406 up to -0.0009, 1.0403 up to 6.326 and 1 above. All
    else is as in `regelu2`.
    """
    return _run(ActOptions("resilu2", "silu"), x)


def _run(options: ActOptions, x: Tensor) -> Tensor:
    if isinstance(x, Tensor) and not x.dim():
        return _run(options, x.view(1)).view(())
    call, phase, _ = dispatch.settled(options, x)
    if call is not None:
        return apply(call, phase, x)
    return eager.hidden((x,), options.activation)


class _Approximate:
    """A module without arguments, of an activation with an approximate derivative."""

    options: ActOptions

    def __init__(self) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        """Return act(input)."""
        return _run(self.options, input)

    def extra_repr(self) -> str:
        """Show no arguments."""
        return ""


class ReGELU2(_Approximate, nn.GELU):
    """nn.GELU with the derivative of `functional.regelu2`, which saves two bits an element."""

    options = ActOptions("regelu2", "gelu", is_module=True)


class ReSiLU2(_Approximate, nn.SiLU):
    """nn.SiLU with the derivative of `functional.resilu2`, which saves two bits an element."""

    options = ActOptions("resilu2", "silu", is_module=True)
