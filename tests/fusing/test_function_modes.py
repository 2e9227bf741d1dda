"""Function modes of other code, which may change functions: fused modules run their own forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn
from swap_cases import D, assert_equal
from test_swapped_calls import MODULES
from torch import nn
from torch.overrides import TorchFunctionMode

import fusedckpt
from fusedckpt import fuse

CHANGED = F.linear, F.layer_norm, F.rms_norm, F.scaled_dot_product_attention, torch.rsqrt


class Larger(TorchFunctionMode):
    """Some functions return a little more."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return y * 1.5 if func in CHANGED else y


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, D)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class In(nn.Module):
    """The forward of a module in a mode, and its backward outside."""

    def __init__(self, module, mode):
        super().__init__()
        self.module = module
        self.mode = mode

    def forward(self, x):
        with self.mode():
            return self.module(x)


def here():
    return torch.device(DEVICE)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("recipes", [False, True], ids=["fused", "recipes"])
@pytest.mark.parametrize("name", [*MODULES, "attention"])
def test_a_mode_of_other_code_sees_the_functions_of_fused_modules(name, recipes):
    torch.manual_seed(0)
    make = MODULES.get(name, Attention)
    eager = nn.Sequential(nn.Linear(D, D), make(), nn.Tanh()).to(DEVICE)
    model = copy.deepcopy(eager)
    report = fuse(model, recompute_elementwise=recipes, verify=False)
    assert report.swapped
    x = randn(2, 3, D)
    # torch's own modes change nothing
    In(model, here)(x)
    assert report.fallbacks == {}
    assert not torch.equal(In(eager, Larger)(x), eager(x))
    assert_equal(In(model, Larger), In(eager, Larger), x, tol=1e-6)


def test_it_sees_those_of_our_own_layers():
    ours = fusedckpt.MLP(D, 2 * D, norm=fusedckpt.LayerNorm(D)).to(DEVICE)
    eager = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    eager = eager.to(DEVICE)
    for theirs, parameter in zip(eager.parameters(), ours.parameters(), strict=True):
        theirs.data = parameter.data
    x = randn(3, D)
    torch.testing.assert_close(In(ours, Larger)(x), In(eager, Larger)(x))


def test_the_reason_is_named():
    model = nn.Sequential(MODULES["gated"]()).to(DEVICE)
    report = fuse(model, verify=False)
    In(model, Larger)(randn(3, D))
    assert report.fallbacks == {"0": ("mode", "")}
