"""Real text that every machine has: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["LIMIT", "Batches", "stdlib_text"]

LIMIT = 4 * 2**20


def stdlib_text(folder: Path | None = None, limit: int = LIMIT) -> Tensor:
    """The first `limit` bytes of the standard library's top-level modules, joined in name order.

    Raises ValueError where this Python ships no sources (a frozen or zipped library).
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise ValueError(f"no text to train on: {folder} holds no Python sources")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Batches:
    """Endless random windows of a text: tokens and targets, both int64 `[batch, seq]`."""

    def __init__(self, text: Tensor, batch: int, seq: int, seed: int, device: torch.device):
        if len(text) <= seq:
            raise ValueError(f"seq {seq} needs a longer text than one of {len(text)} bytes")
        self.text, self.batch, self.seq, self.device = text, batch, seq, device
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next batch; targets are the tokens shifted by one."""
        starts = torch.randint(len(self.text) - self.seq, (self.batch, 1), generator=self.generator)
        window = self.text[starts + torch.arange(self.seq + 1)].long().to(self.device)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
