"""Budgets as people write them."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import torch

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
        if match and (found := int(float(match[1]) * step ** _UNITS[match[2].upper()])):
            return found
    raise ValueError(
        f"{name}: a budget is bytes, at least 1, a size such as '20GiB', or a share of the "
        f"device's memory above 0.0, up to 1.0, got {budget!r} of type {type(budget).__name__}"
    )


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
