"""Tensor and sequence parallel layers: values, gradients, saved bytes, collectives."""

from pathlib import Path

from support import run_ranks


def test_on_two_ranks(tmp_path):
    """See parallel_ranks.py."""
    run_ranks(Path(__file__).parent / "parallel_ranks.py", tmp_path / "store")
