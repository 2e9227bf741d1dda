"""Experts as transformers writes them, run by `functional.experts`.

They are told by their parameters: `gate_up_proj` and `down_proj` of three dimensions. The gating is
looked up by its values, and a small replica is compared with the original's forward. The router is
not touched, nor which experts implementation the config names.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, levels
from fusedckpt.blocks.eager import gated
from fusedckpt.blocks.experts import LEVELS
from fusedckpt.blocks.operands import LoRA
from fusedckpt.blocks.quantised import quantised
from fusedckpt.fusing.fused_mlps import Swap, Swapped, of_chunks
from fusedckpt.fusing.held import Held, Part, broken, is_function, is_simple
from fusedckpt.fusing.replica import undisturbed
from fusedckpt.fusing.subclass import subclass
from fusedckpt.fusing.verification import difference, saved_per_token
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.gating import ClampedSwiGLU, Gating
from fusedckpt.layers import fallbacks
from fusedckpt.layers.experts import experts
from fusedckpt.layers.fallbacks import NotFused

_WEIGHTS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
# told by name: peft is not imported
_FACTORS = "peft.tuners.lora.layer._LoraFactorsProxy"


class ExpertsMatch(NamedTuple):
    """The experts that a module computes; held: state that must not change.

    is_own: whether the class's own forward computes the same, not transformers' functions alone.
    """

    gating: Gating
    is_transposed: bool
    held: tuple[Held, ...]
    is_own: bool = True


class FusedExperts(Swapped):
    """Forward of experts of any class; saves the tensors that its level names."""

    save_levels = LEVELS

    _fusedckpt_match: ExpertsMatch
    _fusedckpt_count = 3
    save: str
    chunks: int | None

    def _fused(self, x: Tensor, index: Tensor, scores: Tensor) -> Tensor | NotFused:
        return fused(self, self._fusedckpt_match, self.save, self.chunks, x, index, scores)

    def _now(self) -> str:
        return f"fused as experts, save={self.save}"


class FusedDenseExperts(FusedExperts):
    """Forward of experts that each get as many rows, one expert's after the other's (Llama 4)."""

    _fusedckpt_count = 1

    def _fused(self, x: Tensor) -> Tensor | NotFused:  # type: ignore[override]  # of one tensor
        weight = getattr(self, _WEIGHTS[0], None)
        width, num_experts = x.shape[-1], 0 if weight is None else weight.shape[0]
        rows = x.reshape(-1, width)
        if not num_experts or len(rows) % num_experts:
            return NotFused("arguments")
        experts_of_rows = torch.arange(num_experts, device=x.device)
        index = experts_of_rows.repeat_interleave(len(rows) // num_experts)[:, None]
        scores = rows.new_ones(len(rows), 1)
        return fused(self, self._fusedckpt_match, self.save, self.chunks, rows, index, scores)


def fused(
    module: nn.Module,
    match: ExpertsMatch,
    save: str,
    chunks: int | None,
    x: Any,
    index: Any,
    scores: Any,
) -> Tensor | NotFused:
    """Return the result of a module's experts, or why this call cannot run fused."""
    if (changed := broken(module, match.held)) is not None:
        return changed
    weights = {n: _operand(module, n, match.is_transposed) for n in (*_WEIGHTS, *_BIASES)}
    if not all(isinstance(t, Tensor) for t in (x, index, scores)):
        return NotFused("arguments")
    if dispatch.is_recorded(x) or index.shape != scores.shape or index.is_floating_point():
        return NotFused("arguments")
    plain, base = {name: _plain(weight) for name, weight in weights.items()}, weights[_WEIGHTS[0]]
    if not dispatch.are_plain(x, index, scores, *plain.values()):
        return fallbacks.unplain(x, **plain)
    dtype = (base.weight if isinstance(base, LoRA) else base).dtype
    # other implementations than eager multiply in the weights' dtype, and ignore autocast
    ignores = not _is_eager(module)
    is_on = dispatch.autocast_dtype(x.device) is not None
    if not (ignores or match.is_own) or (x.dtype != dtype and not (ignores or is_on)):
        return NotFused("dtype", x.dtype)
    off = torch.autocast(x.device.type, enabled=False) if ignores and is_on else nullcontext()
    with off:
        y = experts(
            *(x.to(dtype) if ignores else x, index, scores),
            *map(weights.__getitem__, _WEIGHTS),
            activation=match.gating,
            gate_up_bias=weights[_BIASES[0]],
            down_bias=weights[_BIASES[1]],
            is_transposed=match.is_transposed,
            save=levels.resolve("experts", None, save, LEVELS),
            chunks=chunks,
        )
    return y.to(x.dtype)


