"""Tensor and sequence parallel layers: values, gradients, saved bytes, collectives."""

from support import run_ranks


def test_on_two_ranks(tmp_path):
    """See parallel_ranks.py."""
    import parallel_ranks

    run_ranks(parallel_ranks.main, tmp_path)
