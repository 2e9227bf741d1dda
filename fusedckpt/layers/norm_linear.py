"""A norm and the linears that read it, such as q, k and v, that save only the norm's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fusedckpt.autograd import arguments
from fusedckpt.blocks import validate
from fusedckpt.blocks.builder import Linears, numbered
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import LoRA
from fusedckpt.layers.children import are_letter, spec_of
from fusedckpt.layers.linear import LinearOptions
from fusedckpt.layers.norm import NormSpec, split_norm


def norm_linear(
    x: Tensor,
    norm: NormSpec,
    weights: Sequence[Tensor | LoRA],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
    """Return F.linear(norm(x), weight, bias) for every weight, saving only x for backward.

    Eager saves norm(x) besides the tensors that the norm saves; here backward normalizes x again,
    once for all linears. No GEMM is recomputed.

    Args:
        x: [..., D].
        norm: a NormSpec over D.
        weights: [N_i, D] each, of x's dtype; under autocast of any dtype but float64. Or `LoRA`
            records, or quantized weights, as in `mlp`.
        biases: [N_i] or None for each weight; None for no biases.

    Returns:
        A tuple of [..., N_i], one per weight.

    Raises:
        ValueError: no weights, another number of biases, or invalid shapes or devices.
        TypeError: tensors are not dense, not floating point, or of different dtypes.
    """
    if norm is None:
        arguments.wrong_type("norm_linear", "norm", "a NormSpec", norm)
    weights, biases = _as_projections("norm_linear", weights, biases)
    return run_projections("norm_linear", x, norm, list(zip(weights, biases, strict=True)))


def run_projections(
    name: str, x: Tensor, norm: NormSpec, linears: list[tuple[Any, Any]], shape: Any = None
) -> Any:
    """Run a norm and linears on x; None where a module calls its children.

    shape: the `normalized_shape` of a module's norm, None for a function's call.
    """
    names = numbered(len(linears))
    bare, kinds, tensors = split_norm(norm)
    options = LinearOptions(
        name,
        name,
        Linears(names),
        norm=bare,
        kinds=kinds,
        normalized_shape=shape,
        is_module=shape is not None,
    )
    ys = run_layer(options, x, tensors, linears)
    return (ys,) if isinstance(ys, Tensor) else ys


def _as_projections(name: str, weights: Any, biases: Any) -> tuple[list[Any], list[Any]]:
    """Return linears' weights and biases as lists; refuse none, and not as many of both."""
    weights = validate.as_list(name, "weights", weights)
    biases = [None] * len(weights) if biases is None else validate.as_list(name, "biases", biases)
    if not weights:
        raise ValueError(f"{name}: weights must not be empty, got none")
    if len(weights) != len(biases):
        raise ValueError(
            f"{name}: biases must be one per weight, got {len(biases)} for {len(weights)}"
        )
    return weights, biases


class NormLinear(nn.Module):
    """A norm and the linears that read it, such as q, k and v; only the norm's input is saved.

        n = norm(x); (linear(n) for linear in linears)

    Args:
        norm: a norm module over the linears' in_features; the child `norm`.
        linears: nn.Linear modules; the children `linears.0`, `linears.1`, ...

    Called with [..., in_features], returns a tuple of [..., out_features], one per linear.
    """

    save_levels = ()

    def __init__(self, norm: nn.Module, *linears: nn.Module):
        arguments.module("NormLinear", "norm", norm)
        arguments.modules("NormLinear", "linears", linears)
        super().__init__()
        self.norm = norm
        self.linears = nn.ModuleList(linears)

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Map [..., in_features] to one [..., out_features] per linear."""
        norm: Any = self.norm
        linears: list[Any] = list(self.linears)
        if are_letter("n", norm) and are_letter("l", *linears):
            pairs = [(m.weight, m.bias) for m in linears]
            shape = norm.normalized_shape
            ys = run_projections("NormLinear", input, spec_of(norm), pairs, shape)
            if ys is not None:
                return ys
        n = norm(input)
        return tuple([linear(n) for linear in linears])
