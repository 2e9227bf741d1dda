"""fuse before and after models are sharded over ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def test_on_two_ranks(tmp_path):
    """See sharded_ranks.py."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    script = Path(__file__).parent / "sharded_ranks.py"
    command = [sys.executable, "-W", "ignore", script, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
