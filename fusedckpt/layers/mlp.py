"""MLPs and gated MLPs that save only their input, with their norm and residual.

Elements saved and GEMM FLOPs recomputed at each level, per token, D = d_model, F = d_ff:

    level      MLP saves  gated MLP saves  backward recomputes
    inputs     D          D                the norm and the first GEMMs: 2 D F, gated 4 D F
    gate       -          D + F            the norm and the up GEMM: 2 D F
    preact     D + F      D + 2 F          the norm, nothing else but elementwise work

The last GEMM is never recomputed, and a level saves only the values that wanted gradients read.

The modules compute all their children as one. They call a child that was replaced, parametrized,
hooked or given another forward, and fuse the others. They call all children for an input of a class
with ops of its own, and where a program is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import eager
from fusedckpt.blocks.builder import GATED, PACKED, TWO_LINEARS, Linears
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import LoRA
from fusedckpt.layers import sharded
from fusedckpt.layers.children import are_letter, letter_of, spec_of
from fusedckpt.layers.linear import LinearOptions
from fusedckpt.layers.norm import NormSpec, split_norm
from fusedckpt.layers.notes import NO_NOTES
from fusedckpt.layers.sharded import Sharding


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
            turns it into h and dz in its epilogue); by default split. With adapters, quantized
            weights or dropout only "split".
        dropout, output_dropout: dropout probabilities of the hidden layer, and of the result before
            x is added. Each saves a seed of 8 bytes instead of a mask, drawn from the default
            generator of x's device.

    A weight may be a `LoRA` record, or quantized (see `register_quantized`): then it is dense only
    while a GEMM reads it, and gets no gradient.

    Returns:
        [..., D_out].

    Raises:
        ValueError: invalid shapes, devices, activation, level, chunks or kernel.
        TypeError: tensors are not dense, not floating point, or of different dtypes.
    """
    bare, kinds, tensors = split_norm(norm)
    options = LinearOptions(
        name="mlp",
        caller="mlp",
        linears=Linears(TWO_LINEARS),
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
    return run_layer(options, x, tensors, [(fc1_weight, fc1_bias), (fc2_weight, fc2_bias)])


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
    bare, kinds, tensors = split_norm(norm)
    options = LinearOptions(
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
    return run_layer(options, x, tensors, linears)


class _MLPBase(nn.Module):
    """The base of MLP and GatedMLP."""

    # the name of the function that computes it
    function: str
    # the names of the function's weights
    linears: Linears
    # the names of the children with these weights
    names: tuple[str, ...]
    # of modules that were pickled by a version without dropout
    dropout = output_dropout = 0.0
    # how MLPParallel has sharded the weights
    _fusedckpt = NO_NOTES

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: nn.Module | None = None,
        residual: bool = False,
        save: str = "inputs",
        chunks: int | None = None,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
    ):
        name = type(self).__name__
        out = in_features if out_features is None else out_features
        sizes = {"in_features": in_features, "hidden_features": hidden_features}
        arguments.linear_sizes(name, sizes | {"out_features": out}, bias, device, dtype)
        arguments.layer_sizes(name, in_features, out, norm, residual)
        drops = {"dropout": dropout, "output_dropout": output_dropout}
        options = {"default": save, "chunks": chunks, **drops}
        activation, _ = LinearOptions(name, name, self.linears, activation, **options).check(None)
        super().__init__()
        self.norm = norm
        self.activation = activation
        self.residual = residual
        self.save = save
        self.chunks = chunks
        self.dropout = dropout
        self.output_dropout = output_dropout
        for child in self.names[:-1]:
            self.add_module(child, nn.Linear(in_features, hidden_features, bias, device, dtype))
        self.add_module(self.names[-1], nn.Linear(hidden_features, out, bias, device, dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        norm = self.norm
        modules = self._modules
        is_dropping = self.training
        linears: list[Any] = list(map(modules.__getitem__, self.names))
        options = LinearOptions(
            self.function,
            type(self).__name__,
            self.linears,
            self.activation,
            residual=self.residual,
            default=self.save,
            chunks=self.chunks,
            dropout=self.dropout if is_dropping else 0.0,
            output_dropout=self.output_dropout if is_dropping else 0.0,
            is_module=True,
        )
        if (sharding := self._fusedckpt.sharding) is not None:
            return self._on_shards(options, input, linears, sharding)
        are_linears = are_letter("l", *linears)
        is_norm = norm is None or are_letter("n", norm)
        pairs = [(linear.weight, linear.bias) for linear in linears] if are_linears else []
        if are_linears and is_norm:
            whole = options
            tensors = ()
            if norm is not None:
                bare, kinds, tensors = split_norm(spec_of(norm))
                shape: Any = norm.normalized_shape
                whole = options._replace(
                    name=options.caller, norm=bare, kinds=kinds, normalized_shape=shape
                )
            y = run_layer(whole, input, tensors, pairs)
            if y is not None:
                return y
        # the children are called: invalid options raise here, too
        options.check(levels.override.level)
        n = input if norm is None else norm(input)
        y = None
        if are_linears and not is_norm:
            y = run_layer(options._replace(residual=False), n, (), pairs)
        if y is None:
            y = self._called(options, n, linears)
        return input + y if self.residual else y

    def _called(self, options: LinearOptions, n: Tensor, linears: list[Any]) -> Tensor:
        """Return the layer's result for the norm's result n, calling each linear."""
        h = eager.hidden([linear(n) for linear in linears[:-1]], options.activation)
        return eager.dropout(linears[-1](eager.dropout(h, options.dropout)), options.output_dropout)

    def _on_shards(
        self, options: LinearOptions, input: Any, linears: list[Any], sharding: Sharding
    ) -> Any:
        """Run the layer on this rank's shards of its weights, the norm on its rows of the input."""
        sharded.check_input(type(self).__name__, input, sharding)
        options.check(levels.override.level)
        residual = options.residual
        output_dropout = options.output_dropout
        # of the sum over ranks
        options = options._replace(residual=False, output_dropout=0.0, is_module=False)
        n = input if self.norm is None else self.norm(sharded.placed_for_norm(input, sharding))
        is_traced = torch.compiler.is_compiling() or dispatch.is_traced(n)
        if options.num_seeds or is_traced or has_hooks(*linears):
            y = sharded.on_dtensors(lambda n: self._called(options, n, linears), n, sharding)
        else:
            pairs = [(linear.weight, linear.bias) for linear in linears]
            shards = sharded.shards_of(pairs, sharding.mesh)
            y = sharded.run_on_shards(lambda n: run_layer(options, n, (), shards), n, sharding)
        y = eager.dropout(y, output_dropout)
        return sharded.placed_as_output(input, sharding) + y if residual else y

    def linears_to_shard(self) -> list[nn.Module] | str:
        """Return its linears, or why their weights must stay whole."""
        if self.dropout:
            return sharded.DROPS
        linears: list[Any] = [self._modules[name] for name in self.names]
        for name, linear in zip(self.names, linears, strict=True):
            if letter_of(linear) != "l":
                return f"{name} is a {type(linear).__name__} that it has to call"
        return linears

    def extra_repr(self) -> str:
        """Describe the settings that no child shows."""
        settings = [f"{key}={getattr(self, key)}" for key in ("activation", "residual", "save")]
        extras = {"chunks": None, "dropout": 0.0, "output_dropout": 0.0}
        settings += [
            f"{k}={getattr(self, k)}" for k, off in extras.items() if getattr(self, k) != off
        ]
        return ", ".join(settings)


class MLP(_MLPBase):
    """Two linears with an activation between them, which save only the input x [..., D].

        y = fc2(act(fc1(norm(x)))), plus x if residual

    Args:
        in_features, hidden_features, out_features: D, F and D_out; out_features None means D.
        activation: see `functional.linear_act`.
        bias, device, dtype: of both linears, as nn.Linear has them.
        norm: a norm module over D, which becomes the child `norm`, or None.
        residual, save, chunks: see `functional.mlp`.
        dropout, output_dropout: probabilities for the hidden layer and the result, in training
            only.

    Children are `fc1`, `fc2` and, if given, `norm`.

    Saves D elements a token for backward, and D + F with save="preact". Backward recomputes the
    norm, the activation and, with save="inputs", the first GEMM. Errors are those of
    `functional.mlp`, raised by the call before any work.
    """

    function = "mlp"
    linears = Linears(TWO_LINEARS)
    names = ("fc1", "fc2")
    save_levels = LEVELS_OF["mlp"]


class GatedMLP(_MLPBase):
    """A gated MLP (SwiGLU, GEGLU, ReGLU) that saves only its input, D elements a token.

        y = down_proj(act(gate_proj(n)) * up_proj(n)), n = norm(x), plus x if residual

    Arguments, shapes and errors are those of `MLP`, without biases by default. save="gate" saves
    D + F elements a token, "preact" D + 2 F, see `functional.gated_mlp`. Children are `gate_proj`,
    `up_proj`, `down_proj` and, if given, `norm`.
    """

    function = "gated_mlp"
    linears = Linears(GATED)
    names = ("gate_proj", "up_proj", "down_proj")
    save_levels = LEVELS_OF["gated_mlp"]

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: nn.Module | None = None,
        residual: bool = False,
        save: str = "inputs",
        chunks: int | None = None,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
    ):
        super().__init__(
            in_features,
            hidden_features,
            out_features,
            activation,
            bias,
            device,
            dtype,
            norm=norm,
            residual=residual,
            save=save,
            chunks=chunks,
            dropout=dropout,
            output_dropout=output_dropout,
        )