def _is_eager(module: nn.Module) -> bool:
    """Whether a module runs its class's own forward, not a function of transformers'."""
    name = getattr(vars(module).get("config"), "_experts_implementation", None)
    return name in (None, "eager")


def _operand(module: nn.Module, name: str, is_transposed: bool) -> Any:
    """Return a weight or bias; under the factors of peft's adapter, while that is active, a record.

    It is a property then, which would make the sum dense.
    """
    parametrizations = getattr(getattr(module, "parametrizations", None), name, None)
    kinds = [
        f"{type(parametrization).__module__}.{type(parametrization).__qualname__}"
        for parametrization in parametrizations or ()
    ]
    # of several adapters peft makes a dense sum
    if parametrizations is None or kinds != [_FACTORS]:
        return getattr(module, name, None)
    a, b = parametrizations[0].rhs, parametrizations[0].lhs
    a, b = (b, a) if is_transposed else (a, b)
    return LoRA(parametrizations.original, a, b, parametrizations[0].scaling)


def _plain(weight: Any) -> Any:
    """Return a weight below adapters, None for one that dequantises."""
    weight = weight.weight if isinstance(weight, LoRA) else weight
    return None if quantised(weight) is not None else weight


def holds(module: nn.Module) -> bool:
    """Whether a module has the parameters of transformers' experts."""
    weights = [module._parameters.get(name) for name in _WEIGHTS]
    return all(p is not None and p.dim() == 3 for p in weights)


def experts_swap(module: nn.Module, save: str, chunks: int | None) -> Swap | NotFused:
    """Return the swap of experts, or why they cannot be swapped."""
    others = [name for name, _ in module.named_parameters() if name not in (*_WEIGHTS, *_BIASES)]
    if others:
        return NotFused("parameters", ", ".join(others))
    gate_up, down = [module._parameters[name] for name in _WEIGHTS]
    assert gate_up is not None
    assert down is not None
    first, last = gate_up.shape[1:], down.shape[1:]
    # some experts of others have no weights
    are_as_many = gate_up.shape[0] == down.shape[0]
    sides = [side for side in (False, True) if are_as_many and _fits(first, last, side)]
    if len(sides) == 2:
        # square: either could be
        sides = [bool(getattr(module, "is_transposed", False))]
    count = len(inspect.signature(module.forward).parameters)
    if count not in (1, 3):
        return NotFused("signature")
    gating = _gating_of(module)
    if not sides or gating is None:
        return NotFused("gating" if sides else "shapes")
    # sizes may change, as in expert parallelism
    reads = tuple(
        ((name,), value)
        for name, value in vars(module).items()
        if name[0] != "_" and name != "training" and type(value) is not int
        if is_simple(value) or is_function(value)
    )
    held = [Held((), None, None, reads)]
    held += [Held((n,), type(child), None, ()) for n, child in module.named_children()]
    name = gating if isinstance(gating, str) else "clamped SwiGLU"
    details = [name, *(["weights as [in, out]"] if sides[0] else []), *of_chunks(chunks)]
    match = ExpertsMatch(gating, sides[0], tuple(held))
    return Swap(
        "experts",
        f"{type(module).__name__} -> experts ({', '.join(details)})",
        subclass(FusedExperts if count == 3 else FusedDenseExperts, type(module)),
        {"_fusedckpt_match": match, "save": save, "chunks": chunks},
        features=(first[0 if sides[0] else 1],),
        is_sized=True,
    )


