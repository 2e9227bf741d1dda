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


class LoraLinear(nn.Module):
    """What adapters put in a linear's place."""

    def __init__(self, base_layer, r=2):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, r, bias=False).to(base_layer.weight)
        self.lora_B = nn.Linear(r, base_layer.out_features, bias=False).to(base_layer.weight)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))
