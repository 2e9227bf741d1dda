"""Every public function with its eager reference: the table of the contract tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support import DEVICE, Function, as_tuple
from torch import Tensor

from fusedckpt import ClampedSwiGLU, functional, reference
from fusedckpt.layers.norm import NormSpec


@dataclass(frozen=True)
class Case:
    """`fused(*inputs)` must equal `eager(*inputs)`; `shapes` gives the inputs' for (rows, D, F)."""

    name: str
    fused: Function
    eager: Function
    shapes: Callable[[tuple[int, ...], int, int], list[tuple[int, ...] | None]]

    def inputs(
        self,
        rows: tuple[int, ...] = (50,),
        d: int = 98,
        f: int = 102,
        dtype: torch.dtype = torch.float32,
        mask: tuple[bool, ...] | None = None,
    ) -> list[Tensor | None]:
        """Draw inputs of order one, matrices scaled so that products stay so.

        By default of 1.5 interpreted tiles per axis, and wide enough for three draws to be 256
        numbers of a vector.
        """
        shapes = self.shapes(rows, d, f)
        tensors = []
        for index, shape in enumerate(shapes):
            if shape is None:
                tensors.append(None)
                continue
            x = torch.randn(shape, dtype=torch.float64)
            if index and len(shape) > 1 and shape != shapes[0]:
                x /= max(1, shape[-1]) ** 0.5
            tensors.append(x.to(DEVICE, dtype).requires_grad_(mask is None or mask[index]))
        return tensors

    @property
    def num_inputs(self) -> int:
        """How many inputs are tensors."""
        return sum(shape is not None for shape in self.shapes((2,), 3, 4))


def _linear(name: str, bias: bool = True, activation: str = "gelu", **options: Any) -> Case:
    return Case(
        f"linear_act-{name}",
        partial(functional.linear_act, activation=activation, **options),
        partial(reference.linear_act, activation=activation),
        lambda rows, d, f: [(*rows, d), (f, d), (f,) if bias else None],
    )


def _norm(name: str, function: str, tensors: str, num_dims: int = 1, **options: Any) -> Case:
    """`tensors` names what follows x: r(esidual) or gate, w(eight), b(ias)."""

    def call(module: Any, x: Tensor, *rest: Tensor) -> Any:
        by_key = dict(zip(tensors, rest, strict=True))
        before = (x, by_key["r"]) if "r" in by_key else (x,)
        after = (by_key[key] for key in "wb" if key in by_key)
        return getattr(module, function)(*before, x.shape[-num_dims:], *after, **options)

    shape = {"r": lambda rows, d: (*rows, d), "w": lambda rows, d: (*rows, d)[-num_dims:]}
    shape["b"] = shape["w"]
    return Case(
        f"{function}-{name}",
        partial(call, functional),
        partial(call, reference),
        lambda rows, d, f: [(*rows, d), *(shape[key](rows, d) for key in tensors)],
    )


LINEARS = [
    _linear("gelu"),
    _linear("gelu-split", kernel="split"),
    _linear("gelu-preact", save="preact"),
    _linear("silu-no-bias", bias=False, activation="silu"),
    _linear("silu-preact-no-bias", bias=False, activation="silu", save="preact"),
    _linear("identity", activation="identity"),
]
NORMS = [
    _norm("torch", "rms_norm", "w"),
    _norm("no-weight", "rms_norm", "", eps=1e-6),
    _norm("llama", "rms_norm", "w", cast="llama", eps=1e-5),
    _norm("gemma", "rms_norm", "w", cast="gemma", offset=1.0, eps=1e-6),
    _norm("affine", "layer_norm", "wb"),
    _norm("no-bias", "layer_norm", "w", eps=1e-6),
    _norm("plain", "layer_norm", ""),
    _norm("torch", "add_rms_norm", "rw"),
    _norm("affine", "add_layer_norm", "rwb"),
    _norm("after", "gated_rms_norm", "rw", activation="gelu"),
    _norm("first", "gated_rms_norm", "rw", gates_first=True, cast="llama", eps=1e-5),
]


def _spec(norm: str | None, weights: list[Tensor]) -> NormSpec | None:
    """Take a norm's tensors off the front of `weights`."""
    if norm is None:
        return None
    if norm == "layer":
        return NormSpec("layer", weights.pop(0), weights.pop(0))
    return NormSpec("rms", weights.pop(0), None, 1e-6)


def _mlp(name: str, norm: str | None = None, bias: bool = True, **options: Any) -> Case:
    fixed = {"activation": "gelu", "residual": norm is not None}

    def call(module: Any, x: Tensor, *rest: Any, **given: Any) -> Tensor:
        weights = list(rest)
        spec = _spec(norm, weights)
        return module.mlp(x, *weights, norm=spec, **fixed, **given)

    return Case(
        f"mlp-{name}",
        partial(call, functional, **options),
        partial(call, reference),
        lambda rows, d, f: [
            (*rows, d),
            *[(d,)] * {None: 0, "rms": 1, "layer": 2}[norm],
            *((f, d), (f,) if bias else None, (d, f), (d,) if bias else None),
        ],
    )


