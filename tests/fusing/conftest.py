"""Fused modules take ATen where kernels are interpreted: that is slow, and proven elsewhere."""

import pytest

from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels.runtime import IS_INTERPRETED
from fusedckpt.recipes import recipe_mode


@pytest.fixture(autouse=True)
def on_aten(request):
    takes_both = "path" in request.fixturenames
    with forced_path("aten" if IS_INTERPRETED and not takes_both else None):
        yield


@pytest.fixture
def any_size(monkeypatch):
    """Save recipes of tensors of any size."""
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
