"""Models whose plans have segments of several units, and what is compared of them."""

import copy

import torch
from torch import nn

import fusedckpt


def planned(model, *args, policy="uniform:2", **options):
    return fusedckpt.plan(model, *args, policy=policy, progress=False, **options)


class Line(nn.Module):
    """Units in a ModuleList, each called with what the one before returned."""

    def __init__(self, *units):
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x


def line(count, width=32):
    return Line(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def unequal(count=13):
    """Every fourth unit keeps four times as much as the first."""
    sizes = [64 * (1 + i % 4) for i in range(count)]
    return Line(*(nn.Sequential(nn.Linear(64, n), nn.GELU(), nn.Linear(n, 64)) for n in sizes))


def step(model, *args, seed=1, **kwargs):
    """Return the loss and every gradient of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(*args, **kwargs).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def twin_of(model, *args, **kwargs):
    """Return the model planned, and a copy that is not."""
    plain = copy.deepcopy(model)
    return planned(model, *args, **kwargs).apply(model), plain
