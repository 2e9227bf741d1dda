"""Overrides for torchtitan."""

import importlib.util
from pathlib import Path

import pytest
from support import DEVICE, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="two ranks on a CPU"),
]


def test_two_ranks(tmp_path):
    run_ranks(Path(__file__).parent / "torchtitan_ranks.py", tmp_path / "store")
