"""The forward of experts of any class, computed by `functional.experts`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, levels
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks.operands import LoRA
from fusedckpt.blocks.quantized import quantized
from fusedckpt.fusing.match_reader import Guards, Reader
from fusedckpt.fusing.swap import Swapped
from fusedckpt.kernels.gating import Gating
from fusedckpt.layers import fallbacks
from fusedckpt.layers.experts import experts
from fusedckpt.layers.fallbacks import NotFused

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
