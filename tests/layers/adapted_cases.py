"""Calls with quantised weights, with dropout, and with both, beside the reference of the same seed.

A quantised weight is one of the inputs, which gets no gradient from either.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cases import Case
from torch import Tensor

from fusedckpt import LoRA, NormSpec, QuantisedWeight, functional, reference

RANK = 2


def record(w: Tensor) -> QuantisedWeight:
    """Describe a dense weight as one that dequantises, in pieces where asked."""
    w = w.detach()
    return QuantisedWeight(w.shape, w.dtype, w.device, lambda rows: w if rows is None else w[rows])


def _linear_act(module: Any, base: Any, p: float, x: Tensor, *rest: Any) -> Tensor:
    w, a, b = rest
    return module.linear_act(x, LoRA(base(w), a, b, 1.5, p))


def _norm_linear(module: Any, base: Any, p: float, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    n, w, a, b, v = rest
    norm = NormSpec("rms", n, None, 1e-6)
    return module.norm_linear(x, norm, [LoRA(base(w), a, b, 0.5, p), base(v)])


def _mlp(module: Any, base: Any, p: float, x: Tensor, *rest: Any) -> Tensor:
    n, w, a, b, c, v = rest
    fc1, drops = LoRA(base(w), a, b, 2.0, p), {"dropout": p, "output_dropout": p / 2}
    norm = NormSpec("rms", n, None, 1e-6)
    return module.mlp(x, fc1, c, base(v), None, norm=norm, residual=True, **drops)


def _gated_mlp(module: Any, base: Any, p: float, x: Tensor, *rest: Any) -> Tensor:
    g, a, b, u, v, c, d = rest
    gate, down = LoRA(base(g), a, b, 1.5, p), LoRA(base(v), c, d, 1.0, p)
    return module.gated_mlp(x, gate, base(u), down, dropout=p)


def _packed(module: Any, base: Any, p: float, x: Tensor, *rest: Any) -> Tensor:
    w, a, b, v, c = rest
    return module.gated_mlp(x, LoRA(base(w), a, b, 1.5, p), None, base(v), gate_bias=c)


_FIRST, _LAST = [("f", "d"), ("r", "d"), ("f", "r")], [("d", "f"), ("r", "f"), ("d", "r")]
_CALLS = {
    "linear_act": (_linear_act, _FIRST),
    "norm_linear": (_norm_linear, [("d",), *_FIRST, ("f", "d")]),
    "mlp": (_mlp, [("d",), *_FIRST, ("f",), ("d", "f")]),
    "gated_mlp": (_gated_mlp, [*_FIRST, ("f", "d"), *_LAST]),
    "packed": (_packed, [("2f", "d"), ("r", "d"), ("2f", "r"), ("d", "f"), ("2f",)]),
}


def _seeded(fn: Any, *args: Any) -> Any:
    torch.manual_seed(5)
    return fn(*args)


def _case(kind: str, name: str, base: Any, p: float) -> Case:
    fn, shapes = _CALLS[name]
    dense = Tensor.detach if base is record else base

    def sized(rows: tuple[int, ...], d: int, f: int) -> list[tuple[int, ...] | None]:
        sizes = {"d": d, "f": f, "2f": 2 * f, "r": RANK}
        return [(*rows, d), *(tuple(sizes[key] for key in shape) for shape in shapes)]

    fused, eager = partial(fn, functional, base, p), partial(fn, reference, dense, p)
    return Case(f"{kind}-{name}", partial(_seeded, fused), partial(_seeded, eager), sized)


def _same(w: Tensor) -> Tensor:
    return w


KINDS = {"quantised": (record, 0.0), "dropout": (_same, 0.3), "both": (record, 0.3)}
CASES = [_case(kind, name, *KINDS[kind]) for kind in KINDS for name in _CALLS]