def _fits(first: Sequence[int], last: Sequence[int], turned: bool) -> bool:
    (n, k), (d, f) = (first[::-1], last[::-1]) if turned else (first, last)
    return n == 2 * f and k == d


def _gating_of(module: Any) -> Gating | None:
    """Return the gating with the values of the module's own, None if none has them."""
    # beyond every limit
    far = max([30.0, *(2 * number for number in _numbers(module))])
    near = torch.linspace(-30, 30, 601, dtype=torch.float64)
    near = torch.cat([near, near * far / 30])
    z = torch.stack([near, near[torch.arange(len(near)) * 97 % len(near)]]).T.reshape(1, -1)
    gate = getattr(module, "_apply_gate", None)
    act: Any = getattr(module, "act_fn", None)
    with undisturbed("cpu"), torch.no_grad(), torch.device("cpu"):
        for gating in _candidates(module):
            g, u = _split(z, gating)
            try:
                hidden: Any = gate(z.clone()) if callable(gate) else act(g.clone()) * u
            except Exception:  # arbitrary code of others
                return None
            # some compute it in float32
            if torch.allclose(hidden, gated(g, u, gating), rtol=1e-5, atol=1e-5):
                return gating
    return None


def _split(z: Tensor, gating: Gating) -> Any:
    is_interleaved = isinstance(gating, ClampedSwiGLU) and gating.is_interleaved
    return (z[:, ::2], z[:, 1::2]) if is_interleaved else z.chunk(2, 1)


def _candidates(module: nn.Module) -> Iterator[Gating]:
    """Yield gatings, with the numbers of the module."""
    yield from ACTIVATIONS
    numbers = _numbers(module)
    for limit, alpha in product(numbers, {1.0, *numbers}):
        for offset, is_interleaved in product((0.0, 1.0), (True, False)):
            yield ClampedSwiGLU(alpha, limit, offset, is_interleaved)


def _numbers(module: nn.Module) -> set[float]:
    return {v for v in vars(module).values() if type(v) is float and 0 < v < math.inf}


def _routed(implementation: str, module: Any, x: Tensor) -> Tensor:
    """Run a copy of experts by an implementation of transformers', routed by two features."""
    if "config" in vars(module):
        module.config = copy.copy(module.config)
        module.config._experts_implementation_internal = implementation
    # digits that are the same in every dtype
    rows = x.flatten(0, -2)
    index = (rows[:, :2].detach().double() * 1024).long() % getattr(module, _WEIGHTS[0]).shape[0]
    return type(module).forward(module, rows, index, rows[:, :2])


def _dense(module: Any, x: Tensor) -> Tensor:
    """Run a copy of experts that each get all rows."""
    rows = x.flatten(0, -2).repeat(getattr(module, _WEIGHTS[0]).shape[0], 1)
    return type(module).forward(module, rows)


def checked(module: nn.Module, swap: Swap, verify: bool) -> Swap | NotFused:
    """Return a swap with the bytes saved per token for two experts, or how it changes results.

    Of dense experts the bytes are those of all of them.
    """
    if issubclass(swap.to, FusedDenseExperts):
        dense = replace(swap, run=_dense)
        problem = difference(module, dense) if verify else None
        part = Part(swap.kind, swap.change, saved_per_token(module, dense))
        return problem or replace(swap, parts={"": part})
    problem = difference(module, replace(swap, run=partial(_routed, "eager"))) if verify else None
    if problem is not None and not _is_eager(module):
        # the own forward of some multiplies in float32
        problem = difference(module, replace(swap, run=partial(_routed, "batched_mm")))
        match = swap.attributes["_fusedckpt_match"]._replace(is_own=False)
        swap = replace(swap, attributes={**swap.attributes, "_fusedckpt_match": match})
    if problem is not None:
        return problem
    # transformers' grouped_mm runs on meta tensors in bfloat16 alone
    routed = replace(swap, run=partial(_routed, "grouped_mm"))
    saved = saved_per_token(module, routed, torch.bfloat16)
    scale = next(module.parameters()).itemsize / 2
    saved = None if saved is None else (scale * saved[0], scale * saved[1])
    return replace(swap, parts={"": Part(swap.kind, swap.change, saved)})
