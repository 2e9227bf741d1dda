"""Plans are tested on ATen."""

import pytest

from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture(autouse=True)
def on_aten(unverified):
    """Kernels in the interpreter are too slow to be timed."""
    with forced_path("aten"):
        yield
