"""Plans are tested on ATen: kernels in the interpreter are too slow to be timed."""

import pytest

from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture(autouse=True)
def on_aten():
    with forced_path("aten"):
        yield
