"""Blocks beside transformers as people write them in their repositories, in words of ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.zoo.model import TOKENS, D, Model
from bench.zoo.own_stack import OWN_CNN, owned
from bench.zoo.own_transformers import PAIR, WIDE, ChannelNorm, merged, split_heads

# channels and side of pictures
C = 64
PICTURE = torch.Size((2, C, 16, 16))


class ResponseNorm(nn.Module):
    """A norm of each channel by its length over the pixels, as ConvNeXt V2's."""

    def __init__(self, width: int):
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.zeros(1, 1, 1, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * (length / (length.mean(dim=-1, keepdim=True) + 1e-6))) + x


class ConvNeXtBlock(nn.Module):
    """As ConvNeXt's, of both versions: the MLP is written in the block."""

    def __init__(self):
        super().__init__()
        self.first_norm, self.dwconv = ChannelNorm(C), nn.Conv2d(C, C, 7, padding=3, groups=C)
        self.norm, self.pwconv1 = nn.LayerNorm(C, eps=1e-6), nn.Linear(C, 4 * C)
        self.act, self.grn = nn.GELU(), ResponseNorm(4 * C)
        self.pwconv2 = nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(self.first_norm(x)).permute(0, 2, 3, 1))
        y = self.pwconv2(self.grn(self.act(self.pwconv1(y))))
        return x + y.permute(0, 3, 1, 2)


def group_norm(width: int) -> nn.GroupNorm:
    """Return a norm of groups."""
    return nn.GroupNorm(16, width)


