"""Models whose steps are reported, and the sizes of their tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt

# sizes of float32 tensors on the CPU; the allocator of a GPU rounds up to 512 bytes
R, D, F = 8, 16, 48


X, H, W = 4 * R * D, 4 * R * F, 4 * D * F


def given(*shape):
    return torch.randn(*shape)


def mlp():
    return nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))


def squares(output):
    """Compute the default loss of one tensor."""
    return output.float().square().mean()


class Containers(nn.Module):
    """Takes and gives nested containers; a shared module called twice, frozen and no_grad parts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([mlp(), mlp()])
        self.blocks.append(self.blocks[0])
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.table = nn.ModuleDict({"norm": nn.BatchNorm1d(D)})
        self.register_buffer("scale", torch.ones(D))

    def forward(self, batch, *, factor):
        x = batch.pop("x") * self.scale * factor[0]
        with torch.no_grad():
            x = self.frozen(x)
        for block in self.blocks:
            x = x + block(self.frozen(x))
        return {"y": [self.table["norm"](x)], "count": 3, "name": "y", "ids": torch.arange(3)}


class LinearThenCheckpoint(nn.Module):
    def __init__(self, use_reentrant, run=checkpoint):
        super().__init__()
        self.first, self.inner = nn.Linear(D, D), mlp()
        self.use_reentrant, self.run = use_reentrant, run

    def forward(self, x):
        return self.run(self.inner, self.first(x), use_reentrant=self.use_reentrant)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=D, n_head=2, vocab_size=32, n_positions=R, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def fused():
    model = nn.Sequential(nn.Linear(D, D), mlp(), fusedckpt.MLP(D, F, norm=nn.LayerNorm(D)))
    fusedckpt.fuse(model)
    return model


def case(name):
    """Return a model, its arguments and keyword arguments, and the default loss of its output."""
    tokens = torch.randint(0, 32, (2, R))
    x = given(R, D)
    return {
        "mlp": lambda: (mlp(), (x,), {}, squares),
        "containers": lambda: (
            Containers(),
            ({"x": x},),
            {"factor": (given(D), None)},
            lambda output: squares(output["y"][0]),
        ),
        "checkpoint": lambda: (LinearThenCheckpoint(False), (x,), {}, squares),
        "reentrant": lambda: (LinearThenCheckpoint(True), (x,), {}, squares),
        "fused": lambda: (fused(), (x,), {}, squares),
        "gpt2": lambda: (gpt2(), (tokens,), {"labels": tokens}, lambda output: output.loss),
        "half": lambda: (mlp().bfloat16(), (x.bfloat16(),), {}, squares),
    }[name]()


CASES = ["mlp", "containers", "checkpoint", "reentrant", "fused", "gpt2", "half"]


def call(model, args, kwargs):
    """Call a model so that it can take nothing out of the caller's dicts."""
    return model(*(dict(arg) if isinstance(arg, dict) else arg for arg in args), **kwargs)


def step(model, args, kwargs, loss, optimizer=None):
    # as in a training loop, these live on
    output = call(model, args, kwargs)
    value = loss(output)
    value.backward()
    if optimizer is not None:
        optimizer.step()
