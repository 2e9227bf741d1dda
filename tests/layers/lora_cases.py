"""Calls with adapters, each beside eager code of its own, as peft computes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from cases import Case
from torch import Tensor

from fusedckpt import LoRA, NormSpec, functional

RANK, SCALE = 4, 1.5


def peft_linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """What peft's lora.Linear computes, adapters innermost first."""
    adapters = []
    while isinstance(weight, LoRA):
        adapters.insert(0, weight)
        weight = weight.weight
    result = F.linear(x, weight, bias)
    dtype = result.dtype
    for lora in adapters:
        result = result + F.linear(F.linear(x.to(lora.A.dtype), lora.A), lora.B) * lora.scale
    return result.to(dtype)


def norm_of(x: Tensor, norm: NormSpec) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


class Eager:
    """The functions in torch's own code."""

    @staticmethod
    def linear_act(x: Tensor, weight: Any, bias: Any, activation: str) -> Tensor:
        z = peft_linear(x, weight, bias)
        return z if activation == "identity" else F.gelu(z)

    @staticmethod
    def norm_linear(x: Tensor, norm: NormSpec, weights: Any, biases: Any) -> tuple[Tensor, ...]:
        n = norm_of(x, norm)
        return tuple(peft_linear(n, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def mlp(x: Tensor, w1: Any, b1: Any, w2: Any, b2: Any, norm: Any = None) -> Tensor:
        n = x if norm is None else norm_of(x, norm)
        y = peft_linear(F.gelu(peft_linear(n, w1, b1)), w2, b2)
        return y if norm is None else x + y

    @staticmethod
    def gated_mlp(x: Tensor, gate: Any, up: Any, down: Any, norm: Any = None) -> Tensor:
        n = x if norm is None else norm_of(x, norm)
        if up is None:
            z, u = peft_linear(n, gate).chunk(2, -1)
        else:
            z, u = peft_linear(n, gate), peft_linear(n, up)
        y = peft_linear(F.silu(z) * u, down)
        return y if norm is None else x + y


class Ours:
    """The same calls of ours."""

    def __init__(self, **options: Any):
        self.options = options

    def linear_act(self, *args: Any) -> Tensor:
        return functional.linear_act(*args, **self.options)

    def norm_linear(self, *args: Any) -> tuple[Tensor, ...]:
        return functional.norm_linear(*args, **self.options)

    def mlp(self, *args: Any, norm: Any = None) -> Tensor:
        return functional.mlp(*args, norm=norm, residual=norm is not None, **self.options)

    def gated_mlp(self, *args: Any, norm: Any = None) -> Tensor:
        return functional.gated_mlp(*args, norm=norm, residual=norm is not None, **self.options)


def lora(rest: list[Tensor], adapters: int = 1) -> Any:
    """Take a weight and its adapters off the front."""
    weight: Any = rest.pop(0)
    for i in range(adapters):
        weight = LoRA(weight, rest.pop(0), rest.pop(0), SCALE - i)
    return weight


def _linear_act(activation: str, module: Any, x: Tensor, *rest: Any) -> Tensor:
    weights = list(rest)
    return module.linear_act(x, lora(weights), weights[0], activation)


def _norm_linear(module: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights = list(rest)
    norm = NormSpec("rms", weights.pop(0), None, 1e-6)
    # the second has no adapter
    q, k, v = lora(weights), weights.pop(0), lora(weights)
    return module.norm_linear(x, norm, [q, k, v], [weights[0], None, None])


def _mlp(norm: bool, adapters: tuple[int, int], module: Any, x: Tensor, *rest: Any) -> Tensor:
    weights = list(rest)
    spec = NormSpec("rms", weights.pop(0), None, 1e-6) if norm else None
    fc1, b1 = lora(weights, adapters[0]), weights.pop(0)
    fc2, b2 = lora(weights, adapters[1]), weights.pop(0)
    return module.mlp(x, fc1, b1, fc2, b2, norm=spec)


def _gated(norm: bool, adapters: Any, module: Any, x: Tensor, *rest: Any) -> Tensor:
    weights = list(rest)
    spec = NormSpec("rms", weights.pop(0), None, 1e-6) if norm else None
    gate, up, down = (None if n is None else lora(weights, n) for n in adapters)
    return module.gated_mlp(x, gate, up, down, norm=spec)


def _weight(n: str, k: str, adapters: int | None) -> list[tuple[str, ...]]:
    return [] if adapters is None else [(n, k), *[("r", k), (n, "r")] * adapters]


def _case(name: str, call: Any, shapes: list[tuple[str, ...]], **options: Any) -> Case:
    def sized(rows: tuple[int, ...], d: int, f: int) -> list[tuple[int, ...] | None]:
        sizes = {"d": d, "f": f, "2f": 2 * f, "r": RANK}
        return [(*rows, d), *(tuple(sizes[key] for key in shape) for shape in shapes)]

    return Case(name, partial(call, Ours(**options)), partial(call, Eager), sized)


def _mlp_case(name: str, norm: bool = False, adapters: Any = (1, 1), **options: Any) -> Case:
    first, last = _weight("f", "d", adapters[0]), _weight("d", "f", adapters[1])
    shapes = [*[("d",)] * norm, *first, ("f",), *last, ("d",)]
    return _case(f"mlp-{name}", partial(_mlp, norm, adapters), shapes, **options)


def _gated_case(name: str, norm: bool = False, adapters: Any = (1, 1, 1), **options: Any) -> Case:
    rows = "f" if adapters[1] is not None else "2f"
    first = _weight(rows, "d", adapters[0]) + _weight("f", "d", adapters[1])
    shapes = [*[("d",)] * norm, *first, *_weight("d", "f", adapters[2])]
    return _case(f"gated_mlp-{name}", partial(_gated, norm, adapters), shapes, **options)


LINEAR = [*_weight("f", "d", 1), ("f",)]
NORM_LINEAR = [("d",), *_weight("f", "d", 1), ("f", "d"), *_weight("d", "d", 1), ("f",)]
CASES = [
    _case("linear_act-identity", partial(_linear_act, "identity"), LINEAR),
    _case("linear_act-gelu", partial(_linear_act, "gelu"), LINEAR),
    _case("linear_act-preact", partial(_linear_act, "gelu"), LINEAR, save="preact"),
    _case("norm_linear", _norm_linear, NORM_LINEAR),
    _mlp_case("plain"),
    _mlp_case("rms-two-adapters", True, (2, 1)),
    _mlp_case("preact", save="preact"),
    _mlp_case("one-adapted-chunks", adapters=(0, 1), chunks=3),
    _gated_case("plain"),
    _gated_case("rms-chunks", True, chunks=2),
    _gated_case("gate", save="gate"),
    _gated_case("preact-rms", True, save="preact"),
    _gated_case("packed", adapters=(1, None, 0)),
]
