"""Models written with torch.nn alone, as a user has them before `fusedckpt.fuse`; int8 weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from fusedckpt import register_quantized

VOCAB = 256
HEAD_DIM = 64
CLASSES = 10


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


def _plain_mlp(dim: int) -> nn.Sequential:
    """GPT-2's MLP."""
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, dim: int, rotary: Rotary, mlp: str = "gelu"):
        super().__init__()
        self.attn_norm = nn.RMSNorm(dim)
        self.attn = Attention(dim, rotary)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = GatedMLP(dim) if mlp == "swiglu" else _plain_mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, seq, dim]` to itself."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Bytes in, next-byte logits out; mlp: "gelu" or "swiglu"."""

    def __init__(self, layers: int, dim: int, seq: int, mlp: str = "gelu"):
        super().__init__()
        rotary = Rotary(seq)
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, rotary, mlp) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Initialize as GPT-2 does: weights that feed the residual stream shrink with the depth.

        The embedding stays as nn.Embedding made it: started small, it learns much slower.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2 and name != "embedding.weight":
                last = ("o_proj.weight", "mlp.2.weight", "down_proj.weight")
                scale = (2 * len(self.blocks)) ** -0.5 if name.endswith(last) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `[batch, seq]` to logits `[batch, seq, VOCAB]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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
    return nn.Sequential(*(Block(dim, rotary) for _ in range(layers)))


@torch.no_grad()
def scale(model: nn.Sequential, x: Tensor) -> None:
    """Scale every layer's weights so that its output on `x` has a mean square of one; no biases.

    Without it nothing of the input is left after a hundred layers, and no gradient in the first:
    the losses would agree for any computation (Mishkin and Matas, arXiv 1511.06422).
    """
    for layer in model:
        linears = [m for m in layer.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        for linear in linears:
            nn.init.zeros_(linear.get_parameter("bias"))
        linears[-1].weight.div_(layer(x).square().mean().sqrt())
        x = layer(x)


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default)


class Int8(Tensor):
    """A frozen matrix [N, K] in int8, times a scale [N, 1]; every op sees it dense.

    It stands for the weights of quantization libraries.
    """

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Int8:
        """Make a tensor of their shape without memory of its own."""
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, dtype=scale.dtype, device=numbers.device
        )

    def __init__(self, numbers: Tensor, scale: Tensor):
        self.numbers = numbers
        self.scale = scale

    @classmethod
    def of(cls, dense: Tensor) -> Int8:
        """Quantize a matrix by the largest number of every row."""
        scale = dense.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
        return cls((dense / scale).round().to(torch.int8), scale)

    def dequantize(self) -> Tensor:
        """Return the dense matrix."""
        return self.numbers.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Int8:
        return Int8(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME:
            return cls(func(args[0].numbers), func(args[0].scale))
        args, kwargs = tree_map_only(Int8, Int8.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


register_quantized(Int8, Int8.dequantize)


def quantize(model: nn.Module) -> nn.Module:
    """Quantize the weight of every linear but the head, and return the model."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not name.endswith("head"):
            module.weight = nn.Parameter(Int8.of(module.weight.detach()), requires_grad=False)
    return model


def dequantize(model: nn.Module) -> nn.Module:
    """Make every weight in int8 dense again, and return the model."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, Int8):
                dense = nn.Parameter(parameter.dequantize(), requires_grad=False)
                module.register_parameter(name, dense)
    return model
