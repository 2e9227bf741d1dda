"""The forward of a norm with a gate of any class, and the record of its function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch
from fusedckpt.fusing.match_reader import Guards, Reader
from fusedckpt.fusing.swap import Swapped
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.gated_norm import gated_rms_norm

# of x, the gate and the weight
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]


class GatedNormMatch(NamedTuple):
    """The gated norm that a module of some class computes: see `functional.gated_rms_norm`."""

    # the attribute of the weight, None for a norm without one
    weight: str | None
    # the attribute of epsilon
    eps: str
    # of the gate
    activation: str
    # how many groups of columns are normalized apart
    groups: int
    # whether x is gated before it is normalized
    gates_first: bool
    # added to the weight
    offset: float
    # where the norm rounds: "torch" or "llama"
    cast: str
    # the dtypes that were verified
    dtypes: tuple[Dtypes, ...] = ()
    # state that must not change
    guards: Guards = Guards()
    # whether it may run under autocast
    autocasts: bool = True

    def reader(self) -> Reader:
        """Return the reader of the match's state in calls."""
        return Reader(self.guards)

    @property
    def words(self) -> str:
        """Describe the rule, for reports."""
        gate = f"{self.activation}(gate)"
        order = f"norm(x * {gate})" if self.gates_first else f"norm(x) * {gate}"
        return f"gated_rms_norm ({order}{f', {self.groups} groups' if self.groups > 1 else ''})"


class FusedGatedNorm(Swapped):
    """Forward of a norm with a gate of any class; saves only x and the gate."""

    _fusedckpt_count = 2
    save_levels = ()

    def _fused(self, x: Tensor, gate: Tensor) -> Tensor | NotFused:
        match = self._fusedckpt.match
        weight = None if match.weight is None else self._parameters.get(match.weight)
        if not dispatch.are_plain(x, gate, weight):
            return fallbacks.fallback_of(x, gate=gate, **{match.weight or "": weight})
        if (change := self._fusedckpt.reader.change(self)) is not None:
            return change
        if match.weight is not None and weight is None:
            return NotFused("changed", match.weight)
        if x.shape != gate.shape:
            return NotFused("arguments")
        dtypes = x.dtype, gate.dtype, x.dtype if weight is None else weight.dtype
        is_cast = dispatch.autocast_dtype(x.device) is not None
        if dtypes not in match.dtypes or (is_cast and not match.autocasts):
            return NotFused("dtype", x.dtype)
        return matched_gated_norm(self, match, x, gate, weight)

    def _function_now(self) -> str:
        return f"fused as {self._fusedckpt.match.words}"


def matched_gated_norm(
    module: nn.Module, match: GatedNormMatch, x: Tensor, gate: Tensor, weight: Tensor | None
) -> Tensor:
    """Return the norm that a match describes."""
    return gated_rms_norm(
        x,
        gate,
        x.shape[-1],
        weight,
        getattr(module, match.eps),
        activation=match.activation,
        groups=match.groups,
        gates_first=match.gates_first,
        offset=match.offset,
        cast=match.cast,
    )
