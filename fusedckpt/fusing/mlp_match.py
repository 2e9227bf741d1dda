"""The record of an MLP: which block a module's forward is, and from which parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusedckpt.fusing.guards import Held
from fusedckpt.fusing.replica import Path


class Weight(NamedTuple):
    """A linear of a block."""

    # the attributes that lead to its weight
    weight: Path
    # those that lead to its bias, None without one
    bias: Path | None
    # whether the weight lies as [in, out]
    transposed: bool


class MatchedBlock(NamedTuple):
    """The block that a forward computes: the arguments of one of our functions."""

    # the function: "mlp", "gated_mlp" or "linear_act"
    kind: str
    # in the order of the function's arguments
    linears: tuple[Weight, ...]
    # its name in the table of activations
    activation: str
    # the half of the first weight that comes first, "gate" or "up"; "" where it has no halves
    packed: str = ""


# where a dropout's rate is: the path of a module, and its attribute
Rate = tuple[Path, str]


class MLPMatch(NamedTuple):
    """How an MLP, gated MLP or linear with its activation computes, and from which parameters."""

    # the function of ours that it computes
    block: MatchedBlock
    # state that must not change
    held: tuple[Held, ...]
    # dtypes of the weights for which the match was verified
    dtypes: tuple[torch.dtype, ...] = ()
    # dropout rates that must be 0 in training
    rates: tuple[Rate, ...] = ()
    # the rate of the dropout of the last linear's input
    hidden: Rate | None = None
    # the rate of the dropout of the result
    last: Rate | None = None
