"""One norm feeding several linears, such as q, k and v, that saves their common input alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import dispatch
from fusedckpt.blocks import validate
from fusedckpt.blocks.block import run_linears
from fusedckpt.blocks.builder import Linears, split
from fusedckpt.blocks.norm_spec import NormSpec
from fusedckpt.blocks.operands import LoRA
from fusedckpt.blocks.programs import NormLinearOptions

__all__ = ["norm_linear"]


def norm_linear(
    x: Tensor,
    norm: NormSpec,
    weights: Sequence[Tensor | LoRA],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
    """Return F.linear(norm(x), weight, bias) for every weight, saving only x for backward.

    Eager saves norm(x) besides what the norm saves; here backward normalises x again, once for all
    linears. No GEMM is recomputed.

    Args:
        x: [..., D].
        norm: a NormSpec over D.
        weights: [N_i, D] each, of x's dtype; under autocast of any dtype but float64. Or `LoRA`
            records, or quantised weights, as in `mlp`.
        biases: [N_i] or None for each weight; None for no biases.

    Returns:
        A tuple of [..., N_i], one per weight.

    Raises:
        ValueError: no weights, another number of biases, or invalid shapes or devices.
        TypeError: tensors are not dense, not floating point, or of different dtypes.
    """
    if dispatch.is_recorded(x):
        return reference.norm_linear(x, norm, weights, biases)
    weights, biases = validate.projections("norm_linear", weights, biases)
    (bare, kinds), tensors = split(norm)
    options = NormLinearOptions("norm_linear", bare, kinds, linears_of(len(weights)))
    ys = run_projections(options, x, tensors, zip(weights, biases, strict=True))
    return reference.norm_linear(x, norm, weights, biases) if ys is None else ys


def linears_of(count: int) -> Linears:
    """Name the linears of a call."""
    return Linears(tuple([f"weights[{i}]" for i in range(count)]))


def run_projections(options: NormLinearOptions, x: Tensor, norm: Any, linears: Any) -> Any:
    """Run a block on x, a norm's weight and bias, and linears; None where eager is to run."""
    ys = run_linears(options, x, norm, list(linears))
    return (ys,) if isinstance(ys, Tensor) else ys
