"""Train within a budget of bytes: report, plan, apply, plot.

    python -m bench.examples.budget

Prints where the memory of a step goes by module; then a plan for half of the activations between
the least and the most: the units that run their forward again, and their cost. The measured peak
is at most the budget. Two pictures are written: memory through a step, and time against memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

import fusedckpt
from bench.models import Transformer

LAYERS = 4
DIM = 64
SEQ = 128
VOCAB = 256


def main(out: Path = Path("bench/out")) -> fusedckpt.Plan:
    """Plan and train a step under it; write the pictures to a folder."""
    torch.manual_seed(0)
    model = Transformer(LAYERS, DIM, SEQ)
    tokens = torch.randint(VOCAB, (4, SEQ))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    fusedckpt.fuse(model)
    report = fusedckpt.report(model, tokens, loss=loss)
    print(report)
    # the least that any plan of this model reaches
    least = fusedckpt.plan(model, tokens, loss=loss, policy="memory", progress=False)
    assert least.measured_bytes is not None
    budget = (least.measured_bytes + report.peak_bytes) // 2
    plan = fusedckpt.plan(model, tokens, loss=loss, budget=budget, progress=False)
    print(plan)
    out.mkdir(parents=True, exist_ok=True)
    report.plot(out / "report.png")
    plan.plot(out / "plan.png")
    run = plan.apply(model)
    loss(run(tokens)).backward()
    return plan


if __name__ == "__main__":
    main()
