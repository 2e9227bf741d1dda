"""Recipes of layers have the options and parameters of the call; code changes them later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import DEVICE, saved_bytes
from test_shared_channels import SIDE, C, N, conv, same, trained
from torch import nn
from torch.nn import functional as F_

import fusedckpt

pytestmark = pytest.mark.usefixtures("any_size")

Change = Callable[[Any], object]


def sets(**options: Any) -> Change:
    def change(layer: Any) -> None:
        for name, value in options.items():
            setattr(layer, name, value)

    return change


@torch.no_grad()
def writes_bias(layer: nn.BatchNorm2d) -> None:
    layer.bias.fill_(3)


@torch.no_grad()
def runs_in_training(layer: nn.BatchNorm2d) -> None:
    layer.train()(torch.ones_like(layer.weight).expand(N, C)[..., None, None])
    layer.eval()


def replaces_weight(layer: nn.BatchNorm2d) -> None:
    layer.weight = nn.Parameter(3 * layer.weight.detach())


# a layer, and how code changes it
LAYERS: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "leaky relu": (lambda: nn.LeakyReLU(0.1), sets(negative_slope=0.9)),
    "leaky relu in place": (lambda: nn.LeakyReLU(0.1, inplace=True), sets(negative_slope=0.9)),
    "elu": (lambda: nn.ELU(0.5), sets(alpha=2.0)),
    "celu": (lambda: nn.CELU(0.5), sets(alpha=2.0)),
    "selu": (nn.SELU, sets(inplace=True)),
    "softplus": (nn.Softplus, sets(beta=3.0, threshold=0.5)),
    "hardtanh": (nn.Hardtanh, sets(min_val=-0.1, max_val=0.2)),
    "relu6": (lambda: nn.Sequential(nn.BatchNorm2d(C), nn.ReLU6()), sets(max_val=1.0)),
    "gelu": (nn.GELU, sets(approximate="tanh")),
    "average": (
        lambda: nn.AvgPool2d(3, 1, 1),
        sets(kernel_size=2, stride=1, padding=0, count_include_pad=False, divisor_override=2),
    ),
    "batch norm": (lambda: nn.BatchNorm2d(C), sets(eps=1.0, momentum=0.9)),
    "group norm": (lambda: nn.GroupNorm(2, C), sets(eps=1.0, num_groups=1)),
    "weight": (lambda: nn.BatchNorm2d(C), replaces_weight),
    "bias": (lambda: nn.BatchNorm2d(C), writes_bias),
    "evaluation": (lambda: nn.BatchNorm2d(C), lambda layer: layer.eval()),
    "training": (lambda: nn.BatchNorm2d(C).eval(), lambda layer: layer.train()),
    "statistics": (lambda: nn.BatchNorm2d(C).eval(), runs_in_training),
    "dropout": (lambda: nn.Sequential(nn.SiLU(), nn.Dropout(0.2)), lambda m: sets(p=0.7)(m[1])),
    "padding": (
        lambda: nn.Sequential(nn.SiLU(), conv()),
        lambda m: sets(padding_mode="reflect")(m[1]),
    ),
}
# changes in the forward after which a result is saved, as in eager
SAVED = "bias", "statistics"
CASES = [(name, in_forward) for name in LAYERS for in_forward in (True, False)]
# a recipe reads the bias as it is, and raises where it was written since
CASES.remove(("bias", False))


class ChangesLayer(nn.Module):
    """Code between a layer and its readers, a convolution and a sum, changes the layer."""

    def __init__(self, layer: nn.Module, change: Change):
        super().__init__()
        self.first, self.layer, self.conv, self.last = conv(), layer, conv(), conv()
        self.act = nn.SiLU()
        self.change = change
        self.in_forward = True

    def forward(self, x):
        h = self.layer(self.first(x))
        if self.in_forward:
            self.change(self.layer)
        return self.last(self.act(self.conv(h) + h))


@pytest.mark.parametrize(("name", "in_forward"), CASES)
def test_layer_that_changes_between_its_call_and_backward(name, in_forward):
    layer, change = LAYERS[name]
    torch.manual_seed(0)
    eager = ChangesLayer(layer(), change).to(DEVICE, torch.float64)
    eager.in_forward = in_forward
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE, dtype=torch.float64)
    sizes = [saved_bytes(copy.deepcopy(m), [x]) for m in (ours, eager)]
    assert sizes[0] < sizes[1] or (in_forward and name in SAVED)
    values = []
    for model in (ours, eager):
        torch.manual_seed(1)
        y = model(x)
        if not in_forward:
            change(model.layer)
        y.square().mean().backward()
        values.append([y.detach(), *(p.grad for p in model.parameters()), *model.buffers()])
    same(*values)


def test_dropout_with_a_mask_of_one_byte(monkeypatch):
    """CUDA's dropout saves its mask alone; the scale is that of the call."""

    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0]

    monkeypatch.setattr(F_, "dropout", dropout)
    torch.manual_seed(0)
    layer = nn.Sequential(nn.SiLU(), nn.Dropout(0.2))
    eager = ChangesLayer(layer, lambda m: sets(p=0.7)(m[1])).to(DEVICE)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    assert saved_bytes(copy.deepcopy(ours), [x]) < saved_bytes(copy.deepcopy(eager), [x])
    same(trained(ours, x, 1), trained(eager, x, 1))
