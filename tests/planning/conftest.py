"""Plans are tested on ATen, and steps of two plans are not compared time after time."""

import pytest

from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture(autouse=True)
def on_aten():
    """Kernels in the interpreter are too slow to be timed."""
    with forced_path("aten"):
        yield


@pytest.fixture(autouse=True)
def one_pair_of_steps(monkeypatch):
    """Time one pair of steps alone, where a test does not make up its times."""
    monkeypatch.setattr("fusedckpt.planning.trials._SECONDS", 0.0)
