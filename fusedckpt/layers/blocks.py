"""MLP, gated MLP and norm-then-linears as modules, with the parameter names that models use.

A block computes all its children as one. A child that was replaced by another kind of module,
parametrized, hooked, given another forward, or weights of a class with ops of its own is called
instead, and what is left is fused. All are called for an input of such a class, and where a program
is recorded, as by torch.export.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.blocks import validate
from fusedckpt.blocks.block import run_linears
from fusedckpt.blocks.builder import Linears, split
from fusedckpt.blocks.mlp_program import GATED, MLPOptions
from fusedckpt.blocks.norm_spec import NormSpec
from fusedckpt.blocks.programs import NormLinearOptions
from fusedckpt.kernels.activations import ACTIVATIONS, name_of
from fusedckpt.layers import constructors, parallel
from fusedckpt.layers.linear import Linear
from fusedckpt.layers.mlp import GATED_LEVELS, MLP_LEVELS, PLAIN, gated_mlp, mlp
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.norm_linear import linears_of, run_projections
from fusedckpt.layers.styles import layout_of

__all__ = ["MLP", "GatedMLP", "NormLinear"]

_BIASES = ("gate_bias", "up_bias", "down_bias")

# one letter for what a layer is in a block; looked up by type, subclasses are strangers
_LETTERS: dict[type[nn.Module], str] = {
    **dict.fromkeys((act.module for act in ACTIVATIONS.values() if act.module), "a"),
    **dict.fromkeys((nn.Linear, Linear), "l"),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm), "n"),
}


def letter_of(layer: Any) -> str:
    """Return n, l or a for a norm, linear or activation that a block can stand for, else -."""
    letter = _letter(layer)
    plain = letter != "-" and dispatch.are_plain(*layer._parameters.values())
    return letter if plain and not has_hooks(layer) else "-"


def _letter(layer: Any) -> str:
    letter = _LETTERS.get(type(layer), "-")
    if letter == "l":
        fits = type(layer) is nn.Linear or layer.activation == "identity"
    elif letter == "n":
        fits = len(layer.normalized_shape) == 1
    else:
        fits = letter == "-" or name_of(layer) is not None
    return letter if fits else "-"


def spec_of(norm: Any) -> NormSpec:
    """Describe a norm module of torch's or ours."""
    if isinstance(norm, nn.LayerNorm):
        return NormSpec("layer", norm.weight, norm.bias, norm.eps)
    if isinstance(norm, RMSNorm):
        return NormSpec("rms", norm.weight, None, norm.eps, offset=norm.offset, cast=norm.cast)
    return NormSpec("rms", norm.weight, None, norm.eps)


