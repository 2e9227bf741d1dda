"""Weights that other code computes: pruned ones, parametrizations, weight and spectral norms."""

import copy

import pytest
import torch
from support import DEVICE, randn
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from zoo import Attention

from fusedckpt import fuse

D = 16


class SquashedWeight(nn.Module):
    """Computes a weight by an activation, so that it looks like an MLP with its parameter."""

    def forward(self, weight):
        return 1.5 * weight + weight.tanh()


WAYS = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "activation": lambda layer: parametrize.register_parametrization(
        layer, "weight", SquashedWeight()
    ),
    "weight norm": parametrizations.weight_norm,
    "old weight norm": weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old spectral norm": spectral_norm,
}


def net():
    mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    image = nn.Unflatten(-1, (1, D)), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(nn.RMSNorm(D), Attention(D), mlp, *image, nn.Conv2d(4, 1, 1))


def layers_of(model):
    """Return every second layer with a weight, and the others."""
    layers = [m for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)]
    return layers[::2], layers[1::2]


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(("when", "part"), [("before fuse", 0), ("after a step", 1)])
@pytest.mark.parametrize("way", WAYS)
def test_layers_of_which_other_code_computes_the_weight(way, when, part):
    torch.manual_seed(0)
    eager = net().to(DEVICE, torch.float64)
    model = copy.deepcopy(eager)
    x = randn(2, 3, D, dtype=torch.float64)
    if when == "after a step":
        fuse(model)
        model(x).sum().backward()
        eager(x)
    for each in (eager, model):
        torch.manual_seed(1)
        each.zero_grad()
        for layer in layers_of(each)[part]:
            if layer.weight.dim() > 1 or way in ("pruned", "activation"):
                WAYS[way](layer)
    if when == "before fuse":
        fuse(model)
    for _ in range(2):
        results = []
        for each in (model, eager):
            y = each(x)
            grads = torch.autograd.grad(y.square().sum(), [*each.parameters()])
            results.append((y, grads))
        torch.testing.assert_close(*results)
