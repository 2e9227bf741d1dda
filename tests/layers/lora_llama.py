"""A small Llama with an adapter on every linear: as peft runs it, and by our functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lora_cases import peft_linear
from torch import Tensor, nn

from fusedckpt import LoRA, NormSpec, functional

HEADS = 4


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the position."""
    t, d = x.shape[-2:]
    angles = torch.outer(torch.arange(t), 1e4 ** -(torch.arange(0, d, 2) / d)).to(x.device)
    cos, sin = (torch.cat([fn(angles)] * 2, -1).to(x.dtype) for fn in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Adapted(nn.Module):
    """peft's lora.Linear."""

    def __init__(self, n: int, k: int, rank: int, dropout: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) / k**0.5, requires_grad=False)
        self.A = nn.Parameter(torch.randn(rank, k) / k**0.5)
        self.B = nn.Parameter(torch.randn(n, rank) / n**0.5)
        self.dropout = dropout

    def record(self) -> LoRA:
        return LoRA(self.weight, self.A, self.B, 2.0, self.dropout if self.training else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return peft_linear(x, self.record())
        low = F.linear(F.dropout(x, self.dropout), self.A)
        return F.linear(x, self.weight) + F.linear(low, self.B) * 2.0


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm; `save` None for torch's own code."""

    def __init__(self, d: int, f: int, rank: int, save: str | None, dropout: float):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(d, 1e-6) for _ in range(2)]).requires_grad_(False)
        self.qkv = nn.ModuleList([Adapted(d, d, rank, dropout) for _ in range(3)])
        self.o = Adapted(d, d, rank, dropout)
        sizes = (f, d), (f, d), (d, f)
        self.mlp = nn.ModuleList([Adapted(*size, rank, dropout) for size in sizes])
        self.save = save

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.save is None:
            n = self.norms[0](x)
            x = x + self.o(self.attend(*(linear(n) for linear in self.qkv)))
            gate, up, down = self.mlp
            n = self.norms[1](x)
            return x + down(F.silu(gate(n)) * up(n))
        first, second = (NormSpec("rms", norm.weight, None, norm.eps) for norm in self.norms)
        qkv: Any = [linear.record() for linear in self.qkv]
        attended = self.attend(*functional.norm_linear(x, first, qkv))
        x = x + functional.linear_act(attended, self.o.record(), activation=None)
        weights = [linear.record() for linear in self.mlp]
        return functional.gated_mlp(x, *weights, norm=second, residual=True, save=self.save)


def llama(
    save: str | None, d: int = 256, f: int = 688, rank: int = 8, layers: int = 2, dropout: float = 0
) -> nn.Sequential:
    """Layers of equal weights whatever `save`."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(d, f, rank, save, dropout) for _ in range(layers)))
