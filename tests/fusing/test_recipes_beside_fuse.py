"""Recipes of functions beside fused layers save no more than these alone, at any size."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from own_mlps import Written
from recipe_nets import D, saved_bytes, tokens
from torch import Tensor, nn
from zoo import InlineMLP

import fusedckpt
from fusedckpt.recipes import recipe_mode

# bytes that recipes may save above `fuse` alone
MOST = 256


class Long(nn.Module):
    """A sequence of more functions than recipes alone run again."""

    def forward(self, x):
        for _ in range(9):
            x = x + torch.sin(x) * 0.1
        return x


class LearnedSnake(nn.Module):
    """An activation with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4 * D))
        self.register_buffer("shift", torch.zeros(4 * D))

    def forward(self, x):
        return x + torch.sin(self.a * x + self.shift) ** 2 / self.a


class JoinedMLP(InlineMLP):
    """With a gate, or with more layers."""

    def __init__(self, act: nn.Module, norm: nn.Module, join: str):
        super().__init__(D, 4 * D, act, norm)
        self.join, self.gate = join, nn.Linear(D, 4 * D)

    def forward(self, x):
        n = self.norm(x)
        h = self.act(self.fc1(n))
        if self.join == "gate":
            h = h * self.gate(n)
        else:
            h = self.act(self.fc1(F.gelu(self.fc2(h))))
        return x + self.fc2(h)


def hooked(layer: InlineMLP) -> InlineMLP:
    """Return a layer with hooks, which may gather parameters for a call alone."""
    layer.fc2.register_forward_hook(lambda *_: None)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "written": lambda: InlineMLP(D, 4 * D, Written(), nn.LayerNorm(D)),
    "long": lambda: InlineMLP(D, 4 * D, Long(), nn.LayerNorm(D)),
    "snake": lambda: InlineMLP(D, 4 * D, LearnedSnake(), nn.RMSNorm(D)),
    "prelu": lambda: InlineMLP(D, 4 * D, nn.PReLU(), nn.LayerNorm(D)),
    "identity": lambda: InlineMLP(D, 4 * D, nn.Identity(), nn.LayerNorm(D)),
    "in place": lambda: InlineMLP(D, 4 * D, nn.SiLU(inplace=True), nn.LayerNorm(D)),
    "dropout": lambda: InlineMLP(D, 4 * D, nn.Dropout(0.3), nn.LayerNorm(D)),
    "gated": lambda: JoinedMLP(Written(), nn.LayerNorm(D), "gate"),
    "more layers": lambda: JoinedMLP(Written(), nn.LayerNorm(D), "more layers"),
    "hooked": lambda: hooked(InlineMLP(D, 4 * D, Written(), nn.LayerNorm(D))),
    "hooked, gated": lambda: hooked(JoinedMLP(nn.SiLU(), nn.RMSNorm(D), "gate")),
}


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    model(x * 1).square().mean().backward()
    return [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("floor", [0, D * 4 * 8, 1 << 30])
@pytest.mark.parametrize("save", ["inputs", "preact"])
@pytest.mark.parametrize("name", LAYERS)
def test_saved_bytes(name, save, floor, monkeypatch, request):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", floor)
    if floor:
        # which modules are swapped does not depend on it
        request.getfixturevalue("unverified")
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[name](), LAYERS[name]())
    fused, both = copy.deepcopy(model), copy.deepcopy(model)
    fusedckpt.fuse(fused, save=save)
    fusedckpt.fuse(both, save=save, recompute_elementwise=True)
    x = tokens()
    assert saved_bytes(both, x) <= saved_bytes(fused, x) + MOST
    for ours, expected in zip(step(both, x), step(fused, x), strict=True):
        torch.testing.assert_close(ours, expected)
