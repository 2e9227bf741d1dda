"""Overrides for torchtitan."""

import importlib.util

import pytest
from support import DEVICE, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="two ranks on a CPU"),
]


def test_two_ranks(tmp_path):
    import torchtitan_ranks

    run_ranks(torchtitan_ranks.main, tmp_path)
