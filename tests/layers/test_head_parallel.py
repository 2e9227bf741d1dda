"""The head on a weight sharded by classes over two ranks equals the head of one process."""

import head_ranks
import pytest
import torch
from support import run_ranks


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ranks(tmp_path):
    run_ranks(head_ranks.main, tmp_path)
