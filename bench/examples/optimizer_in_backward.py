"""Step each parameter as soon as its gradient is complete, and free the gradient.

    python -m bench.examples.optimizer_in_backward

Prints the peaks of backward and step with one optimizer, and with one for each parameter in torch's
hooks, and the losses, which are the same. Such gradients cannot be accumulated or clipped.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import fusedckpt
from bench.models import Transformer
from fusedckpt.memory import peak_bytes


def step_in_backward(model: nn.Module) -> None:
    """Give each parameter an optimizer that steps when its gradient is complete."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def train(in_backward: bool) -> tuple[int, list[float]]:
    """Return the peak of a backward and step, and the losses of some steps."""
    torch.manual_seed(0)
    model = Transformer(4, 256, 16, mlp="swiglu")
    fusedckpt.fuse(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if in_backward:
        step_in_backward(model)
    tokens, losses, peak = torch.arange(16)[None], [], 0
    for _ in range(3):
        loss = F.cross_entropy(model(tokens)[0], tokens[0])
        # the optimizer of all parameters has nothing to do where their gradients are gone
        peak = peak_bytes(lambda loss=loss: (loss.backward(), optimizer.step()))
        optimizer.zero_grad()
        losses.append(loss.item())
    return peak, losses


def main() -> dict[str, tuple[int, list[float]]]:
    """Return the peak and the losses of both ways."""
    ways = {name: train(name == "in backward") for name in ("after backward", "in backward")}
    for name, (peak, losses) in ways.items():
        print(f"{name}: {peak:,} bytes, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return ways


if __name__ == "__main__":
    main()
