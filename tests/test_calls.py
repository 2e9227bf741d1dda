"""Python calls of a warm call, forward and backward: the host's time of a step grows with them.

Exact numbers of calls in fusedckpt, comprehensions left out, so that no change adds any unseen:
arithmetic takes most of the time on a CPU, and a thread's time changes with the machine. Where a
change adds or saves calls, run this file: a failure prints the row to write.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import randn
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import SwiGLU

import fusedckpt
from fusedckpt import functional
from fusedckpt.autograd.dispatch import forced_path

PACKAGE = os.path.realpath(os.path.dirname(fusedckpt.__file__))
FOLDERS = PACKAGE, os.path.realpath(os.path.join(PACKAGE, "kernels"))
# Python 3.12 has no frames for comprehensions; from torch 2.14 on a hook is an object with a method
IN_SOME_VERSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "__self__")
# of attention and of scans, which other tests may import
LIBRARIES = "flash_attn", "fla.ops.", "mamba_ssm.ops."
D, HIDDEN = 32, 64


class Inline(nn.Module):
    """A block with an MLP in its forward, which saves the first linear's input."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(D, HIDDEN), act, nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP beside its input."""
        return x + self.down(self.act(self.up(x.sigmoid())))


class SeparateAttention(nn.Module):
    """Attention, which fuse recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend with two heads."""
        heads = (
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def swapped(module: nn.Module, **options: Any) -> nn.Module:
    model = nn.Sequential(module)
    fusedckpt.fuse(model, **options)
    return model[0]


def mlp_layers() -> list[nn.Module]:
    return [nn.Linear(D, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, D)]


def head() -> Callable[[Tensor], Tensor]:
    classes, target = randn(HIDDEN, D), torch.arange(18).view(2, 9)
    return lambda x: functional.linear_cross_entropy(x, classes, target)


def checkpointed(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: fusedckpt.checkpoint(module, x)


def function_of(norm: nn.RMSNorm) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.rms_norm(x, (D,), norm.weight)


def in_a_block(act: Callable[[Tensor], Tensor]) -> nn.Module:
    return swapped(Inline(act), mlp=False, attention=False)


LAYERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "functional.rms_norm": lambda: function_of(fusedckpt.RMSNorm(D)),
    "RMSNorm": lambda: fusedckpt.RMSNorm(D),
    "LayerNorm": lambda: fusedckpt.LayerNorm(D),
    "Linear": lambda: fusedckpt.Linear(D, HIDDEN, activation="gelu"),
    "MLP": lambda: fusedckpt.MLP(D, HIDDEN),
    "GatedMLP": lambda: fusedckpt.GatedMLP(D, HIDDEN),
    "functional.linear_cross_entropy": head,
    "a swapped norm": lambda: swapped(nn.RMSNorm(D)),
    "a swapped MLP": lambda: swapped(nn.Sequential(*mlp_layers())),
    "a swapped MLP with a norm": lambda: swapped(nn.Sequential(nn.LayerNorm(D), *mlp_layers())),
    "a swapped gated MLP": lambda: swapped(SwiGLU(D, HIDDEN)),
    "a swapped gated MLP in a checkpoint": lambda: checkpointed(swapped(SwiGLU(D, HIDDEN))),
    "a swapped attention": lambda: swapped(SeparateAttention()),
    "an MLP in a block": lambda: in_a_block(nn.GELU()),
    "an MLP of functions in a block": lambda: in_a_block(F.gelu),
}


# forward, backward
CALLS: dict[str, tuple[int, int]] = {
    "functional.rms_norm": (18, 25),
    "RMSNorm": (23, 25),
    "LayerNorm": (23, 18),
    "Linear": (18, 22),
    "MLP": (24, 23),
    "GatedMLP": (26, 22),
    "functional.linear_cross_entropy": (31, 24),
    "a swapped norm": (23, 25),
    "a swapped MLP": (28, 23),
    "a swapped MLP with a norm": (32, 31),
    "a swapped gated MLP": (29, 22),
    "a swapped gated MLP in a checkpoint": (90, 33),
    "an MLP in a block": (108, 35),
    "an MLP of functions in a block": (147, 62),
    "a swapped attention": (123, 58),
}


def counted(fn: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `fn` returns, and how many calls of our functions it makes."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_name not in IN_SOME_VERSIONS:
            file = code.co_filename
            is_ours = file.startswith("<fusedckpt") or os.path.realpath(file).startswith(FOLDERS)
            count += is_ours

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        result = fn()
    finally:
        sys.setprofile(before)
    return result, count


@pytest.fixture(autouse=True)
def without_models(monkeypatch):
    """Hide the functions of libraries, each of which takes calls where attention is looked for."""
    for name in [*sys.modules]:
        is_model = name.startswith("transformers") and ".modeling_" in name
        if is_model or name.startswith(LIBRARIES):
            monkeypatch.delitem(sys.modules, name)


# of at most half as many tokens as features: weights have gradients one after the other
FEW_TOKENS = {"MLP": (26, 31), "GatedMLP": (30, 37)}


@pytest.mark.parametrize("name", LAYERS)
def test_calls_of_a_warm_call(name):
    assert_calls(name, 18, CALLS[name])


@pytest.mark.parametrize("name", FEW_TOKENS)
def test_calls_with_few_tokens(name):
    assert_calls(name, D // 2, FEW_TOKENS[name])


def assert_calls(name: str, num_tokens: int, calls: tuple[int, int]) -> None:
    with forced_path("aten"), torch.autograd.set_multithreading_enabled(False):
        layer = LAYERS[name]()
        x = randn(2, num_tokens // 2, D).requires_grad_()
        for _ in range(4):
            layer(x * 1).sum().backward()
        inner = x * 1
        y, forward = counted(lambda: layer(inner))
        dy = torch.ones_like(y)
        _, backward = counted(lambda: y.backward(dy))
    assert (forward, backward) == calls, f'"{name}": ({forward}, {backward}),'
