"""fuse before and after models are sharded over ranks."""

from pathlib import Path

from support import run_ranks


def test_on_two_ranks(tmp_path):
    """See sharded_ranks.py."""
    run_ranks(Path(__file__).parent / "sharded_ranks.py", tmp_path / "store")


def test_on_a_mesh_of_four_ranks(tmp_path):
    """See mesh_ranks.py."""
    run_ranks(Path(__file__).parent / "mesh_ranks.py", tmp_path / "store", 4)
