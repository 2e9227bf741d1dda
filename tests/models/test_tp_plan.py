"""A Llama of transformers in tensor parallel: its fused MLPs in our style, and its own plan."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fusedckpt
from fusedckpt.memory import saved_tensors
from fusedckpt.parallel import MLPParallel

LAYERS, D, F, LENGTH = 2, 32, 64, 15


def step(model: nn.Module, ids: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Return the loss, all gradients and the saved bytes of a training step."""
    model.train()
    with saved_tensors() as saved:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads: list[Any] = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return [loss.detach(), *whole], saved.nbytes


def close(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


def main(folder: Path, rank: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": LAYERS}
    config = LlamaConfig(**sizes, **heads, vocab_size=74, use_cache=False)
    whole, ids = LlamaForCausalLM(config), torch.randint(0, 74, (2, LENGTH))
    if rank == 0:
        whole.save_pretrained(folder)
    torch.distributed.barrier()

    fused = LlamaForCausalLM.from_pretrained(folder)
    report = fusedckpt.fuse(fused)
    alone, kept_alone = step(fused, ids)
    fused.zero_grad()
    parallelize_module(fused, init_device_mesh("cpu", (2,)), {"model.layers.*.mlp": MLPParallel()})
    ours, kept = step(fused, ids)
    expected, _ = step(whole, ids)
    close(alone, expected)
    close(ours, expected)
    assert kept == kept_alone
    assert report.fallbacks == {}, report

    # linears with styles of transformers' plan run their own forward
    planned = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
    report = fusedckpt.fuse(planned)
    close(step(planned, ids)[0], expected)
    mlps = {name for name, kind in report.kinds.items() if kind == "mlp"}
    assert mlps == {f"model.layers.{i}.mlp" for i in range(LAYERS)}, report
    assert mlps <= report.left.keys(), report


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers gives each rank a GPU")
def test_on_two_ranks(tmp_path):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    run_ranks(partial(main, tmp_path), tmp_path)
