"""What the tests of checkpoints share: one step with and without, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import fusedckpt

stock = partial(stock_checkpoint, use_reentrant=False)


def step(call: Callable[..., Any], *args: Any, parameters: Any = (), seed: int = 3) -> list[Any]:
    """Return outputs and gradients of one seeded step, and the RNG state after each half."""
    torch.manual_seed(seed)
    outputs = [t for t in pytree.tree_leaves(call(*args)) if isinstance(t, Tensor)]
    states = [torch.get_rng_state()]
    wanted = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
    loss = sum(t.float().square().sum() for t in outputs if t.requires_grad)
    grads = torch.autograd.grad(loss, [*wanted, *parameters], allow_unused=True)
    return [*(t.detach() for t in outputs), *grads, *states, torch.get_rng_state()]


def assert_as_plain(fn: Callable[..., Any], *args: Any, parameters: Any = (), **options: Any):
    """Assert that a checkpoint changes no bit: outputs, gradients, RNG states."""
    parameters = list(parameters)
    expected = step(fn, *args, parameters=parameters)
    found = step(partial(fusedckpt.checkpoint, fn, **options), *args, parameters=parameters)
    for a, b in zip(found, expected, strict=True):
        assert same(a, b)


def same(a: Any, b: Any) -> bool:
    return a is b is None or (a.dtype == b.dtype and torch.equal(a, b))
