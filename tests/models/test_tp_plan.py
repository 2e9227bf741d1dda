"""transformers' own tensor parallelism: its Llama under its own plan, fused and not."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from support import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import fusedckpt
from fusedckpt.memory import saved_tensors

LAYERS, D, F = 2, 32, 64


def step(model: nn.Module, ids: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    model.train()
    with saved_tensors() as saved:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return [loss.detach(), *found], saved.nbytes


def main(folder: Path, rank: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": LAYERS}
    config = LlamaConfig(**sizes, **heads, vocab_size=64, use_cache=False)
    whole, ids = LlamaForCausalLM(config), torch.randint(0, 64, (2, 16))
    if rank == 0:
        whole.save_pretrained(folder)
    torch.distributed.barrier()
    expected, _ = step(whole, ids)
    eager, fused = (LlamaForCausalLM.from_pretrained(folder, tp_plan="auto") for _ in range(2))
    report = fusedckpt.fuse(fused)
    assert len(report.swapped) == 4 * LAYERS + 1, report
    (theirs, unfused), (ours, kept) = step(eager, ids), step(fused, ids)
    for found in (theirs, ours):
        for mine, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-6)
    # parallel linears have hooks
    assert {report.kinds[name] for name in report.fallbacks} == {"attention"}, report
    # at the least gate, silu(gate), up and the product, of a half of the features
    assert unfused - kept >= LAYERS * ids.numel() * 4 * 4 * F // 2


def test_on_two_ranks(tmp_path):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    run_ranks(partial(main, tmp_path), tmp_path)
