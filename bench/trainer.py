"""Training a model step by step, and what a step of it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bench import tasks
from bench.results import MIB
from fusedckpt.memory import peak_bytes, saved_tensors

__all__ = ["Trainer"]


class Trainer:
    """One model with its optimizer, its losses and the time of its steps."""

    def __init__(self, name: str, model: nn.Module, device: torch.device, dim: int, steps: int):
        self.name, self.model, self.device = name, model, device
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        lr = min(3e-3, 0.75 / dim)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        ramp = max(1, steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / ramp, 1.1 - step / steps)
        )

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        return tasks.loss(self.model(inputs), targets)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.step_ms.append(1e3 * (time.perf_counter() - start))

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward, backward and update, timed together."""
        with self._timed():
            loss = self.loss(inputs, targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.losses.append(loss.item())

    def saved_mib(self, inputs: Tensor, targets: Tensor) -> float:
        """What forward and loss keep for backward, without inputs, parameters and buffers."""
        held = [inputs, targets, *self.model.parameters(), *self.model.buffers()]
        with saved_tensors(exclude=held) as saved:
            self.loss(inputs, targets)
        return saved.nbytes / MIB

    def peak_mib(self, inputs: Tensor, targets: Tensor) -> float:
        """How high forward and backward climb above a step's start, new gradients included."""
        peak = peak_bytes(lambda: self.loss(inputs, targets).backward(), self.device)
        self.optimizer.zero_grad(set_to_none=True)
        return peak / MIB
