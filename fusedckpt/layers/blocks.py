"""MLP, gated MLP and norm-then-linears as modules, with the parameter names that models use.

A block computes all its children as one. A child that was replaced by another kind of module,
parametrized, hooked, given another forward, or weights of a class with ops of its own is called
instead, and what is left is fused. All are called for an input of such a class, and where a program
is recorded, as by torch.export.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, levels
from fusedckpt.autograd.norm_spec import NormSpec
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.layers import constructors, validate
from fusedckpt.layers.mlp import GATED_LEVELS, MLP_LEVELS, gated_mlp, mlp
from fusedckpt.layers.norm_linear import norm_linear
from fusedckpt.layers.sequential import letter_of, spec_of

__all__ = ["MLP", "GatedMLP", "NormLinear"]


class _Block(nn.Module):
    """What MLP and GatedMLP share: an optional norm before, an optional residual around."""

    levels: tuple[str, ...]

    def __init__(
        self,
        sizes: tuple[int, int, int | None],
        linear: tuple[bool, Any, torch.dtype | None],
        activation: str,
        norm: nn.Module | None,
        residual: bool,
        save: str,
        chunks: int | None,
    ):
        name = type(self).__name__
        constructors.block(name, sizes, linear, norm, residual)
        activation = validate.activation(name, activation)
        levels.check(name, save, self.levels)
        validate.block(name, residual, chunks)
        super().__init__()
        self.norm = norm
        self.activation, self.residual, self.save, self.chunks = activation, residual, save, chunks

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if dispatch.is_recorded(input):
            y = self._eager(input if self.norm is None else self.norm(input))
            return input + y if self.residual else y
        name = type(self).__name__
        level = levels.resolve(name, None, self.save, self.levels)
        # attributes, which may have been set since
        validate.activation(name, self.activation)
        validate.block(name, self.residual, self.chunks)
        x, norm, residual, plain = input, None, self.residual, dispatch.are_plain(input)
        if plain and letter_of(self.norm) == "n":
            norm = spec_of(name, self.norm, x)
        elif self.norm is not None:
            x, residual = self.norm(input), False
        if not plain or not all(letter_of(child) == "l" for child in self._linears()):
            y = self._eager(x if norm is None or self.norm is None else self.norm(x))
            return input + y if self.residual else y
        y = self._fused(x, norm, residual, level)
        return input + y if self.residual and not residual else y

    def _act(self, z: Tensor) -> Tensor:
        return ACTIVATIONS[validate.activation(type(self).__name__, self.activation)].eager(z)

    def _linears(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _eager(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _fused(self, x: Tensor, norm: NormSpec | None, residual: bool, level: str) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Describe what no child shows."""
        return f"activation={self.activation}, residual={self.residual}, save={self.save}"


class MLP(_Block):
    """Two linears with an activation between them, keeping only the input for backward.

        y = fc2(act(fc1(norm(x)))), plus x if residual

    Args:
        in_features, hidden_features, out_features: D, F and D_out; out_features None means D.
        activation: see `functional.linear_act`.
        bias, device, dtype: of both linears, as nn.Linear has them.
        norm: a norm module over D, which becomes the child `norm`, or None.
        residual, save, chunks: see `functional.mlp`.

    Children are `fc1`, `fc2` and, where given, `norm`.
    """

    levels = MLP_LEVELS

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
    ):
        sizes, linear = (in_features, hidden_features, out_features), (bias, device, dtype)
        super().__init__(sizes, linear, activation, norm, residual, save, chunks)
        out_features = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias, device, dtype)

    def _linears(self) -> tuple[Any, ...]:
        return self.fc1, self.fc2

    def _eager(self, x: Tensor) -> Tensor:
        return self.fc2(self._act(self.fc1(x)))

    def _fused(self, x: Tensor, norm: NormSpec | None, residual: bool, level: str) -> Tensor:
        fc1, fc2 = self._linears()
        weights = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        return mlp(
            x,
            *weights,
            self.activation,
            norm=norm,
            residual=residual,
            save=level,
            chunks=self.chunks,
        )


class GatedMLP(_Block):
    """SwiGLU, GEGLU or ReGLU block, keeping only the input for backward.

        y = down_proj(act(gate_proj(n)) * up_proj(n)), n = norm(x), plus x if residual

    Arguments as in MLP, without biases by default; save also takes "gate", see
    `functional.gated_mlp`. Children are `gate_proj`, `up_proj`, `down_proj` and, where given,
    `norm`.
    """

    levels = GATED_LEVELS

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
    ):
        sizes, linear = (in_features, hidden_features, out_features), (bias, device, dtype)
        super().__init__(sizes, linear, activation, norm, residual, save, chunks)
        out_features = in_features if out_features is None else out_features
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = nn.Linear(hidden_features, out_features, bias, device, dtype)

    def _linears(self) -> tuple[Any, ...]:
        return self.gate_proj, self.up_proj, self.down_proj

    def _eager(self, x: Tensor) -> Tensor:
        return self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))

    def _fused(self, x: Tensor, norm: NormSpec | None, residual: bool, level: str) -> Tensor:
        gate, up, down = self._linears()
        return gated_mlp(
            x,
            gate.weight,
            up.weight,
            down.weight,
            self.activation,
            gate_bias=gate.bias,
            up_bias=up.bias,
            down_bias=down.bias,
            norm=norm,
            residual=residual,
            save=level,
            chunks=self.chunks,
        )


class NormLinear(nn.Module):
    """A norm feeding any number of linears, such as q, k and v, keeping only the norm's input.

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
        linears: list[Any] = list(self.linears)
        fuses = letter_of(self.norm) == "n" and all(letter_of(linear) == "l" for linear in linears)
        if not fuses or dispatch.is_recorded(input) or not dispatch.are_plain(input):
            n = self.norm(input)
            return tuple(linear(n) for linear in linears)
        weights, biases = [m.weight for m in linears], [m.bias for m in linears]
        return norm_linear(input, spec_of("NormLinear", self.norm, input), weights, biases)
