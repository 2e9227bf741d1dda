"""MLP and gated MLP blocks that save their input alone, with their norm and residual.

Elements saved and GEMM FLOPs recomputed at each level, per token, D = d_model, F = d_ff:

    level      MLP saves  gated MLP saves  backward recomputes
    inputs     D          D                the norm and the first GEMMs: 2 D F, gated 4 D F
    gate       -          D + F            the norm and the up GEMM: 2 D F
    preact     D + F      D + 2 F          the norm, nothing else but elementwise work

The last GEMM is never recomputed, and a level saves only the values that wanted gradients read.
"""

from __future__ import annotations

from torch import Tensor

from fusedckpt.blocks import programs
from fusedckpt.blocks.block import run_linears
from fusedckpt.blocks.builder import GATED, PACKED, PLAIN, Linears
from fusedckpt.blocks.operands import LoRA, NormSpec
from fusedckpt.blocks.programs import Options, split

MLP_LEVELS = programs.LEVELS["mlp"]
GATED_LEVELS = programs.LEVELS["gated_mlp"]


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
    """Return F.linear(act(F.linear(norm(x), fc1)), fc2), added to x if residual, saving only x.

    Args:
        x: [..., D], float32, bfloat16, float16 or float64.
        fc1_weight, fc1_bias: [F, D], and [F] or None, of x's dtype; under autocast of any dtype but
            float64.
        fc2_weight, fc2_bias: [D_out, F], and [D_out] or None.
        activation: as in `linear_act`.
        norm: a NormSpec over D applied before fc1, or None; nothing more is saved for it.
        residual: add x to the result; D_out must be D.
        save: "inputs" (the default) or "preact", see the table in fusedckpt/layers/mlp.py.
        chunks: into how many chunks forward and backward cut the tokens. That divides the F-wide
            temporaries, in backward 4 F bytes per token in half precision (gated 6 F); weight
            gradients then accumulate in float32, 4 bytes per weight. The default is one, unless the
            temporaries exceed 512 MiB and chunks save more than the accumulators take.
        kernel: "split" (vendor GEMMs and elementwise kernels in place) or "hybrid" (the GEMM of dh
            turns it into h and dz in its epilogue); by default split. With adapters, quantised
            weights or dropout only "split".
        dropout, output_dropout: dropout probabilities of the hidden layer, and of the result before
            x is added. Each saves a seed of 8 bytes instead of a mask, drawn from the default
            generator of x's device.

    A weight may be a `LoRA` record, or quantised (see `register_quantised`): then it is dense only
    while a GEMM reads it, and gets no gradient.

    Returns:
        [..., D_out].

    Raises:
        ValueError: invalid shapes, devices, activation, level, chunks or kernel.
        TypeError: tensors are not dense, not floating point, or of different dtypes.
    """
    bare, kinds, tensors = split(norm)
    options = Options(
        name="mlp",
        caller="mlp",
        linears=Linears(PLAIN),
        activation=activation,
        norm=bare,
        kinds=kinds,
        residual=residual,
        save=save,
        chunks=chunks,
        kernel=kernel,
        dropout=dropout,
        output_dropout=output_dropout,
    )
    return run_linears(options, x, tensors, [(fc1_weight, fc1_bias), (fc2_weight, fc2_bias)])


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
    """Return F.linear(act(gate) * up, down), added to x if residual, saving only x.

    gate = F.linear(norm(x), gate_weight, gate_bias), up likewise: SwiGLU with silu, GEGLU with
    gelu, ReGLU with relu.

    Args:
        x: [..., D].
        gate_weight, up_weight: [F, D] each; or up_weight None and gate_weight packed, [2 F, D] with
            the gate's rows first, and gate_bias likewise. Packed weights take one GEMM instead of
            two, except at save="gate".
        down_weight: [D_out, F].
        save: "inputs" (the default), "gate" or "preact", see the table in fusedckpt/layers/mlp.py.

    The other arguments, the result and the errors are those of `mlp`.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    if up_weight is None and up_bias is not None:
        raise ValueError(
            "gated_mlp: up_bias must be None if up_weight is, as gate_bias is packed too, got "
            f"{type(up_bias).__name__}"
        )
    up = [] if up_weight is None else [(up_weight, up_bias)]
    bare, kinds, tensors = split(norm)
    options = Options(
        name="gated_mlp",
        caller="gated_mlp",
        linears=Linears(GATED if up else PACKED),
        activation=activation,
        norm=bare,
        kinds=kinds,
        residual=residual,
        save=save,
        chunks=chunks,
        kernel=kernel,
        dropout=dropout,
        output_dropout=output_dropout,
    )
    linears = [(gate_weight, gate_bias), *up, (down_weight, down_bias)]
    return run_linears(options, x, tensors, linears)
