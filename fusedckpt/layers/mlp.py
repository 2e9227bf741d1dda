"""MLP and gated MLP blocks that keep their input alone, with their norm and residual.

What a level keeps and costs, per token, D = d_model, F = d_ff, in elements and GEMM FLOPs:

    level      MLP kept   gated MLP kept   backward recomputes
    inputs     D          D                the norm and the first GEMMs: 2 D F, gated 4 D F
    gate       -          D + F            the norm and the up GEMM: 2 D F
    preact     D + F      D + 2 F          the norm, nothing else but elementwise work

The last GEMM is never recomputed, and a level keeps only what the wanted gradients read.
"""

from __future__ import annotations

from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd.lora import LoRA
from fusedckpt.autograd.norm_spec import NormSpec
from fusedckpt.layers import validate
from fusedckpt.layers.mlp_call import PACKED, MLPOptions, split
from fusedckpt.layers.mlp_function import run

__all__ = ["gated_mlp", "mlp"]

MLP_LEVELS = ("inputs", "preact")
GATED_LEVELS = ("inputs", "gate", "preact")
LINEARS = ("fc1", "fc2")
GATED_LINEARS = ("gate", "up", "down")


def mlp(
    x: Tensor,
    fc1_weight: Tensor | LoRA,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor | LoRA,
    fc2_bias: Tensor | None,
    activation: str = "gelu",
    *,
    norm: NormSpec | None = None,
    residual: bool = False,
    save: str | None = None,
    chunks: int | None = None,
    kernel: str | None = None,
    dropout: float = 0.0,
    output_dropout: float = 0.0,
) -> Tensor:
    """Return F.linear(act(F.linear(norm(x), fc1)), fc2), added to x if residual; keeps only x.

    Args:
        x: [..., D], float32, bfloat16, float16 or float64.
        fc1_weight, fc1_bias: [F, D], and [F] or None, of x's dtype; under autocast of any but
            float64.
        fc2_weight, fc2_bias: [D_out, F], and [D_out] or None.
        activation: as in `linear_act`.
        norm: a NormSpec over D applied before fc1, or None; it adds nothing to what is kept.
        residual: add x to the result; D_out must be D.
        save: "inputs" (the default) or "preact", see the table at the top of this module.
        chunks: cut the tokens into so many chunks, forward and backward. That divides the F-wide
            temporaries, in backward 4 F bytes per token in half precision (gated 6 F), and weight
            gradients accumulate in float32, 4 bytes per weight. By default one, unless the
            temporaries pass 512 MiB and cutting them saves more than the accumulators take.
        kernel: "split" (vendor GEMMs and elementwise kernels in place) or "hybrid" (the GEMM of dh
            turns it into h and dz in its epilogue); by default split, unless
            `python -m bench tune` measured the other to be faster. "split" alone with adapters,
            quantised weights or dropout.
        dropout, output_dropout: probabilities at which elements of the hidden layer, and of the
            result before x is added, are zeroed, the others divided by 1 - p. A seed of 8 bytes is
            kept for each, no mask. The seeds come from the default generator of x's device.

    A weight may be a `LoRA` record, whose adapter is then computed beside it, or dequantise: see
    `register_quantised`. It is dense only while a GEMM reads it, and has no gradient.

    Returns:
        [..., D_out].

    Raises:
        ValueError: shapes, devices, activation, level, chunks or kernel do not fit.
        TypeError: not dense floating-point tensors, or of different dtypes.
    """
    (bare, kinds), norm_tensors = split(norm)
    options = MLPOptions(
        "mlp", LINEARS, activation, residual, save, MLP_LEVELS, chunks, kernel, bare, kinds
    )
    if dropout or output_dropout:
        options = options._replace(dropout=dropout, output_dropout=output_dropout)
    weights = (fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    y = run(options, x, *norm_tensors, fc1_weight, fc1_bias, None, None, fc2_weight, fc2_bias)
    if y is not None:
        return y
    extras = {"residual": residual, "dropout": dropout, "output_dropout": output_dropout}
    return reference.mlp(x, *weights, activation, norm=norm, **extras)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor | LoRA,
    up_weight: Tensor | LoRA | None,
    down_weight: Tensor | LoRA,
    activation: str = "silu",
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    norm: NormSpec | None = None,
    residual: bool = False,
    save: str | None = None,
    chunks: int | None = None,
    kernel: str | None = None,
    dropout: float = 0.0,
    output_dropout: float = 0.0,
) -> Tensor:
    """Return F.linear(act(gate) * up, down), added to x if residual; keeps only x.

    gate = F.linear(norm(x), gate_weight, gate_bias), up likewise: SwiGLU with silu, GEGLU with
    gelu, ReGLU with relu.

    Args:
        x: [..., D].
        gate_weight, up_weight: [F, D] each; or up_weight None and gate_weight packed, [2 F, D]
            with the gate's rows first, and gate_bias likewise. One GEMM then makes both, and each
            of their gradients, but at "gate".
        down_weight: [D_out, F].
        save: "inputs" (the default), "gate" or "preact", see the table at the top of this module.

    The other arguments, the result and the errors are those of `mlp`.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    if up_weight is None:
        validate.no_bias("gated_mlp", up_bias)
    (bare, kinds), norm_tensors = split(norm)
    linears = PACKED if up_weight is None else GATED_LINEARS
    options = MLPOptions(
        "gated_mlp", linears, activation, residual, save, GATED_LEVELS, chunks, kernel, bare, kinds
    )
    if dropout or output_dropout:
        options = options._replace(dropout=dropout, output_dropout=output_dropout)
    gate, up = (gate_weight, gate_bias), (up_weight, up_bias)
    y = run(options, x, *norm_tensors, *gate, *up, down_weight, down_bias)
    if y is not None:
        return y
    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    weights = (gate_weight, up_weight, down_weight)
    extras = {"residual": residual, "dropout": dropout, "output_dropout": output_dropout}
    return reference.gated_mlp(x, *weights, activation, **biases, norm=norm, **extras)
