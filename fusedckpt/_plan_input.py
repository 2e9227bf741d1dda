"""What `plan` is given, checked before any work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fusedckpt import _roles
from fusedckpt._budget import bytes_of
from fusedckpt.units import candidates, named

__all__ = ["Policy", "check_model", "limit_of", "names_of"]

Policy = str | Sequence[str | nn.Module]
_POLICY = re.compile(r"budget|none|all|sqrt|uniform:[1-9]\d*|memory|speed")


def check_model(model: nn.Module) -> None:
    """Refuse a model whose units cannot be given roles."""
    if any(_roles.is_assigned(module) for module in model.modules()):
        raise ValueError("plan: a plan is applied to this model: undo it first")
    for module in model.modules():
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            raise ValueError(
                "plan: expected a model that is not compiled yet: plan it, then compile"
            )
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError("plan: expected a model that is not sharded yet: plan it, then shard it")


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
            "plan: expected one of budget and activation_budget, or neither and another policy, "
            f"got {len(given)} and policy {policy!r}"
        )
    return bytes_of("plan", given[0], device) if given else None


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
