"""Reinforcement learning: log-probabilities and entropy of tokens without their logits.

    python -m bench.examples.rl_logprobs

Prints the bytes that a policy-gradient loss with an entropy bonus saves, by logits and by
`TokenLogprobs`, which has the weight of the head; loss and gradients agree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import fusedckpt
from fusedckpt.memory import saved_tensors

BATCH, SEQ, DIM, VOCAB, TEMPERATURE, BONUS = 2, 64, 32, 1000, 0.7, 0.01


def by_logits(head: fusedckpt.TokenLogprobs, x: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of each token, of logits [batch, seq, vocabulary]."""
    logprobs = (F.linear(x, head.weight) / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, taken[..., None])[..., 0], entropy


def main() -> dict[str, tuple[int, float, Tensor]]:
    """Return saved bytes, the loss and the gradient of x by way."""
    torch.manual_seed(0)
    options = {"bias": False, "temperature": TEMPERATURE, "entropy": True}
    head = fusedckpt.TokenLogprobs(DIM, VOCAB, **options)
    hidden = torch.randn(BATCH, SEQ, DIM)
    taken = torch.randint(VOCAB, (BATCH, SEQ))
    advantages = torch.randn(BATCH, SEQ)
    old = torch.full((BATCH, SEQ), -7.0)
    results = {}
    for name in ("logits", "TokenLogprobs"):
        x = hidden.clone().requires_grad_()
        with saved_tensors() as saved:
            made = head(x, taken) if name == "TokenLogprobs" else by_logits(head, x, taken)
            logprobs, entropy = made
            ratio = (logprobs - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            policy = -torch.minimum(ratio * advantages, clipped * advantages).mean()
            loss = policy - BONUS * entropy.mean()
        loss.backward()
        assert x.grad is not None
        results[name] = saved.nbytes, loss.item(), x.grad
        print(f"{name:16}{saved.nbytes:12,} bytes, loss {loss.item():.5f}")
    return results


if __name__ == "__main__":
    main()
