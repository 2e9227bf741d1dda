"""The classic workloads' models, in torch.nn alone, and their data: handwritten digits."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.model import Block, Rotary

__all__ = ["Images", "conv_net", "final_side", "images", "mlp", "scale", "stack"]

CLASSES = 10


def conv_net(layers: int, width: int) -> nn.Sequential:
    """Return the many-layered convolutional net for `[batch, 1, 28, 28]`, a child per layer.

    Two pixels of padding add two to either side, pooling halves: 30, 16, 9, 5, 3, and 2 for ever.
    """
    stem = nn.Conv2d(1, width, 3, padding=2)
    blocks = [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=2), nn.ReLU(), nn.MaxPool2d(2))
        for _ in range(layers)
    ]
    features = width * final_side(layers) ** 2
    head = nn.Sequential(nn.Flatten(), nn.Linear(features, CLASSES), nn.Linear(CLASSES, CLASSES))
    return nn.Sequential(stem, *blocks, head)


def final_side(layers: int) -> int:
    """Return the height and width of the last block's output: 2 from the fifth block on."""
    side = 28 + 2
    for _ in range(layers):
        side = (side + 2) // 2
    return side


def mlp(layers: int, width: int) -> nn.Sequential:
    """Return `layers` linears for `[batch, width]`, all but the last with ReLU, a child each."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers - 1)]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def stack(layers: int, dim: int, seq: int) -> nn.Sequential:
    """Return transformer blocks for `[batch, seq, dim]`, a child each."""
    rotary = Rotary(seq)
    return nn.Sequential(*(Block(dim, rotary, "gelu") for _ in range(layers)))


@torch.no_grad()
def scale(model: nn.Sequential, x: Tensor) -> None:
    """Scale every layer's weights so that its output on `x` has a mean square of one; no biases.

    Without it nothing of the input is left after a hundred layers, and no gradient in the first:
    the losses would agree whatever is computed (Mishkin and Matas, arXiv 1511.06422).
    """
    for layer in model:
        linears = [m for m in layer.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        for linear in linears:
            nn.init.zeros_(linear.get_parameter("bias"))
        linears[-1].weight.div_(layer(x).square().mean().sqrt())
        x = layer(x)


class Images(NamedTuple):
    """x `[n, 1, side, side]` of mean 0 and deviation 1, labels `[n]`, and where they come from."""

    x: Tensor
    labels: Tensor
    source: str

    def batches(self, count: int, size: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return `count` batches, from the start again where the images end."""
        rows = torch.arange(count * size) % len(self.x)
        return [
            (self.x[part].to(device), self.labels[part].to(device)) for part in rows.split(size)
        ]


def images(side: int, seed: int) -> Images:
    """Return scikit-learn's bundled digits, shuffled, where it is installed; else noise."""
    generator = torch.Generator().manual_seed(seed)
    if find_spec("sklearn") is None:
        labels = torch.randint(CLASSES, (2048,), generator=generator)
        x = torch.randn(2048, 1, side, side, generator=generator)
        return Images(x, labels, "generated noise (scikit-learn is not installed)")
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    small = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    order = torch.randperm(len(small), generator=generator)
    x = F.interpolate(small, size=(side, side), mode="bilinear")
    x = ((x - x.mean()) / x.std())[order]
    labels = torch.as_tensor(digits.target, dtype=torch.int64)[order]
    return Images(x, labels, f"scikit-learn's handwritten digits, 8 x 8 scaled to {side} x {side}")
