"""Models take ATen where kernels are interpreted: that is slow, and proven elsewhere."""

import pytest

from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels.runtime import IS_INTERPRETED


@pytest.fixture(autouse=True)
def on_aten(unverified):
    with forced_path("aten" if IS_INTERPRETED else None):
        yield
