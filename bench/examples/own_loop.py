"""A loop of your own: fuse once, then train as before, with autocast, accumulation and a resume.

    python -m bench.examples.own_loop

Prints the report of `fuse`, then losses that fall on after a resume: parameters keep their names.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn import functional as F

import fusedckpt
from bench.models import Transformer

LAYERS, DIM, SEQ, MICRO_BATCHES = 2, 64, 64, 2


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a fused model and its optimizer."""
    torch.manual_seed(0)
    model = Transformer(LAYERS, DIM, SEQ, mlp="swiglu")
    print(fusedckpt.fuse(model))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train on a few micro-batches, and return the loss."""
    tokens, loss = torch.arange(4 * SEQ).view(4, SEQ) % 251, torch.zeros(())
    for _ in range(MICRO_BATCHES):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        (loss / MICRO_BATCHES).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> list[float]:
    """Train, save, load and go on; return all losses."""
    model, optimizer = build()
    losses = [step(model, optimizer) for _ in range(3)]
    with tempfile.NamedTemporaryFile() as file:
        torch.save((model.state_dict(), optimizer.state_dict()), file.name)
        model, optimizer = build()
        weights, moments = torch.load(file.name)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    losses += [step(model, optimizer) for _ in range(3)]
    print(f"losses: {losses}")
    return losses


if __name__ == "__main__":
    main()
