"""What the tests of checkpoints share: one step with and without, compared bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from support import DEVICE
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as stock_checkpoint
from zoo import MLP

from fusedckpt import checkpoint, checkpoint_sequential

stock = partial(stock_checkpoint, use_reentrant=False)


class DroppingBlock(nn.Module):
    """x + dropout(mlp(norm(x))), where rows may attend to each other before."""

    def __init__(self, d: int, f: int, attends: bool = False):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(d), MLP(d, f)
        self.drop, self.attends = nn.Dropout(0.1), attends

    def forward(self, x, mask=None, scale=1.0):
        h = self.norm(x)
        if self.attends:
            heads = h[None].unflatten(-1, (4, -1)).transpose(1, 2)
            h = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)[0].flatten(-2)
        y = self.drop(self.mlp(h)) * scale
        return x + y if mask is None else x + y * mask


def step(call: Callable[..., Any], *args: Any, parameters: Any = (), seed: int = 3) -> list[Any]:
    """Return outputs and gradients of one seeded step, and the RNG state after each half."""
    torch.manual_seed(seed)
    outputs = [t for t in pytree.tree_leaves(call(*args)) if isinstance(t, Tensor)]
    states = [torch.get_rng_state()]
    wanted = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
    loss = sum(t.float().square().sum() for t in outputs if t.requires_grad)
    grads = torch.autograd.grad(loss, [*wanted, *parameters], allow_unused=True)
    return [*(t.detach() for t in outputs), *grads, *states, torch.get_rng_state()]


def run(blocks: Any, x: Tensor, call: Callable[..., Any], **options: Any) -> Tensor:
    """Return the result of blocks in a row, each called by `call`, from one seed."""
    torch.manual_seed(0)
    h = x * 1
    for block in blocks:
        h = call(block, h, **options)
    return h


def grads(blocks: Any, x: Tensor, y: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return the gradients of a result of `run`."""
    return torch.autograd.grad(y.square().sum(), [x, *blocks.parameters()], **options)


def assert_as_plain(
    fn: Callable[..., Any],
    *args: Any,
    parameters: Any = (),
    wrap: Callable[..., Any] = checkpoint,
    **options: Any,
):
    """Assert that a checkpoint changes no bit: outputs, gradients, RNG states."""
    parameters = list(parameters)
    expected = step(fn, *args, parameters=parameters)
    assert_same(step(partial(wrap, fn, **options), *args, parameters=parameters), expected)


def same(a: Any, b: Any) -> bool:
    return a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


def assert_same(found: Any, expected: Any):
    for a, b in zip(found, expected, strict=True):
        assert same(a, b)


def counted(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return a function, and a list of as many entries as it had calls."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return fn(*args, **kwargs)

    return call, calls


def linears(*sizes: int) -> nn.Sequential:
    """Linears with tanh between."""
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*parts[:-1]).to(DEVICE)


@contextmanager
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def chain(count=7):
    parts = [nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU()]
    return nn.Sequential(*(copy.deepcopy(parts[i % 5]) for i in range(count))).to(DEVICE)


def reset(model):
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_running_stats()


def assert_as_called(model, segments, x, **options):
    """Assert that segments change no bit: values, gradients, RNG states, buffers."""
    run = partial(checkpoint_sequential, model, segments, **options)
    found, expected = (
        [*step(call, x * 1, parameters=model.parameters()), *copy.deepcopy(model).buffers()]
        for call in (run, model)
        if reset(model) is None
    )
    assert_same(found, expected)


def conv_net():
    """VGG-11, whose ReLUs write in place what BatchNorm saves."""
    layers, width = [], 3
    for out in (8, 0, 16, 0, 32, 32, 0, 64, 64, 0, 64, 64, 0):
        if not out:
            layers.append(nn.MaxPool2d(2))
            continue
        conv = nn.Conv2d(width, out, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        width = out
    return nn.Sequential(*layers)
