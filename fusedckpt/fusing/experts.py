"""Experts as transformers writes them: how they are recognized, verified and computed.

They are told by their parameters: `gate_up_proj` and `down_proj` of three dimensions. The gating is
looked up by its values, and a small replica is compared with the original's forward. The router is
not touched, nor which experts implementation the config names. In each call `functional.experts`
computes them.
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
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks.operands import LoRA
from fusedckpt.blocks.quantized import quantized
from fusedckpt.fusing.fused_mlps import chunk_words
from fusedckpt.fusing.match_reader import Guard, Guards, Reader
from fusedckpt.fusing.replica import undisturbed
from fusedckpt.fusing.swap import Part, Swap, Swapped, subclass
from fusedckpt.fusing.verification import difference, saved_per_token
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.gating import ClampedSwiGLU, Gating
from fusedckpt.layers import fallbacks
from fusedckpt.layers.experts import eager_gated, experts
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.outside.find_reads import outside_reads
from fusedckpt.outside.reads import is_function, is_simple
from fusedckpt.outside.watch import CodeWatch
from fusedckpt.state.code_names import names_in_forward

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
# told by name: peft is not imported
_FACTORS = "peft.tuners.lora.layer._LoraFactorsProxy"


class ExpertsMatch(NamedTuple):
    """The experts that a module computes."""

    gating: Gating
    # whether weights lie as [in, out]
    is_transposed: bool
    # the state for which the match holds
    guards: Guards
    # whether the class's own forward computes the same, not transformers' functions alone
    is_own: bool = True

    def reader(self) -> Reader:
        """Return the reader of the match's state in calls."""
        return Reader(self.guards)


class FusedExperts(Swapped):
    """Forward of experts of any class; saves the tensors that its level names."""

    save_levels = LEVELS_OF["experts"]

    _fusedckpt_count = 3
    save: str
    chunks: int | None

    def _fused(self, x: Tensor, index: Tensor, scores: Tensor) -> Tensor | NotFused:
        return _experts(self, x, index, scores)

    def _function_now(self) -> str:
        return f"fused as experts, save={self.save}"


