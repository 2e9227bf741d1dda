"""MLPs of a unit cut into chunks of tokens: into how many, the levels' names, and the role."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fusedckpt.autograd.levels import Chunked, chunking
from fusedckpt.fusing.forwards import FusedMLP
from fusedckpt.layers.blocks import MLP, GatedMLP
from fusedckpt.layers.sequential import Sequential, runs
from fusedckpt.planning.calls import Bytes, Call, Run
from fusedckpt.planning.plan_record import IN, level_and_parts
from fusedckpt.planning.roles import Role, again, save_at

__all__ = ["chunks_in", "has_mlps", "in_chunks", "in_less", "kept_in"]

# a half, and an eighth, of what is F-wide: beyond that tensors of other widths are the larger
_COUNTS = 2, 8
# rows of the smallest chunk that a GEMM is worth
_ROWS = 16


def in_less(
    call: Call, forward: Callable[..., Any], level: str, kept: Bytes, rerun: Bytes
) -> dict[str, tuple[Bytes, Bytes]]:
    """Return levels that cut a unit's MLPs into chunks, if it works in less memory than in fewer.

    kept, rerun: what it takes at the level itself, and run again in a segment of its own. Both are
    measured of each.
    """
    found: dict[str, tuple[Bytes, Bytes]] = {}
    last = kept, rerun
    for count in (count for count in _COUNTS if call.rows >= count * _ROWS):
        name = f"{level}{IN}{count} chunks"
        now = call.bytes(kept_in(name, forward)), call.bytes(_again_in(name, forward))
        if any(
            x.forward < y.forward or x.backward < y.backward for x, y in zip(now, last, strict=True)
        ):
            found[name] = last = now
    return found


def kept_in(name: str, forward: Callable[..., Any]) -> Run:
    """Return how a unit runs that is kept at such a level."""
    return partial(in_chunks(save_at(level_and_parts(name)[0]), chunks_in(name)), forward)


def _again_in(name: str, forward: Callable[..., Any]) -> Run:
    return partial(in_chunks(again(level_and_parts(name)[0]), chunks_in(name)), forward)


def has_mlps(module: nn.Module) -> bool:
    """Whether there is an MLP in it that can be cut into chunks."""
    return any(map(_is_mlp, module.modules()))


def _is_mlp(module: nn.Module) -> bool:
    if isinstance(module, FusedMLP):
        return module._fusedckpt_match.block.kind != "linear_act"
    if isinstance(module, Sequential):
        return any(run.kind == "mlp" for run in runs(list(module)))
    return isinstance(module, (MLP, GatedMLP))


def chunks_in(name: str) -> int:
    """Return into how many chunks a level of this name cuts MLPs."""
    count = name.partition(IN)[2].partition(" ")[0]
    return int(count) if count else 1


def in_chunks(role: Role, chunks: int) -> Role:
    """Return a role with MLPs cut into chunks, in recomputes too; the role itself for one."""
    return role if chunks == 1 else partial(_cut, role, chunks)


def _cut(role: Role, chunks: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        # a compiled checkpoint traces its recompute but once, and is to change nothing outside
        with chunking(chunks):
            return role(forward, args, kwargs)
    return role(Chunked(forward, chunks), args, kwargs)
