"""Models as libraries write them, with flags for what differs between tests.

A module that only one test is about stays beside that test, often as a subclass of one of these.
`test_names.py` finds modules of the tests that are equal, or have one name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class LlamaRMSNorm(nn.Module):
    """RMSNorm as transformers has it."""

    def __init__(self, features: int):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(features)), 1e-6

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden_states.dtype)


class MLP(nn.Module):
    """fc2(gelu(fc1(x)))."""

    def __init__(self, d: int, f: int, *, bias: bool = True, out: int | None = None):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, f, bias), nn.Linear(f, out or d, bias)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Intermediate(nn.Module):
    """A linear and its activation, a module or a function, as BERT and Swin V2 have it."""

    def __init__(self, d: int, f: int, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.dense, self.act = nn.Linear(d, f), act

    def forward(self, hidden_states):
        return self.act(self.dense(hidden_states))


class InlineMLP(nn.Module):
    """A layer with an MLP in its forward, as OPT and Whisper have it."""

    def __init__(self, d: int, f: int, act: Callable[[Tensor], Tensor], norm: nn.Module):
        super().__init__()
        self.norm, self.act = norm, act
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class SwiGLU(nn.Module):
    """Llama's MLP, down_proj(silu(gate_proj(x)) * up_proj(x)), with a function for its activation.

    down_bias: whether the last linear has a bias, if not as the others; linear: their class.
    """

    def __init__(
        self,
        d: int,
        f: int,
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        linear: type[nn.Linear] = nn.Linear,
    ):
        super().__init__()
        self.gate_proj, self.up_proj = linear(d, f, bias), linear(d, f, bias)
        self.down_proj = linear(f, d, bias if down_bias is None else down_bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GatedMLP(SwiGLU):
    """Llama's MLP with a module for its activation, as transformers has it."""

    def __init__(self, d: int, f: int):
        super().__init__(d, f)
        self.act_fn = nn.SiLU()

    def hidden(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        return self.down_proj(self.hidden(x))


class GEGLU(nn.Module):
    """diffusers' half of a gated MLP: gate and up from one linear, up first."""

    def __init__(self, d: int, f: int):
        super().__init__()
        self.proj = nn.Linear(d, 2 * f)

    def forward(self, x):
        up, gate = self.proj(x).chunk(2, dim=-1)
        return up * F.gelu(gate)


class XIELU(nn.Module):
    """An activation with a parameter and a buffer of one element."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(1)), nn.Buffer(torch.tensor(0.5))

    def forward(self, z):
        return torch.where(z > 0, F.softplus(self.alpha) * z * z, self.beta * torch.expm1(z))


class LoraLinear(nn.Module):
    """A frozen linear and a trainable branch of low rank beside it (arXiv 2106.09685)."""

    def __init__(self, base_layer: nn.Linear, r: int = 2):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, r, bias=False).to(base_layer.weight)
        self.lora_B = nn.Linear(r, base_layer.out_features, bias=False).to(base_layer.weight)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class OwnLinear(nn.Linear):
    """A linear with a forward of its own."""

    def forward(self, input):
        return super().forward(input) * 2


class OwnSequential(nn.Sequential):
    """A class of its own that adds nothing."""


class Doubled(nn.Module):
    """A parametrization: twice the weight."""

    def forward(self, weight):
        return 2 * weight


class Heads(nn.Module):
    """Self-attention of [..., tokens, d], whose subclasses attend.

    qk_norm: RMSNorm of queries and keys.
    """

    attend: Callable[..., Tensor]

    def __init__(self, d: int, heads: int = 1, *, qk_norm: bool = False):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads
        self.q_norm, self.k_norm = (
            nn.RMSNorm(d // heads) if qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        q, k, v = heads.transpose(-3, -2)
        y = self.attend(self.q_norm(q), self.k_norm(k), v)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Attention(Heads):
    """Self-attention by torch's function; dropout: of the probabilities."""

    def __init__(
        self,
        d: int,
        heads: int = 1,
        *,
        qk_norm: bool = False,
        is_causal: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__(d, heads, qk_norm=qk_norm)
        self.is_causal, self.dropout = is_causal, dropout

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=self.is_causal
        )


class Scan(nn.Module):
    """A gated scan in a loop of its own, which no function marks."""

    def __init__(self, d: int, dropout: float = 0.0):
        super().__init__()
        self.gate, self.drop = nn.Linear(d, d), nn.Dropout(dropout)

    def forward(self, x):
        gate, state = self.gate(x).sigmoid(), torch.zeros_like(x[:, 0])
        states = []
        for step in range(x.shape[1]):
            state = gate[:, step] * state + (1 - gate[:, step]) * x[:, step].sin()
            states.append(self.drop(state).tanh())
        return torch.stack(states, 1)


class MLPBlock(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self, norm: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def branch(self, x):
        return self.mlp(self.norm(x))

    def forward(self, x):
        return x + self.branch(x)


class DecoderLayer(nn.Module):
    """Attention, or another mixer of tokens, and an MLP, each behind a norm and with a residual."""

    def __init__(
        self,
        d: int,
        attention: nn.Module,
        mlp: nn.Module | None = None,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ):
        super().__init__()
        self.norm1, self.norm2 = norm(d), norm(d)
        mlp = mlp or nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.attention, self.mlp = attention, mlp

    def forward(self, x, **options):
        x = x + self.attention(self.norm1(x), **options)
        return x + self.mlp(self.norm2(x))


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions, with activations in place or not."""

    def __init__(self, channels: int, *, inplace: bool = True):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace)

    def forward(self, x):
        h = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        if self.act.inplace:
            h += x
        else:
            h = h + x
        return self.act(h)


class Residual(nn.Module):
    """Adds its input to the output of the modules inside."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Line(nn.Module):
    """Units in a ModuleList, each called with the result of the one before."""

    def __init__(self, *units: nn.Module):
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Checkpointed(nn.Module):
    """A module in a checkpoint, by torch's function or another one."""

    def __init__(self, module: nn.Module, run: Callable[..., Any] = checkpoint, **options: Any):
        super().__init__()
        self.module, self.run, self.options = module, run, options

    def forward(self, x):
        return self.run(self.module, x, **self.options)
