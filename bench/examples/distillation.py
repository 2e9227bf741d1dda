"""Distillation: a student learns the best classes of a teacher without its logits.

    python -m bench.examples.distillation

Trains the same student by logits and by `TokenLogprobs`, with the divergence KL(teacher || student)
on the teacher's top 16 of 1000 classes; prints saved bytes and losses, which agree.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import fusedckpt
from fusedckpt.memory import saved_tensors

BATCH, SEQ, DIM, VOCAB, TOP, STEPS = 2, 64, 32, 1000, 16, 4


def step(student: nn.ModuleDict, tokens: Tensor, teacher: Tensor, ids: Tensor, name: str) -> Tensor:
    """Return the divergence on the ids [batch, seq, TOP], of which `teacher` has log p."""
    x = student["embed"](tokens)
    if name == "logits":
        z = nn.functional.linear(x, *student["head"].parameters())
        logp = z.log_softmax(-1).gather(-1, ids)
    else:
        logp = student["head"](x, ids=ids)
    return nn.functional.kl_div(logp, teacher, reduction="none", log_target=True).sum(-1).mean()


def main() -> dict[str, tuple[int, list[float]]]:
    """Return the bytes that a step saves, and the losses, by way."""
    torch.manual_seed(0)
    start = nn.ModuleDict({"embed": nn.Embedding(VOCAB, DIM)})
    start["head"] = fusedckpt.TokenLogprobs(DIM, VOCAB, bias=False)
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    # as a teacher's results are stored
    teacher, ids = (3 * torch.randn(BATCH, SEQ, VOCAB)).log_softmax(-1).topk(TOP)
    results = {}
    for name in ("logits", "TokenLogprobs"):
        student = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.02)
        losses = []
        for _ in range(STEPS):
            with saved_tensors() as saved:
                loss = step(student, tokens, teacher, ids, name)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            results[name] = saved.nbytes, losses
        print(f"{name:16}{results[name][0]:12,} bytes, losses {losses[0]:.4f} to {losses[-1]:.4f}")
    return results


if __name__ == "__main__":
    main()
