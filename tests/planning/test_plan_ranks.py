"""Plans that several ranks make together."""

from pathlib import Path

import pytest
from support import run_ranks

distributed = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")


def test_on_two_ranks(tmp_path):
    """See plan_ranks.py."""
    run_ranks(Path(__file__).parent / "plan_ranks.py", tmp_path / "store")
