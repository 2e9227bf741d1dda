"""Budgets and policies as people write them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

Policy = str | Sequence[str | nn.Module]

_POLICY = re.compile(r"budget|none|all|sqrt|uniform:[1-9]\d*|memory|speed")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_of(name: str, budget: Any, device: torch.device) -> int:
    """Return a budget in bytes: an integer of bytes, "20GiB", "512 MB", or a share of the device.

    numpy's numbers count as Python's.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    if isinstance(budget, (int, np.integer)) and not isinstance(budget, bool) and budget > 0:
        return int(budget)
    if isinstance(budget, (float, np.floating)) and 0 < budget <= 1:
        return int(budget * _memory(device))
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", budget, re.IGNORECASE)
        step = 1024 if match and match[3] else 1000
        if match and (nbytes := int(float(match[1]) * step ** _UNITS[match[2].upper()])):
            return nbytes
    raise ValueError(
        f"{name}: a budget is bytes (an integer, at least 1), a size such as '20GiB', or a share "
        f"of the device's memory (a float above 0.0, at most 1.0), got {budget!r} of type "
        f"{type(budget).__name__}"
    )


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def spare_bytes(device: torch.device) -> int:
    """Return how many bytes a step may surely take beyond the memory in use."""
    if device.type != "cuda":
        return _memory(device) // 4
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # blocks of the cache may not fit
    return int(0.8 * (torch.cuda.mem_get_info(device)[0] + unused))


def limit_of(budget: Any, activation_budget: Any, policy: Any, device: torch.device) -> int | None:
    """Return the budget in bytes, None for a policy without one; check the policy's form."""
    is_name = isinstance(policy, str)
    if not (_POLICY.fullmatch(policy) if is_name else isinstance(policy, Iterable)):
        raise ValueError(
            "plan: policy must be budget, none, all, sqrt, uniform:k, memory, speed or a "
            f"list of modules, got {policy!r}"
        )
    budgets = {"budget": budget, "activation_budget": activation_budget}
    budgets = {name: value for name, value in budgets.items() if value is not None}
    if len(budgets) != (is_name and policy == "budget"):
        came = " and ".join(f"{name}={value!r}" for name, value in budgets.items()) or "no budget"
        raise ValueError(
            "plan: pass budget=, such as '20GiB', or activation_budget=, by name, or neither and "
            f"another policy=, such as 'memory'; got {came} and policy {policy!r}"
        )
    return bytes_of("plan", next(iter(budgets.values())), device) if budgets else None
