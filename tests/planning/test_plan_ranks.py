"""Plans that several ranks make together."""

import pytest
from support import run_ranks

distributed = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")


def test_on_two_ranks(tmp_path):
    """See plan_ranks.py."""
    import plan_ranks

    run_ranks(plan_ranks.main, tmp_path)
