"""Long contexts: a checkpoint around each block that does not run attention again, and no logits.

    python -m bench.examples.long_context

Prints the saved bytes a token of four ways to train the same blocks: plain, under torch's
checkpoint, under ours around fused blocks, and under ours with attention saved, where its forward
runs once a step. The loss never makes the logits of all tokens: `LinearCrossEntropy` takes x.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from bench.models import stack
from fusedckpt.memory import saved_tensors

LAYERS, DIM, SEQ, VOCAB = 3, 64, 512, 1024


def main() -> dict[str, float]:
    """Return the saved bytes a token by way."""
    torch.manual_seed(0)
    blocks = stack(LAYERS, DIM, SEQ)
    head = fusedckpt.LinearCrossEntropy(DIM, VOCAB, bias=False)
    fused = copy.deepcopy(blocks)
    fusedckpt.fuse(fused)
    regions = partial(fusedckpt.checkpoint, save_regions=["attention"])
    ways: dict[str, tuple[nn.Module, Callable[..., Any]]] = {
        "plain": (blocks, lambda block, x: block(x)),
        "torch's checkpoint": (blocks, partial(checkpoint, use_reentrant=False)),
        "fused, our checkpoint": (fused, fusedckpt.checkpoint),
        "fused, attention saved": (fused, regions),
    }
    x = torch.randn(1, SEQ, DIM)
    target = torch.randint(VOCAB, (1, SEQ))
    sizes = {}
    for name, (model, run) in ways.items():
        with saved_tensors() as saved:
            y = x.clone().requires_grad_()
            for block in model.children():
                y = run(block, y)
            loss = head(y, target)
        sizes[name] = saved.nbytes / SEQ
        loss.backward()
        print(f"{name:24}{sizes[name]:10,.0f} bytes a token, loss {loss.item():.4f}")
    return sizes


if __name__ == "__main__":
    main()
