"""Nets whose cheap functions save recipes, and their steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import BasicBlock

import fusedckpt
from fusedckpt.memory import saved_tensors

D, T, C = 16, 24, 6


class Diffusion(nn.Module):
    """A block of a diffusion transformer: modulated norms and gated branches."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(D, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(D, elementwise_affine=False)
        self.modulation, self.out = nn.Linear(D, 6 * D), nn.Linear(D, D)
        self.qkv = nn.Linear(D, 3 * D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        parts = self.modulation(F.silu(x.mean(1)))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + parts[0]) + parts[1])[:, None].chunk(3, -1)
        x = x + parts[2] * self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])
        h = self.norm2(x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * self.fc2(F.gelu(self.fc1(h), approximate="tanh"))


class PostNormMLP(nn.Module):
    """A block of BERT: dropout, and a norm behind the sum."""

    def __init__(self, p: float = 0.1):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.LayerNorm(D)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.norm(self.drop(self.fc2(F.gelu(self.fc1(x)))) + x)


class Rotary(nn.Module):
    """RMSNorm by hand, rotated queries, a gate, a softcap, and writes to slices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)
        self.q, self.gate, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        q = self.q(h)
        angle = torch.arange(T, dtype=x.dtype)[:, None]
        q = q * angle.cos() + torch.cat((-q[..., D // 2 :], q[..., : D // 2]), -1) * angle.sin()
        padded = torch.zeros_like(q)
        padded[:, 2:] = q[:, 2:]
        padded[:, :2] += 1
        h = self.out(padded * torch.sigmoid(self.gate(h)))
        return x + 30 * torch.tanh(h / 30)


def image() -> Tensor:
    return torch.randn(3, C, 7, 7)


def tokens() -> Tensor:
    return torch.randn(2, T, D)


class DenseBlock(nn.Module):
    """A block of a dense net, whose layers read all results before, and activations in place."""

    def __init__(self):
        super().__init__()
        widths = [C, C + 2, C + 4]
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.convs = nn.ModuleList(nn.Conv2d(width, 2, 3, padding=1) for width in widths)
        self.last = nn.Conv2d(C + 6, C, 1)

    def forward(self, x):
        parts = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            parts.append(conv(F.relu(norm(torch.cat(parts, 1)))))
        # autograd saves a copy of what silu writes over
        return F.silu(self.last(torch.cat(parts, 1)), inplace=True).mul_(1.5)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (partial(BasicBlock, C), image),
    "residual, not in place": (partial(BasicBlock, C, inplace=False), image),
    "dense": (DenseBlock, image),
    "diffusion": (Diffusion, tokens),
    "encoder": (PostNormMLP, tokens),
    "rotary": (Rotary, tokens),
}


def net(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, draw = NETS[name]
    return nn.Sequential(*[make() for _ in range(3)]).to(dtype), draw().to(dtype)


def with_recipes(model: nn.Module, **kinds: bool) -> nn.Module:
    """Return a copy that saves recipes, and is not fused otherwise."""
    off = dict.fromkeys(("norm", "mlp", "linear", "attention", "experts"), False)
    fused = copy.deepcopy(model)
    fusedckpt.fuse(fused, recompute_elementwise=True, **{**off, **kinds})
    return fused


def step(model: nn.Module, x: Tensor, call: Callable[..., Any] | None = None) -> list[Tensor]:
    """Return the result, all gradients, the buffers and a random number after a step."""
    model.zero_grad()
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    # as an intermediate
    y = (model if call is None else call)(x * 1)
    y.square().mean().backward()
    grads = [x.grad, *[p.grad for p in model.parameters()]]
    return [y.detach(), *grads, *[b.clone() for b in model.buffers()], torch.rand(1)]


def same(ours: list[Tensor], eager: list[Tensor]) -> None:
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a, b)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    with saved_tensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
        model(x.clone().requires_grad_() * 1)
    return saved.nbytes
