"""Whether segments of a plan offload their inputs: the rate of copies, and the choice.

The rates are measured, by all ranks of a group at once, as the processes of a machine share its
memory and buses. The ms of copies that no forward or backward hides follow from them by arithmetic.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import torch

from fusedckpt.checkpointing import offload
from fusedckpt.checkpointing.offload import KEPT
from fusedckpt.planning.chain import Chain, Outcome
from fusedckpt.planning.rules import by_rule
from fusedckpt.planning.solver import solve

# bytes of a copy that is timed
_BYTES = 64 << 20
# how often that copy is repeated
_TIMES = 4
# with fewer segments no offloaded input would be off the device when backward begins
LEAST_SEGMENTS = KEPT + 3
# a plan with offload is this much faster than one without: its ms are the less certain ones
_MARGIN = 0.98


class CopyRates(NamedTuple):
    """Bytes per ms of copies to the host and back; 0 where there is an obstacle, which is named."""

    to_host: float = 0.0
    to_device: float = 0.0
    obstacle: str = ""


def copy_rates(device: torch.device) -> CopyRates:
    """Measure the copies of a device now."""
    if obstacle := offload.obstacle(device):
        return CopyRates(obstacle=obstacle)
    copies = offload.copy_stream(device)
    tensor = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    host = copies.memory.empty_like(tensor)
    rates = list[float]()
    for pair in ((host, tensor), (tensor, host)):
        # the first copy has costs that later ones do not have
        copies.copy([pair], copies.computing().record_event()).synchronize()
        start = time.perf_counter()
        copies.copy([pair] * _TIMES, copies.computing().record_event()).synchronize()
        rates.append(_TIMES * _BYTES / (1e3 * (time.perf_counter() - start)))
    to_host, to_device = rates
    return CopyRates(to_host, to_device)


def without(chain: Chain) -> Chain:
    """Return the chain without offloading segments."""
    return replace(chain, to_host=0.0, to_device=0.0)


class OffloadChoice(NamedTuple):
    """A plan, and why none of its segments offloads its input; "" where some do."""

    outcome: Outcome
    declined: str


def choose(chain: Chain, limit: float) -> OffloadChoice:
    """Return the fastest plan within a limit, with offload where no other plan is as fast.

    Raises:
        ValueError: no plan stays within the limit.
    """
    on_device = without(chain)
    if by_rule(on_device, "none").peak_bytes <= limit:
        return OffloadChoice(solve(on_device, limit), "the budget fits without it")
    offloading = solve(chain, limit)
    try:
        plain = solve(on_device, limit)
    except ValueError:
        # nothing else fits
        return OffloadChoice(offloading, "")
    count = sum(item.offloads for item in offloading.items)
    if not count or offloading.extra_ms > _MARGIN * plain.extra_ms:
        text = f"another plan costs {plain.extra_ms:.2f} ms"
        if count:
            text += f", with it {offloading.extra_ms:.2f} ms"
        return OffloadChoice(plain, text)
    if count < LEAST_SEGMENTS:
        return OffloadChoice(
            plain, f"it pays with {LEAST_SEGMENTS} segments or more, and this plan has {count}"
        )
    return OffloadChoice(offloading, "")
