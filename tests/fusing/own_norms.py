"""Norms of many classes and spellings."""

import torch
import torch.nn.functional as F
from torch import nn

D = 12


class Norm(nn.Module):
    """RMSNorm with a slot for every way in which classes differ."""

    eps_name, weight_name = "eps", "weight"

    def __init__(self, eps=1e-6):
        super().__init__()
        setattr(self, self.eps_name, eps)
        setattr(self, self.weight_name, nn.Parameter(torch.randn(D)))

    @property
    def w(self):
        return getattr(self, self.weight_name)

    def rms(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + getattr(self, self.eps_name))


class Llama(Norm):
    eps_name = "variance_epsilon"

    def forward(self, hidden_states):
        return self.w * self.rms(hidden_states.float()).to(hidden_states.dtype)


class Gemma(Norm):
    def forward(self, x):
        return (self.rms(x.float()) * (1.0 + self.w.float())).type_as(x)


class Olmo(Norm):
    eps_name, weight_name = "epsilon", "scale"

    def forward(self, x):
        return (self.w * self.rms(x.float())).to(x.dtype)


class T5(Norm):
    def forward(self, x):
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.w.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.w.dtype)
        return self.w * x


class Pow(Norm):
    """Gemma3n's: a power instead of the root, which may round otherwise."""

    def forward(self, x):
        mean = x.float().pow(2).mean(-1, keepdim=True) + self.eps
        return (x.float() * torch.pow(mean, -0.5) * self.w.float()).type_as(x)


class Torch(Norm):
    def forward(self, x):
        return F.rms_norm(x, (D,), self.w, self.eps)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x)


class OwnNorm(nn.Module):
    """nanoGPT's way."""

    def __init__(self, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.bias = nn.Parameter(torch.randn(D)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class Casting(nn.LayerNorm):
    """It leaves x's dtype, whatever autocast does."""

    def forward(self, input):
        y = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return y.to(input.dtype)


class Switched(nn.LayerNorm):
    is_fast = False

    def forward(self, input):
        y = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return y * 2 if self.is_fast else y


class Normalize(nn.Module):
    def __init__(self, offset=0.0):
        super().__init__()
        self.scale, self.offset = D**0.5, offset
        self.g = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * (self.g + self.offset)


class L2(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class UnreadBuffer(L2):
    """Falcon Mamba's: a weight for a kernel that is not there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Buffer(torch.ones(D))


class ReadBuffer(UnreadBuffer):
    def forward(self, x):
        return super().forward(x) * self.weight


class NoEps(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class Unit(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=-1)


class Standard(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


class KnowsWidth(L2):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 64 + self.eps)


class OneScale(nn.Module):
    """A scale of one element: as a width it would be a norm of single numbers."""

    def __init__(self, *shape):
        super().__init__()
        self.g = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.g


class Hardcoded(nn.Module):
    """OLMo's."""

    def __init__(self):
        super().__init__()
        self.normalized_shape = (D,)

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, None, None, 1e-5).to(x.dtype)


class WrittenOut(nn.Module):
    """Cohere's LayerNorm: in float32, with no bias."""

    def __init__(self, bias=False):
        super().__init__()
        self.variance_epsilon = 1e-5
        # the bias first: nothing goes by order or name
        self.b = nn.Parameter(torch.randn(D)) if bias else None
        self.w = nn.Parameter(torch.randn(D))

    def forward(self, x):
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        y = (wide - mean) * torch.rsqrt(variance + self.variance_epsilon) * self.w.float()
        return (y if self.b is None else y + self.b.float()).to(x.dtype)


class Variance(WrittenOut):
    def forward(self, x):
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) / (variance + self.variance_epsilon).sqrt() * self.w
