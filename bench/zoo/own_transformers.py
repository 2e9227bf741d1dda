"""Blocks of transformers as people write them in repositories of their own, in words of ours."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.zoo.model import HEADS, TOKENS, D, Inputs, Model
from bench.zoo.own_stack import OWN, owned

WIDE = 4 * D
# the side of a picture of tokens, and of its windows
SIDE = 8
WINDOW = 4
PAIR = torch.Size((2, TOKENS, D))
# tokens that ask for masks
PROMPTS = 8


def split_heads(x: Tensor) -> Tensor:
    """Return the heads of [B, T, D] as [B, heads, T, D / heads]."""
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """Return [B, T, D] of heads."""
    return x.transpose(1, 2).reshape(len(x), -1, D)


class SelfAttention(nn.Module):
    """Attention by torch's function, with one matrix for queries, keys and values."""

    def __init__(self, is_causal: bool = False):
        super().__init__()
        self.is_causal = is_causal
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(split_heads, self.c_attn(x).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.c_proj(merged(y))


class WrittenAttention(nn.Module):
    """Attention as two products and a softmax, with a bias of positions or none."""

    def __init__(self, num_positions: int = 0):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.bias = nn.Parameter(torch.zeros(HEADS, num_positions, num_positions))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(split_heads, self.qkv(x).chunk(3, dim=-1))
        weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if self.bias.numel():
            weights = weights + self.bias
        return self.proj(merged(weights.softmax(dim=-1) @ v))


class PlainMLP(nn.Module):
    """An MLP of its own class."""

    def __init__(self, act: nn.Module):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, WIDE), act, nn.Linear(WIDE, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class NormWithoutBias(nn.Module):
    """A LayerNorm with or without a bias."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(D)), None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class GPTBlock(nn.Module):
    """As nanoGPT's."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = NormWithoutBias(), SelfAttention(True), NormWithoutBias()
        self.mlp = PlainMLP(nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def rms(x: Tensor) -> Tensor:
    """Normalise the last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor) -> Tensor:
    """Rotate pairs of channels by the position."""
    half = x.shape[-1] // 2
    speeds = 1000 ** -torch.linspace(0, 1, half, device=x.device)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class ChatAttention(nn.Module):
    """Attention with rotary positions and norms of queries and keys, without parameters."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(linear(x)) for linear in (self.q, self.k, self.v))
        q, k = rms(rotated(q)), rms(rotated(k))
        return self.proj(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class SquaredMLP(nn.Module):
    """An MLP with a squared ReLU."""

    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(D, WIDE, False), nn.Linear(WIDE, D, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class ChatBlock(nn.Module):
    """As nanochat's: norms are functions."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = ChatAttention(), SquaredMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(rms(x))
        return x + self.mlp(rms(x))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale the channels."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """As DiT's: norms that a condition modulates, and gates."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.attn, self.mlp = SelfAttention(), PlainMLP(nn.GELU(approximate="tanh"))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.ada(x.mean(dim=1)).chunk(6, dim=1)
        y = self.attn(modulated(self.norm1(x), parts[0], parts[1]))
        x = x + parts[2].unsqueeze(1) * y
        y = self.mlp(modulated(self.norm2(x), parts[3], parts[4]))
        return x + parts[5].unsqueeze(1) * y


class WindowBlock(nn.Module):
    """As Swin's: attention in shifted windows, with a bias."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.mlp = WrittenAttention(WINDOW**2), PlainMLP(nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        num, tokens, _ = x.shape
        count = SIDE // WINDOW
        y = torch.roll(self.norm1(x).view(num, SIDE, SIDE, D), (-2, -2), dims=(1, 2))
        y = y.view(num, count, WINDOW, count, WINDOW, D).permute(0, 1, 3, 2, 4, 5)
        y = self.attn(y.reshape(-1, WINDOW**2, D))
        y = y.view(num, count, count, WINDOW, WINDOW, D).permute(0, 1, 3, 2, 4, 5)
        y = torch.roll(y.reshape(num, SIDE, SIDE, D), (2, 2), dims=(1, 2))
        x = x + y.view(num, tokens, D)
        return x + self.mlp(self.norm2(x))


class CLIPBlock(nn.Module):
    """As open_clip's: torch's attention module, and an MLP in a Sequential of names."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        layers = {"c_fc": nn.Linear(D, WIDE), "gelu": nn.GELU(), "c_proj": nn.Linear(WIDE, D)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        n = self.ln_1(x)
        x = x + self.attn(n, n, n, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class LayerScale(nn.Module):
    """A factor for each channel."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((D,), 1e-1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PackedSwiGLU(nn.Module):
    """A gated MLP with one matrix for gate and up."""

    def __init__(self):
        super().__init__()
        self.w12, self.w3 = nn.Linear(D, 2 * WIDE), nn.Linear(WIDE, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class DINOBlock(nn.Module):
    """As DINOv2's: layer scales, and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.mlp = SelfAttention(), PackedSwiGLU()
        self.ls1, self.ls2 = LayerScale(), LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class SAMBlock(nn.Module):
    """As SAM's: attention with a bias, the MLP in the block, and a norm over channels behind."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = WrittenAttention(TOKENS)
        self.lin1, self.lin2, self.act = nn.Linear(D, WIDE), nn.Linear(WIDE, D), nn.GELU
        self.neck = ChannelNorm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.lin2(self.act()(self.lin1(self.norm2(x))))
        return self.neck(x.transpose(1, 2).unflatten(2, (SIDE, SIDE))).flatten(2).transpose(1, 2)


class ChannelNorm(nn.Module):
    """A LayerNorm over the channels of a picture [B, D, H, W]."""

    def __init__(self, width: int = D):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        spread = torch.sqrt(centred.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * (centred / spread) + self.bias[:, None, None]


class SpeechAttention(nn.Module):
    """Attention of queries to another sequence, with a softmax in float32."""

    def __init__(self):
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(D, D) for _ in range(3))
        self.key = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        scale = (D // HEADS) ** -0.25
        weights = (split_heads(q) * scale) @ (split_heads(k) * scale).transpose(-1, -2)
        weights = F.softmax(weights.float(), dim=-1).to(q.dtype)
        return self.out(merged(weights @ split_heads(v)))


class SpeechBlock(nn.Module):
    """As Whisper's decoder: attention to itself and to a sequence of sound."""

    def __init__(self):
        super().__init__()
        self.attn_ln, self.cross_ln, self.mlp_ln = (nn.LayerNorm(D) for _ in range(3))
        self.attn, self.cross = SpeechAttention(), SpeechAttention()
        self.mlp = nn.Sequential(nn.Linear(D, WIDE), nn.GELU(), nn.Linear(WIDE, D))

    def forward(self, x: Tensor) -> Tensor:
        sound = x
        x = x + self.attn(self.attn_ln(x))
        x = x + self.cross(self.cross_ln(x), sound)
        return x + self.mlp(self.mlp_ln(x))


def written_gelu(x: Tensor) -> Tensor:
    """Return gelu(x), written out."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class ProteinAttention(nn.Module):
    """Attention with rotary positions, by batched products."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
        q, k = rotated(q * q.shape[-1] ** -0.5), rotated(k)
        weights = torch.bmm(q, k.transpose(1, 2))
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).type_as(weights)
        return self.out_proj(merged(torch.bmm(weights, v).view(len(x), HEADS, -1, D // HEADS)))


class ProteinBlock(nn.Module):
    """As ESM-2's: the MLP is written in the block, with a gelu of its own."""

    def __init__(self):
        super().__init__()
        self.self_attn = ProteinAttention()
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.fc1, self.fc2 = nn.Linear(D, WIDE), nn.Linear(WIDE, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(written_gelu(self.fc1(self.final_layer_norm(x))))


class ScaledNorm(nn.Module):
    """A norm by length."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * D**0.5 * (self.g + 1)


class GatedLinear(nn.Module):
    """A linear: its second half is the gate of its first."""

    def __init__(self):
        super().__init__()
        self.proj, self.act = nn.Linear(D, 2 * WIDE), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.act(gate)


class EinsumAttention(nn.Module):
    """Attention by torch.einsum, with a gate on its result."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.to_gate, self.to_out = nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(linear(x)) for linear in (self.to_q, self.to_k, self.to_v))
        weights = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).type(q.dtype)
        y = merged(torch.einsum("bhij,bhjd->bhid", weights, v))
        return self.to_out(y * self.to_gate(x).sigmoid())


class XBlock(nn.Module):
    """As x-transformers' with gates and norms by length."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attn = ScaledNorm(), ScaledNorm(), EinsumAttention()
        self.ff = nn.Sequential(GatedLinear(), nn.Dropout(0.0), nn.Linear(WIDE, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


class NormedAttention(nn.Module):
    """Attention that begins with its norm, and has a module for its softmax."""

    def __init__(self):
        super().__init__()
        self.norm, self.attend, self.dropout = nn.LayerNorm(D), nn.Softmax(-1), nn.Dropout(0.0)
        self.to_qkv = nn.Linear(D, 3 * D, bias=False)
        self.to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(split_heads, self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        weights = self.attend(torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5)
        return self.to_out(merged(torch.matmul(self.dropout(weights), v)))


class ViTBlock(nn.Module):
    """As in collections of vision transformers: norms inside of attention and MLP."""

    def __init__(self):
        super().__init__()
        self.attn = NormedAttention()
        layers = nn.LayerNorm(D), nn.Linear(D, WIDE), nn.GELU(), nn.Dropout(0.0)
        self.ff = nn.Sequential(*layers, nn.Linear(WIDE, D), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x) + x
        return self.ff(x) + x


class ReducedAttention(nn.Module):
    """Attention of queries to keys and values of others, at half the width."""

    def __init__(self, inner: int = D // 2):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, inner) for _ in range(3))
        self.out_proj = nn.Linear(inner, D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        y = F.scaled_dot_product_attention(split_heads(q), split_heads(k), split_heads(v))
        return self.out_proj(y.transpose(1, 2).flatten(2))


class TwoWayBlock(nn.Module):
    """As of SAM 2's mask decoder: prompts read themselves and a picture, which then reads them."""

    def __init__(self):
        super().__init__()
        self.self_attn = ReducedAttention(D)
        self.to_picture, self.to_prompts = ReducedAttention(), ReducedAttention()
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(D) for _ in range(4))
        self.mlp = PlainMLP(nn.ReLU())

    def forward(
        self, prompts: Tensor, picture: Tensor, prompts_pe: Tensor, picture_pe: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = prompts + prompts_pe
        prompts = self.norm1(prompts + self.self_attn(q, q, prompts))
        q, k = prompts + prompts_pe, picture + picture_pe
        prompts = self.norm2(prompts + self.to_picture(q, k, picture))
        prompts = self.norm3(prompts + self.mlp(prompts))
        q = prompts + prompts_pe
        return prompts, self.norm4(picture + self.to_prompts(k, q, prompts))


class TwoWayTransformer(nn.Module):
    """Two such blocks, and the prompts' last attention to the picture."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(PROMPTS, D))
        self.pe: Tensor
        self.register_buffer("pe", torch.randn(1, TOKENS, D))
        self.layers = nn.ModuleList([TwoWayBlock(), TwoWayBlock()])
        self.attn, self.norm, self.neck = ReducedAttention(), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        picture = self.neck(x)
        first = prompts = self.tokens.expand(len(x), -1, -1)
        for layer in self.layers:
            prompts, picture = layer(prompts, picture, first, self.pe)
        attended = self.attn(prompts + first, picture + self.pe, picture)
        return self.norm(prompts + attended), picture


def two_way(parts: int) -> tuple[nn.Module, Inputs]:
    """Return a two-way transformer and its picture."""
    return TwoWayTransformer(), {"x": torch.randn(PAIR)}


_tokens = partial(owned, PAIR)
OWN_TRANSFORMERS: Mapping[str, Model] = {
    "nanogpt": _tokens(GPTBlock),
    "nanochat": _tokens(ChatBlock),
    "dit": _tokens(DiTBlock),
    "swin": _tokens(WindowBlock),
    "clip": _tokens(CLIPBlock),
    "dinov2": _tokens(DINOBlock),
    "sam": _tokens(SAMBlock),
    "whisper": _tokens(SpeechBlock),
    "esm2": _tokens(ProteinBlock),
    "xtransformers": _tokens(XBlock),
    "vit": _tokens(ViTBlock),
    "two_way": Model(OWN, "torch", 0, two_way),
}
