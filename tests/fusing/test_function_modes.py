"""Modes of other code, which may change functions: fused modules run their own forward."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn
from swap_cases import D, assert_equal
from test_swapped_calls import MODULES
from torch import nn
from torch.overrides import TorchFunctionMode
from zoo import Attention

import fusedckpt
from fusedckpt import fuse

CHANGED = F.linear, F.layer_norm, F.rms_norm, F.scaled_dot_product_attention, torch.rsqrt


class Larger(TorchFunctionMode):
    """Some functions return a little more."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return y * 1.5 if func in CHANGED else y


class InMode(nn.Module):
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
    make = MODULES.get(name, partial(Attention, D))
    eager = nn.Sequential(nn.Linear(D, D), make(), nn.Tanh()).to(DEVICE)
    model = copy.deepcopy(eager)
    report = fuse(model, recompute_elementwise=recipes, verify=False)
    assert report.swapped
    x = randn(2, 3, D)
    # torch's own modes change nothing
    InMode(model, here)(x)
    assert report.fallbacks == {}
    assert not torch.equal(InMode(eager, Larger)(x), eager(x))
    assert_equal(InMode(model, Larger), InMode(eager, Larger), x, tol=1e-6)


def test_it_sees_those_of_our_own_layers():
    ours = fusedckpt.MLP(D, 2 * D, norm=fusedckpt.LayerNorm(D)).to(DEVICE)
    eager = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    eager = eager.to(DEVICE)
    for theirs, parameter in zip(eager.parameters(), ours.parameters(), strict=True):
        theirs.data = parameter.data
    x = randn(3, D)
    torch.testing.assert_close(InMode(ours, Larger)(x), InMode(eager, Larger)(x))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(-1, (1, D)),
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 1),
    )


class BranchesOfNorm(nn.Module):
    """Two linears that read a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        n = self.norm(x)
        return self.a(n) * self.b(n)


class OddOperations(nn.Module):
    """An MLP that no program computes."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(D, 16 * D), nn.Linear(16 * D, D)

    def forward(self, x):
        h = self.fc(x)
        return self.out((h.sin() * h.cos().tanh()).cumsum(-1) * 0.1)


UNHOOKED = {
    "attention": partial(Attention, D),
    "convolutions": convolutions,
    "two readers": BranchesOfNorm,
    "mlp that runs again": OddOperations,
}


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("recipes", [False, True], ids=["fused", "recipes"])
@pytest.mark.parametrize("name", [*MODULES, *UNHOOKED])
def test_fused_modules_run_where_saved_tensor_hooks_are_disabled(name, recipes):
    torch.manual_seed(0)
    make = {**MODULES, **UNHOOKED}[name]
    eager = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), make()).to(DEVICE)
    model = copy.deepcopy(eager)
    # with recipes the same modules are swapped
    report = fuse(model, recompute_elementwise=recipes, verify=not recipes)
    without_hooks = partial(torch.autograd.graph.disable_saved_tensors_hooks, "no hooks")
    for _ in range(2):
        x = randn(2, 3, D)
        assert_equal(InMode(model, without_hooks), InMode(eager, without_hooks), x, tol=1e-6)
    if name in ("attention", "mlp that runs again"):
        assert report.fallbacks == {"2": ("no hooks", "")}


def test_the_reason_is_named():
    model = nn.Sequential(MODULES["gated"]()).to(DEVICE)
    report = fuse(model, verify=False)
    InMode(model, Larger)(randn(3, D))
    assert report.fallbacks == {"0": ("mode", "")}
