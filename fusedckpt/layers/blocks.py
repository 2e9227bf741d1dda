"""MLP, gated MLP and norm-then-linears as modules, with the parameter names that models use.

A block computes all its children as one. It calls a child that was replaced, parametrized, hooked
or given another forward, and fuses the others. It calls all children for an input of a class with
ops of its own, and where a program is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.blocks import eager
from fusedckpt.blocks.block import run_linears
from fusedckpt.blocks.builder import GATED, PLAIN, Linears
from fusedckpt.blocks.operands import NormSpec
from fusedckpt.blocks.programs import LEVELS, Options, split
from fusedckpt.kernels.activations import ACTIVATIONS, name_of
from fusedckpt.layers import sharded
from fusedckpt.layers.linear import Linear, run_projections
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.sharded import Sharding

# a letter for each kind of layer in a block; looked up by type, subclasses have none
_LETTERS: dict[type[nn.Module], str] = {
    **dict.fromkeys((act.module for act in ACTIVATIONS.values() if act.module), "a"),
    **dict.fromkeys((nn.Linear, Linear), "l"),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm), "n"),
    nn.Dropout: "d",
    nn.Identity: "i",
}


def letter_of(layer: Any) -> str:
    """Return the letter of a layer that a block can compute, else -.

    n, l, a, d, i for a norm, linear, activation, dropout, identity.
    """
    letter = _letter(layer)
    plain = letter != "-" and dispatch.are_plain(*layer._parameters.values())
    return letter if plain and not has_hooks(layer) else "-"


def _letter(layer: Any) -> str:
    letter = _LETTERS.get(type(layer), "-")
    if letter == "l":
        fits = type(layer) is nn.Linear or layer.activation == "identity"
    elif letter == "n":
        fits = len(layer.normalized_shape) == 1
    elif letter == "d":
        fits = isinstance(layer.p, (int, float)) and 0 <= layer.p <= 1
    else:
        fits = letter in "-i" or name_of(layer) is not None
    return letter if fits else "-"


def _are(letter: str, *layers: Any) -> bool:
    """Whether a block can compute these modules, of one letter, without calling them."""
    return {letter}.issuperset(map(_letter, layers)) and not has_hooks(*layers)


def spec_of(norm: Any) -> NormSpec:
    """Describe a norm module of torch's or ours."""
    if isinstance(norm, nn.LayerNorm):
        return NormSpec("layer", norm.weight, norm.bias, norm.eps)
    if isinstance(norm, RMSNorm):
        return NormSpec("rms", norm.weight, None, norm.eps, norm.offset, norm.cast)
    return NormSpec("rms", norm.weight, None, norm.eps)


class _Block(nn.Module):
    """MLP and GatedMLP; function: its name; linears: its weights; names: the children with them."""

    function: str
    linears: Linears
    names: tuple[str, ...]
    # of modules that were pickled before there were any
    dropout = output_dropout = 0.0
    _fusedckpt_sharding: Sharding | None = None

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
        arguments.block_sizes(name, in_features, out, norm, residual)
        drops = {"dropout": dropout, "output_dropout": output_dropout}
        options = {"default": save, "chunks": chunks, **drops}
        activation, _ = Options(name, name, self.linears, activation, **options).check(None)
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
        options = Options(
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
        if self._fusedckpt_sharding is not None:
            return self._on_shards(options, input, linears, self._fusedckpt_sharding)
        are_linears = _are("l", *linears)
        is_norm = norm is None or _are("n", norm)
        pairs = [(linear.weight, linear.bias) for linear in linears] if are_linears else []
        if are_linears and is_norm:
            whole = options
            tensors = ()
            if norm is not None:
                bare, kinds, tensors = split(spec_of(norm))
                over: Any = norm.normalized_shape
                whole = options._replace(name=options.caller, norm=bare, kinds=kinds, over=over)
            y = run_linears(whole, input, tensors, pairs)
            if y is not None:
                return y
        options.check(levels.override.level)
        n = input if norm is None else norm(input)
        y = None
        if are_linears and not is_norm:
            y = run_linears(options._replace(residual=False), n, (), pairs)
        if y is None:
            y = self._called(options, n, linears)
        return input + y if self.residual else y

    def _called(self, options: Options, n: Tensor, linears: list[Any]) -> Tensor:
        """Return the linears' result for n, calling each of them."""
        h = eager.hidden([linear(n) for linear in linears[:-1]], options.activation)
        return eager.dropout(linears[-1](eager.dropout(h, options.dropout)), options.output_dropout)

    def _on_shards(
        self, options: Options, input: Any, linears: list[Any], sharding: Sharding
    ) -> Any:
        """Run the block on this rank's shards of its weights, the norm on its rows of the input."""
        sharded.check_input(type(self).__name__, input, sharding)
        options.check(levels.override.level)
        residual = options.residual
        output_dropout = options.output_dropout
        # of the sum over ranks
        options = options._replace(residual=False, output_dropout=0.0, is_module=False)
        n = input if self.norm is None else self.norm(sharded.as_norms_take(input, sharding))
        is_traced = torch.compiler.is_compiling() or dispatch.is_recorded(n)
        if options.num_seeds or is_traced or has_hooks(*linears):
            y = sharded.on_dtensors(lambda n: self._called(options, n, linears), n, sharding)
        else:
            pairs = [(linear.weight, linear.bias) for linear in linears]
            shards = sharded.shards_of(pairs, sharding.mesh)
            y = sharded.spread(lambda n: run_linears(options, n, (), shards), n, sharding)
        y = eager.dropout(y, output_dropout)
        return sharded.like_output(input, sharding) + y if residual else y

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


class MLP(_Block):
    """Two linears with an activation between them; only the input is saved for backward.

        y = fc2(act(fc1(norm(x)))), plus x if residual

    Args:
        in_features, hidden_features, out_features: D, F and D_out; out_features None means D.
        activation: see `functional.linear_act`.
        bias, device, dtype: of both linears, as nn.Linear has them.
        norm: a norm module over D, which becomes the child `norm`, or None.
        residual, save, chunks: see `functional.mlp`.
        dropout, output_dropout: probabilities for the hidden layer and the result, in training
            only.

    Children are `fc1`, `fc2` and, where given, `norm`.
    """

    function = "mlp"
    linears = Linears(PLAIN)
    names = ("fc1", "fc2")
    save_levels = LEVELS["mlp"]


class GatedMLP(_Block):
    """SwiGLU, GEGLU or ReGLU block; only the input is saved for backward.

        y = down_proj(act(gate_proj(n)) * up_proj(n)), n = norm(x), plus x if residual

    Arguments as in MLP, without biases by default; save also takes "gate", see
    `functional.gated_mlp`. Children are `gate_proj`, `up_proj`, `down_proj` and, where given,
    `norm`.
    """

    function = "gated_mlp"
    linears = Linears(GATED)
    names = ("gate_proj", "up_proj", "down_proj")
    save_levels = LEVELS["gated_mlp"]

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
        if _are("n", norm) and _are("l", *linears):
            pairs = [(m.weight, m.bias) for m in linears]
            over = norm.normalized_shape
            ys = run_projections("NormLinear", input, spec_of(norm), pairs, over)
            if ys is not None:
                return ys
        n = norm(input)
        return tuple([linear(n) for linear in linears])
