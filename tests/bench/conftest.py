"""What tests of the commands share."""

from __future__ import annotations

import pytest

from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture(scope="module")
def aten():
    """The kernels have tests of their own; here the interpreter would take most of the time."""
    with forced_path("aten"):
        yield


@pytest.fixture(scope="module")
def uncompiled():
    """torch.compile takes seconds a case, and has a test of its own."""
    from bench.implementations import BASELINES

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in BASELINES if name.startswith("torch.compile")]:
            patch.delitem(BASELINES, name)
        yield
