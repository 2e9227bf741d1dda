"""fuse before and after models are sharded over ranks."""

from pathlib import Path

from support import run_ranks


def test_on_two_ranks(tmp_path):
    """See sharded_ranks.py."""
    run_ranks(Path(__file__).parent / "sharded_ranks.py", tmp_path / "store")
