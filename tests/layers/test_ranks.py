"""Layers on two ranks: in tensor and sequence parallel, compiled, chunks, float32 gradients."""

import chunk_ranks
import compiled_ranks
import fp32_ranks
import parallel_ranks
import pytest
import torch
from support import run_ranks


def main(rank: int) -> None:
    for module in (parallel_ranks, compiled_ranks, chunk_ranks, fp32_ranks):
        module.main(rank)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_on_two_ranks(tmp_path):
    """Values, gradients, saved bytes and collectives."""
    run_ranks(main, tmp_path)
