"""Calls with adapters, quantized weights and dropout: more rows of the table in `cases.py`.

Adapters alone are compared with code of its own, as peft computes them; dropout and quantized
weights with the reference, which draws the same seeds. A quantized weight is one of the inputs,
which gets no gradient from either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cases
import torch
import torch.nn.functional as F
from cases import Case, index_of
from support import randn
from torch import Tensor, nn

from fusedckpt import LoRA, NormSpec, QuantizedWeight, functional, reference

RANK = 3


def adapted(n: int, k: int, dtype: torch.dtype = torch.float32, **options: Any) -> LoRA:
    """Draw a frozen weight [n, k] with an adapter to train."""
    w, a, b = (
        nn.Parameter(randn(*s, dtype=dtype).detach() / 4) for s in ((n, k), (RANK, k), (n, RANK))
    )
    return LoRA(w.requires_grad_(False), a, b, **options)


def record(w: Tensor) -> QuantizedWeight:
    """Describe a dense weight as one that dequantizes, in pieces where asked."""
    w = w.detach()
    return QuantizedWeight(w.shape, w.dtype, w.device, lambda rows: w if rows is None else w[rows])


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


class Eager:
    """The functions in torch's own code; a norm is an RMSNorm, and brings a residual."""

    @staticmethod
    def linear_act(x: Tensor, weight: Any, bias: Any = None, activation: str = "gelu") -> Tensor:
        z = peft_linear(x, weight, bias)
        return z if activation == "identity" else F.gelu(z)

    @staticmethod
    def norm_linear(x: Tensor, norm: NormSpec, weights: Any, biases: Any) -> tuple[Tensor, ...]:
        n = F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
        return tuple(peft_linear(n, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def mlp(x: Tensor, w1: Any, b1: Any, w2: Any, b2: Any, norm: Any = None, **_: Any) -> Tensor:
        n = x if norm is None else F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
        y = peft_linear(F.gelu(peft_linear(n, w1, b1)), w2, b2)
        return y if norm is None else x + y

    @staticmethod
    def gated_mlp(
        x: Tensor, gate: Any, up: Any, down: Any, norm: Any = None, gate_bias: Any = None, **_: Any
    ) -> Tensor:
        n = x if norm is None else F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
        z = peft_linear(n, gate, gate_bias)
        z, u = z.chunk(2, -1) if up is None else (z, peft_linear(n, up))
        y = peft_linear(F.silu(z) * u, down)
        return y if norm is None else x + y


# of each linear: features after and before
LINEARS = {
    "linear_act": ["fd"],
    "norm_linear": ["fd", "fd", "dd"],
    "mlp": ["fd", "df"],
    "gated_mlp": ["fd", "fd", "df"],
    "packed": ["gd", "df"],
}
# how a weight is given, and the probability of each dropout
KINDS = {
    "lora": (lambda w: w, 0.0),
    "quantized": (record, 0.0),
    "dropout": (lambda w: w, 0.3),
    "both": (record, 0.3),
}


def _call(
    block: str, adapters: Sequence[int], norm: bool, options: Any, base: Any, p: float, module: Any
) -> Any:
    """Return a function of x, a norm's weight, then each linear's weight, adapters and bias."""

    def call(x: Tensor, *rest: Any) -> Any:
        given = iter(rest)
        spec = NormSpec("rms", next(given), None, 1e-6) if norm else None
        linears = []
        for count in adapters:
            weight = base(next(given))
            for i in range(count):
                weight = LoRA(weight, next(given), next(given), 1.5 - i, p)
            linears.append((weight, next(given)))
        if p:
            torch.manual_seed(5)
        if block == "linear_act":
            return module.linear_act(x, *linears[0], **options)
        if block == "norm_linear":
            return module.norm_linear(x, spec, *zip(*linears, strict=True))
        drops = {"dropout": p, "output_dropout": p / 2} if p else {}
        shared = {"norm": spec, "residual": norm} | drops | options
        if block == "mlp":
            return module.mlp(x, *linears[0], *linears[1], **shared)
        (gate, bias), (down, _) = linears[0], linears[-1]
        up = None if block == "packed" else linears[1][0]
        return module.gated_mlp(x, gate, up, down, gate_bias=bias, **shared)

    return call


@dataclass(frozen=True)
class Adapted(Case):
    """A case of which some inputs are quantized, which have no gradients."""

    frozen: tuple[int, ...] = ()

    def inputs(self, *args: Any, **options: Any) -> list[Tensor | None]:
        found = super().inputs(*args, **options)
        for index in self.frozen:
            found[index].requires_grad_(False)
        return found


def _case(
    name: str,
    block: str,
    adapters: Sequence[int],
    biases: str,
    norm: bool = False,
    kind: str = "lora",
    **options: Any,
) -> Case:
    """`biases`: 1 where a linear has one; `options` of ours alone, but for the activation."""
    base, p = KINDS[kind]

    def sized(rows: tuple[int, ...], d: int, f: int) -> list[tuple[int, ...] | None]:
        sizes = {"d": d, "f": f, "g": 2 * f}
        found: list[tuple[int, ...] | None] = [(*rows, d), *[(d,)] * norm]
        for (n, k), count, has_bias in zip(LINEARS[block], adapters, biases, strict=True):
            n, k = sizes[n], sizes[k]
            found += [(n, k), *[(RANK, k), (n, RANK)] * count, (n,) if has_bias == "1" else None]
        return found

    eager = {key: value for key, value in options.items() if key == "activation"}
    twin = Eager if kind == "lora" else reference
    plain = Tensor.detach if base is record else base
    places = [1 + norm + sum(2 + 2 * a for a in adapters[:i]) for i in range(len(adapters))]
    return Adapted(
        f"{kind}-{block}{name}",
        _call(block, adapters, norm, options, base, p, functional),
        _call(block, adapters, norm, eager, plain, p, twin),
        sized,
        tuple(places) if base is record else (),
    )


def _experts(name: str, adapters: Sequence[int], kind: str = "lora", **options: Any) -> Case:
    """Four experts, two a token; the twin's weights are sums of all that ours adds to products."""
    turns, num, base = options.get("is_transposed", False), 4, KINDS[kind][0]
    plain = Tensor.detach if base is record else base

    def call(is_sum: bool, x: Tensor, scores: Tensor, *rest: Tensor) -> Tensor:
        given, weights = iter(rest), []
        for count in adapters:
            weight = (plain if is_sum else base)(next(given))
            for scale in (1.5, 0.5)[:count]:
                a, b = next(given), next(given)
                if not is_sum:
                    weight = LoRA(weight, a, b, scale)
                    continue
                weight = weight + scale * (a @ b if turns else b @ a).to(weight.dtype)
            weights.append(weight)
        index, module = index_of(x.shape[:-1], num, 2), reference if is_sum else functional
        return module.experts(x, index, scores, *weights, **options)

    def shapes(rows: tuple[int, ...], d: int, f: int) -> list[tuple[int, ...] | None]:
        found: list[tuple[int, ...] | None] = [(*rows, d), (*rows, 2)]
        for (n, k), count in zip([(2 * f, d), (d, f)], adapters, strict=True):
            sizes = [(n, k), *[(RANK, k), (n, RANK)] * count]
            found += [(num, *(size[::-1] if turns else size)) for size in sizes]
        return found

    frozen = (2, 3 + 2 * adapters[0]) if base is record else ()
    return Adapted(
        f"{kind}-experts{name}", partial(call, False), partial(call, True), shapes, frozen
    )


LORA = [
    _case("-identity", "linear_act", [1], "1", activation="identity"),
    _case("-preact", "linear_act", [1], "1", save="preact"),
    _case("", "norm_linear", [1, 0, 1], "100", True),
    _case("-rms-two-adapters", "mlp", [2, 1], "11", True),
    _case("-preact", "mlp", [1, 1], "11", save="preact"),
    _case("-one-adapted-chunks", "mlp", [0, 1], "11", chunks=3),
    _case("-rms-chunks", "gated_mlp", [1, 1, 1], "000", True, chunks=2),
    _case("-gate", "gated_mlp", [1, 1, 1], "000", save="gate"),
    _case("-preact-rms", "gated_mlp", [1, 1, 1], "000", True, save="preact"),
    _case("", "packed", [1, 0], "00"),
    _experts("-preact-two-adapters", [2, 1], save="preact"),
    _experts("-transposed", [1, 1], is_transposed=True),
]
OTHERS = [
    case
    for kind in ("quantized", "dropout", "both")
    for case in (
        _case("", "linear_act", [1], "0", kind=kind),
        _case("", "norm_linear", [1, 0, 0], "000", True, kind=kind),
        _case("", "mlp", [1, 0], "10", True, kind=kind),
        _case("-gate-chunks", "gated_mlp", [1, 0, 1], "000", kind=kind, save="gate", chunks=2),
        _case("-preact", "packed", [1, 0], "10", kind=kind, save="preact"),
    )
]
OTHERS.append(_experts("", [1, 0], "quantized"))
ADAPTED = [*LORA, *OTHERS]
ALL = [*cases.CASES, *ADAPTED]
