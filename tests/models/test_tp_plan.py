"""transformers' own tensor parallelism: its Llama under its own plan, fused and not."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import fusedckpt
from fusedckpt.blocks import head as head_block
from fusedckpt.fusing.deferred import DeferredLogits
from fusedckpt.memory import saved_tensors

# no other tensor has as many numbers as the logits, or a rank's share of them
LAYERS, D, F, CLASSES, LENGTH = 2, 32, 64, 74, 15
LOGITS = 4 * 2 * LENGTH * CLASSES


def step(model: nn.Module, ids: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    model.train()
    with saved_tensors() as saved:
        out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = [p.grad for p in model.parameters()]
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return [out.loss.detach(), *found, out.logits], saved.nbytes


def allocations(fn: Callable[[], Any]) -> tuple[Any, set[int]]:
    with torch.profiler.profile(profile_memory=True) as profiler:
        found = fn()
    events = profiler.profiler.kineto_results.events()
    return found, {event.nbytes() for event in events if event.name() == "[memory]"}


def main(folder: Path, rank: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": LAYERS}
    config = LlamaConfig(**sizes, **heads, vocab_size=CLASSES, use_cache=False)
    whole, ids = LlamaForCausalLM(config), torch.randint(0, CLASSES, (2, LENGTH))
    if rank == 0:
        whole.save_pretrained(folder)
    torch.distributed.barrier()
    expected, _ = step(whole, ids)
    eager, fused = (LlamaForCausalLM.from_pretrained(folder, tp_plan="auto") for _ in range(2))
    report = fusedckpt.fuse(fused, head=True)
    assert len(report.swapped) == 4 * LAYERS + 2, report
    head_block.CHUNK_BYTES = 1
    (theirs, unfused), made = allocations(lambda: step(eager, ids))
    assert made & {LOGITS, LOGITS // 2} == {LOGITS, LOGITS // 2}
    (ours, kept), made = allocations(lambda: step(fused, ids))
    assert not made & {LOGITS, LOGITS // 2}
    assert type(ours[-1]) is DeferredLogits
    assert ours[-1].deferred.made is None
    assert abs(ours[0] - expected[0]) < 1e-6
    for found in (theirs, ours):
        for mine, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(mine + 0, truth, rtol=1e-4, atol=1e-6)
    # parallel linears have hooks
    assert {report.kinds[name] for name in report.fallbacks} == {"attention"}, report
    # at the least gate, silu(gate), up and the product, of a half of the features, and logits
    assert unfused - kept >= LAYERS * ids.numel() * 4 * 4 * F // 2 + LOGITS
    fused.eval(), eager.eval()
    torch.testing.assert_close(*(model(input_ids=ids).logits for model in (fused, eager)))


def test_on_two_ranks(tmp_path):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    run_ranks(partial(main, tmp_path), tmp_path)
