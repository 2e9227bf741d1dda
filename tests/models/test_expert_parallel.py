"""transformers' own expert parallelism, on two ranks by its plan: fused as in one process."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from support import run_ranks
from test_tp_plan import step

from fusedckpt.integrations.transformers import register_experts

LAYERS, D, F, TOP_K = 1, 32, 48, 2


def main(folder: Path, rank: int) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    register_experts()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": D, "num_hidden_layers": LAYERS}
    config = Qwen3MoeConfig(
        **{**sizes, **heads, "vocab_size": 64, "use_cache": False},
        **{
            "num_experts": 4,
            "moe_intermediate_size": F,
            "head_dim": 8,
            "num_experts_per_tok": TOP_K,
        },
        experts_implementation="eager",
    )
    whole, ids = Qwen3MoeForCausalLM(config), torch.randint(0, 64, (2, 16))
    if rank == 0:
        whole.save_pretrained(folder)
    torch.distributed.barrier()
    expected, _ = step(whole, ids)
    for implementation in ("all_to_all", "all_reduce"):
        given = {"tp_size": 2, "ep_size": 2, "ep_implementation": implementation}
        fused = Qwen3MoeForCausalLM.from_pretrained(
            folder,
            distributed_config=DistributedConfig(**given),
            experts_implementation="fusedckpt",
        )
        found, _ = step(fused, ids)
        for ours, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)
        assert fused.config._experts_implementation == "fusedckpt"


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers gives each rank a GPU")
def test_on_two_ranks(tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel")
    run_ranks(partial(main, tmp_path), tmp_path)
