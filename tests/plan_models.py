"""Small models that plans are tested on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from support import assert_near
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fusedckpt
from fusedckpt import plan
from fusedckpt.functional import gated_mlp


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.out, self.dropout = nn.Linear(dim, dim), nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, layers: int = 12, dim: int = 64, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(128, dim)
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 128)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask=mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def assert_as_near(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor]) -> None:
    """Assert the error rule, where chunks add up weight gradients in another order."""
    for mine, eager, exact in zip(ours, theirs, truth, strict=True):
        assert_near(mine, eager, exact)


def transformer(layers: int = 12, *, fused: bool = False, dropout: float = 0.0) -> nn.Module:
    model = Transformer(layers, dropout=dropout)
    if fused:
        fusedckpt.fuse(model)
    return model


def tokens() -> Tensor:
    return torch.randint(128, (4, 64))


def convolutional(blocks: int = 10, *, flat: bool = False, inplace: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=2)]
    for _ in range(blocks):
        block = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace)
        layers += block if flat else [nn.Sequential(*block)]
    return nn.Sequential(*layers, nn.MaxPool2d(6), nn.Flatten(), nn.Linear(400, 10))


def images() -> Tensor:
    return torch.randn(16, 1, 28, 28)


class Chain(nn.Module):
    """Units in a ModuleList, called in the order given by `order`, with code between them."""

    def __init__(self, units: list[nn.Module], order: list[int] | None = None):
        super().__init__()
        self.units = nn.ModuleList(units)
        self.order = order or list(range(len(units)))

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            if self.training or i % 2:
                x = self.units[i](x).tanh() + x
        return x


class Pair(nn.Module):
    """Takes and returns a tuple, and a keyword."""

    def __init__(self, dim: int):
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Dropout(0.2)

    def forward(self, both: tuple[Tensor, Tensor], *, scale: float) -> tuple[Tensor, Tensor]:
        a, b = both
        a = self.a(a).relu() * scale
        return a, self.dropout(self.b(b)) + a


class Pairs(nn.Module):
    def __init__(self, dim: int = 64):
        super().__init__()
        self.units = nn.ModuleList(Pair(dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pair = x, x * 2
        for unit in self.units:
            pair = unit(pair, scale=2.0)
        return pair[0] + pair[1]


class Noted(nn.Module):
    """Units that write tensors into a dict, which all get, and a sum of these."""

    def __init__(self, units: Iterable[nn.Module]):
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x: Tensor) -> Tensor:
        notes: dict[Any, Tensor] = {}
        for unit in self.units:
            x = unit(x, notes)
        return x + sum(notes.values())


class PackedBlock(nn.Module):
    """A residual block whose gate and up are one weight."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.first = nn.Parameter(torch.randn(2 * hidden, dim) / dim**0.5)
        self.last = nn.Parameter(torch.randn(dim, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(x, self.first, None, self.last, residual=True).tanh()


def planned(model, *args, **options):
    return plan(model, *args, progress=False, **options)


def units_of(found):
    return [unit.name for unit in found.chain.units]


def step(model, *args, seed=1, **kwargs):
    """Return the loss and every gradient of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(*args, **kwargs)
    output = getattr(output, "loss", output)
    loss = output.square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def assert_as_planned(
    model: nn.Module,
    x: Tensor,
    policy: str,
    loss: Callable[[Any], Tensor] = mean_square,
    most: float = 1.03,
) -> fusedckpt.Plan:
    """Assert that a plan predicts its peak, and leaves results and gradients as they are."""

    def one_step() -> list[Tensor]:
        model.zero_grad()
        output = model(x)
        loss(output).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [*(y.detach() for y in tree_leaves(output) if isinstance(y, Tensor)), *grads]

    found = planned(model, x, policy=policy, loss=loss)
    assert_predicted(found, most)
    expected = one_step()
    found.apply(model)
    assert_equal(one_step(), expected)
    found.undo()
    model.zero_grad()
    return found


def assert_predicted(found, most=1.03):
    # the budget itself is held to by what was measured
    assert 0.99 * found.measured_bytes <= found.predicted_bytes <= most * found.measured_bytes


def count_calls(module: nn.Module) -> Iterator[int]:
    """Return a counter of a module's calls, which `next` reads; a plan would put a list back."""
    calls = itertools.count()

    def count(*_: Any) -> None:
        next(calls)

    module.register_forward_hook(count)
    return calls