class _Block(nn.Module):
    """What MLP and GatedMLP share: an optional norm before, an optional residual around."""

    levels: tuple[str, ...]
    names: tuple[str, ...]
    # of modules that were pickled before there were any
    dropout = output_dropout = 0.0

    def __init__(
        self,
        sizes: tuple[int, int, int | None],
        linear: tuple[bool, Any, torch.dtype | None],
        activation: str,
        norm: nn.Module | None,
        residual: bool,
        save: str,
        chunks: int | None,
        dropouts: tuple[float, float],
    ):
        name = type(self).__name__
        constructors.block(name, sizes, linear, norm, residual=residual)
        activation = validate.activation(name, activation)
        levels.check(name, save, self.levels)
        validate.block(name, residual, chunks)
        for key, p in zip(("dropout", "output_dropout"), dropouts, strict=True):
            arguments.probability(name, key, p)
        super().__init__()
        self.norm = norm
        self.activation, self.residual, self.save, self.chunks = activation, residual, save, chunks
        self.dropout, self.output_dropout = dropouts

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        x, norm, linears = input, self.norm, self._linears()
        options = MLPOptions(
            type(self).__name__,
            Linears(self.names),
            self.activation,
            residual=self.residual,
            save=None,
            levels=self.levels,
            chunks=self.chunks,
            default=self.save,
            is_module=True,
        )
        if self.training and (self.dropout or self.output_dropout):
            drops = {"dropout": self.dropout, "output_dropout": self.output_dropout}
            options = options._replace(**drops)
        tensors: tuple[Any, ...] = (None, None)
        if norm is not None and _letter(norm) == "n" and not has_hooks(norm):
            (spec, kinds), tensors = split(spec_of(norm))
            options = options._replace(norm=spec, kinds=kinds, over=norm.normalized_shape)
        elif norm is not None and not dispatch.is_recorded(input):
            options.chosen(levels.override.level)
            x, norm, options = norm(input), None, options._replace(residual=False)
        y, parts = None, [_letter(linear) for linear in linears]
        if parts.count("l") == len(parts) and not has_hooks(*linears):
            y = run_linears(options, x, tensors, [(m.weight, m.bias) for m in linears])
        elif not dispatch.is_recorded(input):
            options.chosen(levels.override.level)
        if y is None:
            n = x if norm is None else norm(x)
            drops = self.training and (self.dropout or self.output_dropout)
            is_spread = parts.count("l") == len(parts) and not drops
            y = self._spread(n, linears) if is_spread else None
            if y is None:
                y = F.dropout(self._eager(n), self.output_dropout, self.training)
            return input + y if self.residual else y
        return y if options.residual or not self.residual else input + y

    def _spread(self, x: Any, linears: tuple[Any, ...]) -> Any:
        """Return what tensor parallel linears make of x, None where they are called instead."""
        if dispatch.is_recorded(x) or torch.compiler.is_compiling():
            return None
        layout = layout_of(*linears) if has_hooks(*linears) else None
        if layout is None or not parallel.takes(x, layout):
            return None
        pairs = parallel.shards_of([(m.weight, m.bias) for m in linears], layout)
        tensors = [tensor for pair in pairs for tensor in pair]
        if not dispatch.are_plain(*tensors):
            return None
        level = levels.resolve(type(self).__name__, None, self.save, self.levels)
        return parallel.spread(lambda n: self._functional(n, level, *tensors), x, layout)

    def _functional(self, x: Tensor, save: str, *tensors: Any) -> Tensor:
        raise NotImplementedError

    def _act(self, z: Tensor) -> Tensor:
        return ACTIVATIONS[validate.activation(type(self).__name__, self.activation)].eager(z)

    def _dropped(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.dropout, self.training)

    def _linears(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _eager(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Describe what no child shows."""
        found = [f"{key}={getattr(self, key)}" for key in ("activation", "residual", "save")]
        extras = {"chunks": None, "dropout": 0.0, "output_dropout": 0.0}
        found += [f"{k}={getattr(self, k)}" for k, off in extras.items() if getattr(self, k) != off]
        return ", ".join(found)


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

    levels, names = MLP_LEVELS, PLAIN

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
        sizes, linear = (in_features, hidden_features, out_features), (bias, device, dtype)
        dropouts = dropout, output_dropout
        super().__init__(
            sizes,
            linear,
            activation,
            norm,
            residual=residual,
            save=save,
            chunks=chunks,
            dropouts=dropouts,
        )
        out_features = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias, device, dtype=dtype)

    def _linears(self) -> tuple[Any, ...]:
        return self.fc1, self.fc2

    def _functional(self, x: Tensor, save: str, *tensors: Any) -> Tensor:
        w1, b1, w2, b2 = tensors
        return mlp(
            x, w1, b1, w2, fc2_bias=b2, activation=self.activation, save=save, chunks=self.chunks
        )

    def _eager(self, x: Tensor) -> Tensor:
        return self.fc2(self._dropped(self._act(self.fc1(x))))


class GatedMLP(_Block):
    """SwiGLU, GEGLU or ReGLU block; only the input is saved for backward.

        y = down_proj(act(gate_proj(n)) * up_proj(n)), n = norm(x), plus x if residual

    Arguments as in MLP, without biases by default; save also takes "gate", see
    `functional.gated_mlp`. Children are `gate_proj`, `up_proj`, `down_proj` and, where given,
    `norm`.
    """

    levels, names = GATED_LEVELS, GATED

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
        sizes, linear = (in_features, hidden_features, out_features), (bias, device, dtype)
        dropouts = dropout, output_dropout
        super().__init__(
            sizes,
            linear,
            activation,
            norm,
            residual=residual,
            save=save,
            chunks=chunks,
            dropouts=dropouts,
        )
        out_features = in_features if out_features is None else out_features
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype=dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype=dtype)
        self.down_proj = nn.Linear(hidden_features, out_features, bias, device, dtype=dtype)

    def _linears(self) -> tuple[Any, ...]:
        return self.gate_proj, self.up_proj, self.down_proj

    def _functional(self, x: Tensor, save: str, *tensors: Any) -> Tensor:
        (gate, up, down), biases = tensors[::2], dict(zip(_BIASES, tensors[1::2], strict=True))
        return gated_mlp(
            x, gate, up, down, activation=self.activation, **biases, save=save, chunks=self.chunks
        )

    def _eager(self, x: Tensor) -> Tensor:
        return self.down_proj(self._dropped(self._act(self.gate_proj(x)) * self.up_proj(x)))


class NormLinear(nn.Module):
    """A norm and the linears that read it, such as q, k and v; only the norm's input is saved.

        n = norm(x); (linear(n) for linear in linears)

    Args:
        norm: a norm module over the linears' in_features; the child `norm`.
        linears: nn.Linear modules; the children `linears.0`, `linears.1`, ...

    Called with [..., in_features], returns a tuple of [..., out_features], one per linear.
    """

    def __init__(self, norm: nn.Module, *linears: nn.Module):
        constructors.norm_and_linears("NormLinear", norm, linears)
        super().__init__()
        self.norm = norm
        self.linears = nn.ModuleList(linears)

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Map [..., in_features] to one [..., out_features] per linear."""
        norm: Any = self.norm
        linears: list[Any] = list(self.linears)
        letters = "".join([_letter(layer) for layer in (norm, *linears)])
        if letters == "n" + "l" * len(linears) and not has_hooks(norm, *linears):
            (spec, kinds), tensors = split(spec_of(norm))
            options = NormLinearOptions(
                "NormLinear",
                spec,
                kinds,
                linears_of(len(linears)),
                over=norm.normalized_shape,
                is_module=True,
            )
            ys = run_projections(options, input, tensors, [(m.weight, m.bias) for m in linears])
            if ys is not None:
                return ys
        n = norm(input)
        return tuple([linear(n) for linear in linears])