class GuidedBlock(nn.Module):
    """As guided diffusion's: a residual block that an embedding modulates, and attention."""

    def __init__(self):
        super().__init__()
        self.in_layers = nn.Sequential(group_norm(C), nn.SiLU(), nn.Conv2d(C, C, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(C, 2 * C))
        self.out_norm = group_norm(C)
        self.out_rest = nn.Sequential(nn.SiLU(), nn.Dropout(0.0), nn.Conv2d(C, C, 3, padding=1))
        self.norm, self.qkv, self.proj = group_norm(C), nn.Conv1d(C, 3 * C, 1), nn.Conv1d(C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.emb_layers(x.mean(dim=(2, 3)))[..., None, None].chunk(2, dim=1)
        y = self.out_norm(self.in_layers(x)) * (1 + scale) + shift
        x = (x + self.out_rest(y)).flatten(2)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=1)
        weights = torch.einsum("bct,bcs->bts", q * C**-0.25, k * C**-0.25)
        weights = torch.softmax(weights.float(), dim=-1).type(weights.dtype)
        x = x + self.proj(torch.einsum("bts,bcs->bct", weights, v))
        return x.view(PICTURE)


class StyledBlock(nn.Module):
    """As StyleGAN 2's: a style modulates the weight of a convolution for each picture."""

    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(C, C)
        self.weight = nn.Parameter(torch.randn(C, C, 3, 3) / C)
        self.bias, self.strength = nn.Parameter(torch.zeros(C)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        num, _, height, width = x.shape
        style = self.affine(x.mean(dim=(2, 3))) + 1
        weight = self.weight[None] * style[:, None, :, None, None]
        weight = weight * (weight.square().sum(dim=(2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        y = x.reshape(1, num * C, height, width)
        y = F.conv2d(y, weight.reshape(-1, C, 3, 3), padding=1, groups=num).view_as(x)
        y = y + torch.randn_like(y[:, :1]) * self.strength + self.bias[:, None, None]
        return F.leaky_relu(y, 0.2) * 2**0.5


def two_convolutions(inner: int, outer: int) -> nn.Sequential:
    """Return two convolutions, each with a batch norm and a ReLU."""
    layers: list[nn.Module] = []
    for width in (inner, outer):
        layers += [nn.Conv2d(width, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNetBlock(nn.Module):
    """A level of a U-Net that segments: down, up, and a concatenation."""

    def __init__(self):
        super().__init__()
        self.inc, self.pool = two_convolutions(C, C), nn.MaxPool2d(2)
        self.down, self.up = two_convolutions(C, 2 * C), nn.ConvTranspose2d(2 * C, C, 2, 2)
        self.out = two_convolutions(2 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inc(x)
        return self.out(torch.cat([first, self.up(self.down(self.pool(first)))], dim=1))


def half_step() -> nn.Sequential:
    """Return the MLP of a Conformer."""
    layers = nn.LayerNorm(D), nn.Linear(D, WIDE), nn.SiLU(), nn.Dropout(0.1)
    return nn.Sequential(*layers, nn.Linear(WIDE, D), nn.Dropout(0.1))


class ConformerBlock(nn.Module):
    """As the Conformer's: two MLPs around attention and a convolution."""

    def __init__(self):
        super().__init__()
        self.ff1, self.ff2, self.norm = half_step(), half_step(), nn.LayerNorm(D)
        self.attn_norm, self.conv_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.pointwise1, self.pointwise2 = nn.Conv1d(D, 2 * D, 1), nn.Conv1d(D, D, 1)
        self.depthwise, self.batch_norm = nn.Conv1d(D, D, 7, padding=3, groups=D), nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        n = self.attn_norm(x)
        x = x + self.attn(n, n, n, need_weights=False)[0]
        y = F.glu(self.pointwise1(self.conv_norm(x).transpose(1, 2)), dim=1)
        y = self.pointwise2(F.silu(self.batch_norm(self.depthwise(y))))
        x = x + y.transpose(1, 2)
        return self.norm(x + 0.5 * self.ff2(x))


class SeriesBlock(nn.Module):
    """As Autoformer's: attention, moving averages, and an MLP of convolutions of one step."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.conv1, self.conv2 = (
            nn.Conv1d(D, WIDE, 1, bias=False),
            nn.Conv1d(WIDE, D, 1, bias=False),
        )
        self.average, self.dropout = nn.AvgPool1d(5, stride=1), nn.Dropout(0.1)
        self.activation = F.gelu

    def season(self, x: Tensor) -> Tensor:
        """Take the moving average away."""
        padded = torch.cat([x[:, :1].repeat(1, 2, 1), x, x[:, -1:].repeat(1, 2, 1)], dim=1)
        return x - self.average(padded.transpose(1, 2)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.query(x)), split_heads(self.key(x)), split_heads(self.value(x))
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.17, dim=-1)
        x = self.season(x + self.dropout(self.out(merged(weights @ v))))
        y = self.dropout(self.activation(self.conv1(x.transpose(-1, 1))))
        return self.season(x + self.dropout(self.conv2(y).transpose(-1, 1)))


class SplineLayer(nn.Module):
    """As a KAN's: a linear of an activation, and one of splines of each input."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(D, D)
        self.spline_weight = nn.Parameter(torch.randn(D, D * 8) / D)
        self.grid: Tensor
        self.register_buffer("grid", torch.linspace(-2.2, 2.2, 12))

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid
        z = x.unsqueeze(-1)
        bases = ((z >= grid[:-1]) & (z < grid[1:])).to(x.dtype)
        for order in range(1, 4):
            left = (z - grid[: -order - 1]) / (grid[order:-1] - grid[: -order - 1])
            right = (grid[order + 1 :] - z) / (grid[order + 1 :] - grid[1:-order])
            bases = left * bases[..., :-1] + right * bases[..., 1:]
        return self.base(F.silu(x)) + F.linear(bases.flatten(-2), self.spline_weight)


class PointBlock(nn.Module):
    """As PointNet's: convolutions of single points, and the largest of all points."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(C, 2 * C, 1), nn.Conv1d(4 * C, C, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(2 * C), nn.BatchNorm1d(C)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        whole = torch.max(y, 2, keepdim=True)[0].expand_as(y)
        return F.relu(self.bn2(self.conv2(torch.cat([y, whole], dim=1))))


class ScanBlock(nn.Module):
    """As Mamba's, in plain Python: a gate, a short convolution, and a loop over the steps."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(D, 4 * D, False), nn.Linear(2 * D, D, False)
        self.conv = nn.Conv1d(2 * D, 2 * D, 4, groups=2 * D, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(2 * D, 8 + 16, False), nn.Linear(8, 2 * D)
        self.log_decay = nn.Parameter(torch.zeros(2 * D, 8))
        self.skip, self.norm_weight = nn.Parameter(torch.ones(2 * D)), nn.Parameter(torch.ones(D))

    def scanned(self, u: Tensor) -> Tensor:
        """Run the state over the steps."""
        step, b, c = self.x_proj(u).split([8, 8, 8], dim=-1)
        step = F.softplus(self.dt_proj(step))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(self.log_decay))
        added = (step * u).unsqueeze(-1) * b.unsqueeze(2)
        state, outputs = torch.zeros_like(added[:, 0]), []
        for t in range(u.shape[1]):
            state = decay[:, t] * state + added[:, t]
            outputs.append((state * c[:, t, None]).sum(-1))
        return torch.stack(outputs, dim=1) + u * self.skip

    def forward(self, x: Tensor) -> Tensor:
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm_weight
        u, gate = self.in_proj(n).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        return x + self.out_proj(self.scanned(u) * F.silu(gate))


OWN_NETS: Mapping[str, Model] = {
    "conformer": owned(PAIR, ConformerBlock),
    "time_series": owned(PAIR, SeriesBlock),
    "kan": owned(PAIR, SplineLayer),
    "mamba": owned(PAIR, ScanBlock),
    "convnext": owned(PICTURE, ConvNeXtBlock, OWN_CNN),
    "guided_diffusion": owned(PICTURE, GuidedBlock, OWN_CNN),
    "stylegan": owned(PICTURE, StyledBlock, OWN_CNN),
    "unet": owned(PICTURE, UNetBlock, OWN_CNN),
    "pointnet": owned(torch.Size((2, C, TOKENS)), PointBlock, OWN_CNN),
}
