"""What `plan` is given, checked before any work."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedckpt.autograd.phases import current
from fusedckpt.planning import roles
from fusedckpt.planning.budget import bytes_of
from fusedckpt.planning.units import candidates, named
from fusedckpt.reporting.trial import tensors_of

__all__ = ["Policy", "check_model", "check_unit", "limit_of", "names_of", "unseen_in"]

Policy = str | Sequence[str | nn.Module]
_POLICY = re.compile(r"budget|none|all|sqrt|uniform:[1-9]\d*|memory|speed")


def check_model(model: nn.Module) -> None:
    """Refuse a model whose units cannot be given roles."""
    if any(roles.is_assigned(module) for module in model.modules()):
        raise ValueError("plan: a plan is applied to this model: undo it first")
    # who has compiled nothing is spared the seconds that importing it takes
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    for name, module in model.named_modules():
        # torch.compile(module), and module.compile()
        wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if wrapped or vars(module).get("_compiled_call_impl") is not None:
            raise ValueError(
                f"plan: expected a model that is not compiled yet, got {name or 'one that is'} "
                "compiled: plan a model that is made anew, apply the plan, then compile"
            )
        if isinstance(module, nn.SyncBatchNorm) and _has_peers(module):
            raise ValueError(
                f"plan: {name or 'the model'} is a SyncBatchNorm, whose forward waits for other "
                "ranks, while one of them measures alone: plan first, then convert_sync_batchnorm"
            )
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError("plan: expected a model that is not sharded yet: plan it, then shard it")


def _has_peers(norm: nn.SyncBatchNorm) -> bool:
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size(norm.process_group) > 1
    )


def check_unit(name: str) -> None:
    """Refuse a unit that is called inside a checkpoint, which would run it once more."""
    if current() is not None:
        raise ValueError(
            f"plan: unit {name} runs inside a checkpoint: a plan says itself what runs again; take "
            "the checkpoint away (of transformers' models, gradient_checkpointing_disable()), or "
            "name the module that it is around in units="
        )


def unseen_in(output: Any) -> str | None:
    """Return the type of a dataclass whose tensors are not seen, as those of dicts are."""
    parts = [output] if not isinstance(output, (tuple, list)) else output
    for part in parts:
        if is_dataclass(part) and next(tensors_of(part), None) is None:
            return type(part).__name__
    return None


def limit_of(budget: Any, activation_budget: Any, policy: Any, device: torch.device) -> int | None:
    """Return the budget in bytes, None for a policy without one; check the policy's form."""
    is_name = isinstance(policy, str)
    if is_name and policy == "recursive":
        raise ValueError(
            "plan: segments of a plan are not nested: for recursive halves call "
            "fusedckpt.checkpoint_sequential(functions, 'recursive', input) in the model's forward"
        )
    if not (_POLICY.fullmatch(policy) if is_name else isinstance(policy, Iterable)):
        raise ValueError(
            "plan: policy must be budget, none, all, sqrt, uniform:k, memory, speed or a list of "
            f"modules, got {policy!r}"
        )
    given = [x for x in (budget, activation_budget) if x is not None]
    if len(given) != (is_name and policy == "budget"):
        raise ValueError(
            "plan: pass budget=, such as '20GiB', or activation_budget=, by name, or neither and "
            f"another policy=, such as 'memory'; got {_listed(budget, activation_budget)} and "
            f"policy {policy!r}"
        )
    return bytes_of("plan", given[0], device) if given else None


def _listed(budget: Any, activation_budget: Any) -> str:
    given = {"budget": budget, "activation_budget": activation_budget}
    return " and ".join(f"{k}={v!r}" for k, v in given.items() if v is not None) or "no budget"


def names_of(model: nn.Module, policy: Policy, units: Any) -> list[str]:
    """Return the names of the modules that may be units."""
    if not isinstance(policy, str):
        if units is not None:
            raise ValueError("plan: expected units or a policy that lists modules, got both")
        return named(model, policy)
    names = candidates(model) if units is None else named(model, units)
    rule, _, number = policy.partition(":")
    if rule == "uniform" and int(number) > len(names):
        raise ValueError(f"plan: expected uniform:1 to {len(names)}, got {policy!r}")
    return names
