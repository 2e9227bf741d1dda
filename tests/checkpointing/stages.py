"""Checkpointed segments whose recomputes are counted."""

from __future__ import annotations

import torch
from checkpoints import same
from support import DEVICE, randn
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fusedckpt
from fusedckpt import checkpoint

D, F, ROWS = 8, 16, 6


class Block(nn.Module):
    """Draws, normalises by statistics, and notes its calls."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log = name, log
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)
        self.norm, self.dropout = nn.BatchNorm1d(F), nn.Dropout(0.4)
        self.seen = []

    def forward(self, x):
        self.log.append(self.name)
        h = self.dropout(self.norm(self.up(x)).relu())
        if fusedckpt.is_recomputing():
            self.seen.append(StorageWeakRef(h.untyped_storage()))
        return self.down(h).sin()


class Stage(nn.Module):
    """Checkpointed blocks, "a" first, and something behind them."""

    def __init__(self, count=3):
        super().__init__()
        self.log = []
        self.blocks = nn.ModuleList(Block("abcdef"[i], self.log) for i in range(count))
        self.to(DEVICE)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x)
        return x.exp()

    @property
    def alive(self):
        return [block.name for block in self.blocks for ref in block.seen if not ref.expired()]


def made(count=3):
    torch.manual_seed(0)
    return Stage(count), randn(ROWS, D)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert same(a, b)
