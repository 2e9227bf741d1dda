"""transformers' own tensor parallelism."""

from pathlib import Path

import pytest
from support import run_ranks


def test_on_two_ranks(tmp_path):
    """See tp_plan_ranks.py."""
    pytest.importorskip("transformers.distributed.tensor_parallel")
    run_ranks(Path(__file__).parent / "tp_plan_ranks.py", tmp_path / "store")
