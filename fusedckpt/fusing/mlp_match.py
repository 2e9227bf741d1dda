"""The record of an MLP: which block a module's forward is, and from which parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedckpt.fusing.guards import Guard, child_at
from fusedckpt.fusing.replica import Path

# the place of a dropout's rate: the path of a module, and its attribute
Rate = tuple[Path, str]


class LinearPaths(NamedTuple):
    """The places of a linear's parameters in the module that was matched."""

    # the attributes that lead to its weight
    weight: Path
    # those that lead to its bias, None without one
    bias: Path | None
    # whether the weight lies as [in, out]
    is_transposed: bool


class MatchedBlock(NamedTuple):
    """The block that a forward computes: the arguments of one of our functions."""

    # the function: "mlp", "gated_mlp" or "linear_act"
    kind: str
    # in the order of the function's arguments
    linears: tuple[LinearPaths, ...]
    # its name in the table of activations
    activation: str
    # the half of the first weight that comes first, "gate" or "up"; "" where it has no halves
    packed: str = ""


class MLPMatch(NamedTuple):
    """How an MLP, gated MLP or linear with its activation computes, and from which parameters."""

    # the function of ours that it computes
    block: MatchedBlock
    # the state for which that holds
    guards: tuple[Guard, ...]
    # dtypes of the weights for which the match was verified
    dtypes: tuple[torch.dtype, ...] = ()
    # dropout rates that must be 0 in training
    zero_rates: tuple[Rate, ...] = ()
    # the rate of the dropout of the last linear's input
    hidden_rate: Rate | None = None
    # the rate of the dropout of the result
    result_rate: Rate | None = None
    # whether that one writes over the result: on a GPU it draws other numbers then
    writes_result: bool = False


def rates_above_zero(module: nn.Module, match: Any) -> Iterator[Rate]:
    """Yield the rates for which a module does not run fused in training; none without a match."""
    for path, attribute in getattr(match, "zero_rates", ()):
        if getattr(child_at(module, path), attribute, 0) > 0:
            yield path, attribute
