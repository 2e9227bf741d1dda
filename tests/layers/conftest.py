"""A norm and a layer that reads its result, of every kind."""

import pytest
import torch
from norm_pairs import MLPS, NORMS, D, F
from support import DEVICE

from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture(params=NORMS)
def norm(request):
    made = NORMS[request.param]().to(DEVICE, torch.float64)
    with torch.no_grad():
        made.weight += torch.randn_like(made.weight)
    return made


@pytest.fixture(params=MLPS)
def mlp(request):
    return MLPS[request.param](D, F, bias=True).to(DEVICE, torch.float64)


@pytest.fixture
def on_aten():
    with forced_path("aten"):
        yield
