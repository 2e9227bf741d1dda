"""Layers as models write them, of classes of their own: `fuse` finds them by their structure."""

import torch
from torch import nn


class LlamaRMSNorm(nn.Module):
    """As transformers has it."""

    def __init__(self, features: int):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(features)), 1e-6

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden_states.dtype)


class SwiGLU(nn.Module):
    """Llama's MLP, with a function for its activation."""

    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))
