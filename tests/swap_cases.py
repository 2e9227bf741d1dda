"""The model that the tests of fuse and unfuse swap, and what they hold it to."""

import copy
from collections import OrderedDict

import torch
from support import DEVICE, randn
from torch import nn

from fusedckpt import FuseReport, fuse, unfuse

D, F = 6, 10


def net(activation: nn.Module | None = None) -> nn.Sequential:
    """Every kind of layer and block that is swapped, in Sequentials inside one that is not."""
    mlp = nn.Sequential(nn.Linear(D, F), activation or nn.GELU(), nn.Linear(F, D, bias=False))
    last = OrderedDict(
        fc=nn.Linear(D, D, bias=False), act=nn.Tanh(), norm=nn.RMSNorm(D), head=nn.Linear(D, D)
    )
    return nn.Sequential(nn.LayerNorm(D), mlp, nn.Sequential(last)).to(DEVICE, torch.float64)


NET_SWAPS = {
    "0": "nn.LayerNorm -> LayerNorm",
    "1.0": "nn.Linear + gelu + nn.Linear -> mlp",
    "2.fc": "nn.Linear + tanh -> linear_act",
    "2.norm": "nn.RMSNorm -> RMSNorm",
    "2.head": "nn.RMSNorm + nn.Linear -> norm_linear",
}
# the classes that are swapped for those
NET_CLASSES = {"0": "LayerNorm", "1": "Sequential", "2": "Sequential", "2.norm": "RMSNorm"}


def rows() -> torch.Tensor:
    return randn(5, D, dtype=torch.float64)


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, then the gradients of x and of every parameter."""
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])]


def assert_equal(model: nn.Module, eager: nn.Module, x: torch.Tensor, tol: float = 1e-12) -> None:
    for ours, theirs in zip(results(model, x), results(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)


def assert_eager_equal_after_fuse(model: nn.Module) -> FuseReport:
    """Fuse `model` and hold it against a copy that was not."""
    model = model.to(DEVICE, torch.float64)
    eager = copy.deepcopy(model)
    report = fuse(model, verify=False)
    assert_equal(model, eager, rows())
    unfuse(model)
    assert kinds(model) == kinds(eager)
    return report
