"""Checks of swaps, each made once for modules that are provably the same."""

from __future__ import annotations

from typing import Any

from torch import nn

from fusedckpt import parity
from fusedckpt.held import is_simple
from fusedckpt.match_mlps import Confirmed
from fusedckpt.match_norms import Found as Norms
from fusedckpt.swapped import Swap

Found = tuple[str | None, tuple[float, float] | None]


class Checks:
    """What swapping would change and what a token keeps, found for the first module of its kind.

    Modules are the same where classes, shapes, dtypes and all that a forward reads are: see `Held`.
    """

    def __init__(self, verify: bool):
        self.verify = verify
        self.found: dict[Any, Found] = {}
        self.confirmed: Confirmed = {}
        self.norms: Norms = {}

    def of(self, module: nn.Module, swap: Swap) -> Found:
        """Return how swapping would change results, if at all, and the bytes kept per token."""
        key = _key(module, swap)
        if key is None or key not in self.found:
            obstacle = parity.difference(module, swap) if self.verify else None
            saved = None if obstacle else parity.saved_per_token(module, swap)
            if key is None:
                return obstacle, saved
            self.found[key] = obstacle, saved
        return self.found[key]


def _key(module: nn.Module, swap: Swap) -> Any:
    """Return what a check depends on, None where that is not known."""
    plan = swap.attributes.get("_fusedckpt_plan")
    parts = []
    for name, part in module.named_modules():
        tensors = [*part._parameters.items(), *part._buffers.items()]
        shapes = tuple((n, t if t is None else (t.shape, t.dtype, t.device)) for n, t in tensors)
        own = {n: v for n, v in vars(part).items() if n[0] != "_"}
        if plan is None and not all(map(is_simple, own.values())):
            return None
        # numbers that are 1 and True have one hash
        state = tuple((n, type(v), v) for n, v in own.items() if is_simple(v))
        parts.append((name, type(part), shapes, state))
    tied = tuple(len({*ids}) for ids in [[id(p) for p in module.parameters()]])
    key = (tuple(parts), tied, swap.to, swap.change, tuple(swap.attributes.items()), repr(plan))
    try:
        hash(key)
    except TypeError:
        return None
    return key