class FusedDenseExperts(FusedExperts):
    """Forward of experts that each get as many rows, one expert's after the other's (Llama 4)."""

    _fusedckpt_count = 1

    def _fused(self, x: Tensor) -> Tensor | NotFused:  # type: ignore[override]  # of one tensor
        weight = getattr(self, WEIGHTS[0], None)
        num_experts = 0 if weight is None else weight.shape[0]
        rows = x.reshape(-1, x.shape[-1])
        if not num_experts or len(rows) % num_experts:
            return NotFused("arguments")
        experts_of_rows = torch.arange(num_experts, device=x.device)
        index = experts_of_rows.repeat_interleave(len(rows) // num_experts)[:, None]
        scores = rows.new_ones(len(rows), 1)
        return _experts(self, rows, index, scores)


def _experts(module: Any, x: Any, index: Any, scores: Any) -> Tensor | NotFused:
    """Return the result of a module's experts, or why this call cannot run fused."""
    match: ExpertsMatch = module._fusedckpt.match
    if (change := module._fusedckpt.reader.change(module)) is not None:
        return change
    operands = {name: _operand(module, name, match.is_transposed) for name in (*WEIGHTS, *BIASES)}
    if not all(isinstance(t, Tensor) for t in (x, index, scores)):
        return NotFused("arguments")
    if dispatch.is_traced(x) or index.shape != scores.shape or index.is_floating_point():
        return NotFused("arguments")
    tensors = {name: _dense_weight(operand) for name, operand in operands.items()}
    if not dispatch.are_plain(x, index, scores, *tensors.values()):
        return fallbacks.fallback_of(x, **tensors)
    gate_up, down = (operands[name] for name in WEIGHTS)
    gate_up_bias, down_bias = (operands[name] for name in BIASES)
    dtype = (gate_up.weight if isinstance(gate_up, LoRA) else gate_up).dtype
    # other implementations than eager multiply in the weights' dtype, and ignore autocast
    ignores_autocast = not is_eager(module)
    is_autocast = dispatch.autocast_dtype(x.device) is not None
    if not (ignores_autocast or match.is_own):
        return NotFused("dtype", x.dtype)
    if x.dtype != dtype and not (ignores_autocast or is_autocast):
        return NotFused("dtype", x.dtype)
    without_autocast = (
        torch.autocast(x.device.type, enabled=False)
        if ignores_autocast and is_autocast
        else nullcontext()
    )
    with without_autocast:
        y = experts(
            x.to(dtype) if ignores_autocast else x,
            index,
            scores,
            gate_up,
            down,
            activation=match.gating,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            is_transposed=match.is_transposed,
            save=levels.resolve("experts", None, module.save, LEVELS_OF["experts"]),
            chunks=module.chunks,
        )
    return y.to(x.dtype)


def is_eager(module: nn.Module) -> bool:
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
    factors = parametrizations[0]
    a, b = (factors.lhs, factors.rhs) if is_transposed else (factors.rhs, factors.lhs)
    return LoRA(parametrizations.original, a, b, factors.scaling)


def _dense_weight(weight: Any) -> Any:
    """Return a weight below adapters, None for one that dequantizes."""
    weight = weight.weight if isinstance(weight, LoRA) else weight
    return None if quantized(weight) is not None else weight


def has_experts_parameters(module: nn.Module) -> bool:
    """Whether a module has the parameters of transformers' experts."""
    weights = [module._parameters.get(name) for name in WEIGHTS]
    return all(p is not None and p.dim() == 3 for p in weights)


def experts_swap(module: nn.Module, save: str, chunks: int | None) -> Swap | NotFused:
    """Return the swap of experts, or why they cannot be swapped."""
    others = [name for name, _ in module.named_parameters() if name not in (*WEIGHTS, *BIASES)]
    if others:
        return NotFused("parameters", ", ".join(others))
    num_arguments = len(inspect.signature(module.forward).parameters)
    if num_arguments not in (1, 3):
        return NotFused("signature")
    is_transposed = _are_transposed(module)
    gating = gating_of(module)
    if is_transposed is None or gating is None:
        return NotFused("shapes" if is_transposed is None else "gating")
    guards = _guards_of(module)
    if isinstance(guards, NotFused):
        return guards
    name = gating if isinstance(gating, str) else "clamped SwiGLU"
    details = [name, *(["weights as [in, out]"] if is_transposed else []), *chunk_words(chunks)]
    new_class = FusedExperts if num_arguments == 3 else FusedDenseExperts
    gate_up = module._parameters[WEIGHTS[0]]
    assert gate_up is not None
    return Swap(
        "experts",
        f"{type(module).__name__} -> experts ({', '.join(details)})",
        subclass(new_class, type(module)),
        {"save": save, "chunks": chunks},
        {"match": ExpertsMatch(gating, is_transposed, guards)},
        features=(gate_up.shape[1 if is_transposed else 2],),
        can_shrink=True,
    )


def _are_transposed(module: nn.Module) -> bool | None:
    """Whether the weights of experts lie as [in, out]; None where their shapes do not fit."""
    gate_up, down = (module._parameters[name] for name in WEIGHTS)
    assert gate_up is not None
    assert down is not None
    # some experts of others have no weights
    if gate_up.shape[0] != down.shape[0]:
        return None
    layouts = [layout for layout in (False, True) if _fits(gate_up, down, layout)]
    if len(layouts) == 2:
        # square: either could be
        return bool(getattr(module, "is_transposed", False))
    return layouts[0] if layouts else None


def _fits(gate_up: Tensor, down: Tensor, is_transposed: bool) -> bool:
    shapes: list[Sequence[int]] = [gate_up.shape[1:], down.shape[1:]]
    (n, k), (d, f) = (shape[::-1] if is_transposed else shape for shape in shapes)
    return n == 2 * f and k == d


def _guards_of(module: nn.Module) -> Guards | NotFused:
    """Return guards for the options of experts, or why there are none.

    Sizes may change, as in expert parallelism.
    """
    reads = tuple(
        ((name,), value)
        for name, value in vars(module).items()
        if name[0] != "_" and name != "training" and type(value) is not int
        if is_simple(value) or is_function(value)
    )
    kinds: dict[Any, type[nn.Module]] = {(n,): type(child) for n, child in module.named_children()}
    children = [Guard(path, child_kind, None, ()) for path, child_kind in kinds.items()]
    kind = type(module)
    names = {"forward", "_apply_gate"} | names_in_forward(kind) - vars(nn.Module).keys()
    functions = [getattr(kind, name, None) for name in sorted(names)]
    functions += [child_kind.forward for child_kind in kinds.values()]
    kinds[()] = kind
    outside = outside_reads([CodeWatch.of_functions(functions)], kinds, [v for _, v in reads])
    if isinstance(outside, NotFused):
        return outside
    return Guards((Guard((), None, None, reads), *children), outside)


def gating_of(module: Any) -> Gating | None:
    """Return the gating with the values of the module's own, None if none has them."""
    # beyond every limit
    far = max([30.0, *(2 * number for number in _numbers(module))])
    near = torch.linspace(-30, 30, 601, dtype=torch.float64)
    grid = torch.cat([near, near * far / 30])
    # each number as a gate, with another one as up
    z = torch.stack([grid, grid[torch.arange(len(grid)) * 97 % len(grid)]]).T.reshape(1, -1)
    apply_gate = getattr(module, "_apply_gate", None)
    act: Any = getattr(module, "act_fn", None)
    with undisturbed("cpu"), torch.no_grad(), torch.device("cpu"):
        for gating in _candidates(module):
            g, u = _split(z, gating)
            try:
                hidden: Any = apply_gate(z.clone()) if callable(apply_gate) else act(g.clone()) * u
            except Exception:  # arbitrary code of others
                return None
            # some compute it in float32
            if torch.allclose(hidden, eager_gated(g, u, gating), rtol=1e-5, atol=1e-5):
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


def _run_routed(implementation: str, module: Any, x: Tensor) -> Tensor:
    """Run a copy of experts by an implementation of transformers', routed by two features."""
    if "config" in vars(module):
        module.config = copy.copy(module.config)
        module.config._experts_implementation_internal = implementation
    # digits that are the same in every dtype
    rows = x.flatten(0, -2)
    index = (rows[:, :2].detach().double() * 1024).long() % getattr(module, WEIGHTS[0]).shape[0]
    return type(module).forward(module, rows, index, rows[:, :2])


def _run_dense(module: Any, x: Tensor) -> Tensor:
    """Run a copy of experts that each get all rows."""
    rows = x.flatten(0, -2).repeat(getattr(module, WEIGHTS[0]).shape[0], 1)
    return type(module).forward(module, rows)


def verified_experts(module: nn.Module, swap: Swap, verify: bool) -> Swap | NotFused:
    """Return a swap with the bytes saved per token for two experts, or how it changes results.

    Of dense experts the bytes are those of all of them.
    """
    if issubclass(swap.new_class, FusedDenseExperts):
        dense = replace(swap, run=_run_dense)
        problem = difference(module, dense) if verify else None
        return problem or _with_saved(swap, saved_per_token(module, dense))

    def problem_of(implementation: str) -> NotFused | None:
        return difference(module, replace(swap, run=partial(_run_routed, implementation)))

    problem = problem_of("eager") if verify else None
    if problem is not None and not is_eager(module):
        # the own forward of some multiplies in float32
        problem = problem_of("batched_mm")
        match = swap.notes["match"]._replace(is_own=False)
        swap = replace(swap, notes={**swap.notes, "match": match})
    if problem is not None:
        return problem
    # transformers' grouped_mm runs on meta tensors in bfloat16 alone
    routed = replace(swap, run=partial(_run_routed, "grouped_mm"))
    saved = saved_per_token(module, routed, torch.bfloat16)
    scale = next(module.parameters()).itemsize / 2
    return _with_saved(swap, None if saved is None else (scale * saved[0], scale * saved[1]))


def _with_saved(swap: Swap, saved: tuple[float, float] | None) -> Swap:
    return replace(swap, parts={"": Part(swap.kind, swap.change, saved)})
