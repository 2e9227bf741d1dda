"""A plain byte-level decoder-only transformer, written with torch.nn alone.

Nothing here knows of fusedckpt: it is what a user has before `fusedckpt.fuse(model)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["HEAD_DIM", "VOCAB", "Block", "GatedMLP", "Transformer"]

VOCAB = 256
HEAD_DIM = 64


class Rotary(nn.Module):
    """Rotary positions (Su et al., arXiv:2104.09864) for `[batch, heads, seq, HEAD_DIM]`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq: int, base: float = 10_000.0):
        super().__init__()
        frequency = base ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = torch.outer(torch.arange(seq), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate every head by its position."""
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-right, left), dim=-1) * self.sin


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, dim: int, rotary: Rotary):
        super().__init__()
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every position to itself and those before it."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202), its children named as Llama's are.

    Two thirds of the plain MLP's width, so that both have as many parameters.
    """

    def __init__(self, dim: int):
        super().__init__()
        hidden = 64 * math.ceil(8 * dim / 3 / 64)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., dim]` to itself."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def plain_mlp(dim: int) -> nn.Sequential:
    """GPT-2's MLP."""
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


MLPS: dict[str, Callable[[int], nn.Module]] = {"gelu": plain_mlp, "swiglu": GatedMLP}


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, dim: int, rotary: Rotary, mlp: str):
        super().__init__()
        self.attn_norm = nn.RMSNorm(dim)
        self.attn = Attention(dim, rotary)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = MLPS[mlp](dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, seq, dim]` to itself."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Bytes in, next-byte logits out; with `checkpointing` every block is a torch checkpoint.

    mlp: "gelu" or "swiglu".
    """

    def __init__(self, layers: int, dim: int, seq: int, mlp: str = "gelu"):
        super().__init__()
        self.checkpointing = False
        rotary = Rotary(seq)
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, rotary, mlp) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Initialise as GPT-2 does: what feeds the residual stream shrinks with the depth.

        The embedding stays as nn.Embedding made it: started small, it learns much slower.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2 and name != "embedding.weight":
                last = ("o_proj.weight", "mlp.2.weight", "down_proj.weight")
                feeds_residual = name.endswith(last)
                scale = 1 / math.sqrt(2 * len(self.blocks)) if feeds_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `[batch, seq]` to logits `[batch, seq, VOCAB]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))