def _gated_mlp(name: str, norm: str | None = None, bias: bool = False, **options: Any) -> Case:
    packed = options.pop("packed", False)
    fixed = {"activation": options.pop("activation", "silu"), "residual": norm is not None}
    biases = ("gate_bias", "down_bias") if packed else ("gate_bias", "up_bias", "down_bias")

    def call(module: Any, x: Tensor, *rest: Any, **given: Any) -> Tensor:
        weights = list(rest)
        spec = _spec(norm, weights)
        gate, up, down = (weights.pop(0), None if packed else weights.pop(0), weights.pop(0))
        named = dict(zip(biases, weights, strict=True)) if bias else {}
        return module.gated_mlp(x, gate, up, down, norm=spec, **named, **fixed, **given)

    return Case(
        f"gated_mlp-{name}",
        partial(call, functional, **options),
        partial(call, reference),
        lambda rows, d, f: [
            (*rows, d),
            *[(d,)] * {None: 0, "rms": 1, "layer": 2}[norm],
            *([(2 * f, d)] if packed else [(f, d), (f, d)]),
            (d, f),
            *([(2 * f,), (d,)] if packed else [(f,), (f,), (d,)] if bias else [])[: 3 * bias],
        ],
    )


def _norm_linear(name: str, norm: str, bias: bool) -> Case:
    """Two projections of different widths."""

    def call(module: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        weights = list(rest)
        spec = _spec(norm, weights)
        return module.norm_linear(x, spec, weights[:2], weights[2:] or None)

    return Case(
        f"norm_linear-{name}",
        partial(call, functional),
        partial(call, reference),
        lambda rows, d, f: [
            (*rows, d),
            *[(d,)] * {"rms": 1, "layer": 2}[norm],
            *((f, d), (f // 2 + 1, d)),
            *([(f,), (f // 2 + 1,)] if bias else []),
        ],
    )


def index_of(rows: tuple[int, ...], num_experts: int, top_k: int) -> Tensor:
    """Return a fixed routing: of some tokens to no expert, and none to the second expert."""
    numbers = torch.arange(math.prod(rows) * top_k, device=DEVICE) * 5 % (num_experts + 2)
    return torch.where(numbers == 1, 0, numbers).view(*rows, top_k)


def _experts(name: str, num_experts: int, top_k: int, bias: bool, **options: Any) -> Case:
    turns = options.get("is_transposed", False)

    def call(module: Any, x: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, *biases: Any):
        index = index_of(x.shape[:-1], num_experts, top_k)
        bias_options = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
        return module.experts(x, index, scores, gate_up, down, **bias_options, **options)

    def shapes(rows: tuple[int, ...], d: int, f: int) -> list[tuple[int, ...] | None]:
        sizes = [(2 * f, d), (d, f)]
        weights = [(num_experts, *(s[::-1] if turns else s)) for s in sizes]
        biases = [(num_experts, 2 * f), (num_experts, d)] if bias else []
        return [(*rows, d), (*rows, top_k), *weights, *biases]

    return Case(f"experts-{name}", partial(call, functional), partial(call, reference), shapes)


BLOCKS = [
    _norm_linear("rms", "rms", bias=False),
    _norm_linear("layer-bias", "layer", bias=True),
    _mlp("plain"),
    _mlp("layer", "layer"),
    _mlp("preact", save="preact"),
    _mlp("rms-no-bias-split", "rms", bias=False, kernel="split"),
    _mlp("rms-chunks", "rms", bias=False, chunks=3),
    _gated_mlp("plain"),
    _gated_mlp("rms-bias", "rms", bias=True),
    _gated_mlp("gate-rms", "rms", save="gate", kernel="split"),
    _gated_mlp("preact-layer-chunks", "layer", save="preact", chunks=2, activation="gelu"),
    _gated_mlp("packed-bias", bias=True, packed=True),
    _gated_mlp("packed-preact-chunks", "rms", packed=True, save="preact", chunks=2),
]


def _head(function: str, bias: bool, num_ids: int = 0, **options: Any) -> Case:
    """Losses of tokens, of which every third is ignored."""

    def call(module: Any, x: Tensor, weight: Tensor, *bias: Tensor) -> Any:
        # eighths are exact in every dtype
        numbers = (x.detach()[..., 0] * 8).long()
        target = torch.where(numbers % 3 == 2, -100, numbers % weight.shape[0])
        tensors = {}
        if num_ids:
            # some are ignored, some equal, some the target
            ids = numbers[..., None] * torch.arange(num_ids, device=x.device) % weight.shape[0]
            tensors["ids"] = torch.where(ids % 5 == 1, -100, ids)
        return getattr(module, function)(x, weight, target, *bias, **tensors, **options)

    return Case(
        f"{function}-{options.get('save', 'ids' if num_ids else 'bias' if bias else 'plain')}",
        partial(call, functional),
        partial(call, reference),
        lambda rows, d, f: [(*rows, d), (f, d), *([(f,)] if bias else [])],
    )


LOSS = {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.1}
HEADS = [
    _head("linear_cross_entropy", bias=True, chunks=2, **LOSS),
    _head("linear_cross_entropy", bias=False, save="preact", **LOSS),
    _head("token_logprobs", bias=False, scale=0.5, softcap=3.0, temperature=0.7, entropy=True),
    _head("token_logprobs", bias=True, num_ids=5, softcap=3.0, entropy=True, chunks=2),
]
EXPERTS = [
    _experts("chunked", 3, 2, bias=False, chunks=2),
    _experts(
        "bias-preact",
        *(4, 3, True),
        activation=ClampedSwiGLU(limit=1.0),
        is_transposed=True,
        save="preact",
    ),
]
CASES = [*LINEARS, *NORMS, *BLOCKS, *HEADS, *EXPERTS]


def loss_of(case, inputs):
    """Return a loss of a case, whose first input is an activation."""
    outputs = as_tuple(case.fused(inputs[0] * 1, *inputs[1:]))
    return sum(y.sin().sum() for y in outputs)
