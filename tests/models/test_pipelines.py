"""Stages of pipelines, fused, checkpointed and planned, train as one process does."""

from pathlib import Path

import pytest
from support import run_ranks

distributed = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")


def test_schedules(tmp_path):
    """GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble; see pipeline_ranks.py."""
    run_ranks(Path(__file__).parent / "pipeline_ranks.py", tmp_path / "store")


def test_recomputing_while_a_gradient_is_on_its_way(tmp_path):
    """GPipe over a slow link; see prefetch_ranks.py."""
    run_ranks(Path(__file__).parent / "prefetch_ranks.py", tmp_path / "store")
