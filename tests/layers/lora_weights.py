"""Weights with an adapter to train, and their sizes."""

import torch
from support import randn
from torch import nn

from fusedckpt import LoRA

T, D, F, R = 16, 24, 40, 4


def adapted(n: int, k: int, dtype=torch.float32, **options) -> LoRA:
    """A frozen weight with an adapter to train."""
    w, a, b = (nn.Parameter(randn(*s, dtype=dtype) / 4) for s in ((n, k), (R, k), (n, R)))
    return LoRA(w.requires_grad_(False), a, b, **options)
