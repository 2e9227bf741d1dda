"""One of two ranks: a tensor parallel MLP under torch.compile. Run by test_ranks.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensor_parallel import (
    Ranks,
    fused_plan,
    gathered_once,
    make_block,
    make_mlp,
    make_swiglu,
    replicated,
    same,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fusedckpt
from fusedckpt.memory import saved_tensors


def saved_bytes(model: Any, x: torch.Tensor) -> int:
    """Return the saved bytes, without this rank's shards of parameters."""
    with saved_tensors(exclude=model.parameters()) as saved:
        model(x.clone().requires_grad_() * 1)
    return saved.nbytes


def main(rank: int) -> None:
    ranks = Ranks(init_device_mesh("cpu", (2,)), rank)
    for mlp, save, way in (
        (make_swiglu, "inputs", replicated),
        (make_mlp, "preact", replicated),
        (make_swiglu, "inputs", gathered_once),
    ):
        torch.manual_seed(0)
        model = make_block(mlp())
        expected = ranks.expected(copy.deepcopy(model), way)
        fusedckpt.fuse(model, verify=False, save=save)
        parallelize_module(model, ranks.mesh, fused_plan(model, way))
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        same(ranks.results(model, way, call=compiled), expected)
        found, fused = (saved_bytes(run, ranks.given(way)) for run in (compiled, model))
        # the rows before they are gathered are saved beside those after it
        bound = 1.02 * fused if way is replicated else 1.6 * fused
        assert found <= bound, (mlp, save, way, found, fused)
