"""A model to train with its data, and the ways of running it that a command compares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import fusedckpt
from bench.models import dequantize
from bench.work import flop_counter
from fusedckpt import MemoryReport
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.reporting.trial import trial


class Batch(NamedTuple):
    """A model's inputs, and the target that its loss gets besides the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None

    def in_float64(self) -> Batch:
        """Return the same numbers, those with a fraction in float64."""
        return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, self)


class Way(NamedTuple):
    """A way of training a model."""

    # as tables show it
    name: str
    # takes a batch's inputs: the model, a copy that runs otherwise, or a function
    run: Callable[..., Any]
    # where the way is a plan
    plan: fusedckpt.Plan | None = None
    # whether torch.compile compiles it
    is_compiled: bool = False
    # not where derivatives are approximate on purpose: then nothing is judged
    is_exact: bool = True
    # whether it keeps results beside the tensors that autograd saves
    has_cache: bool = False
    # the facts that a reader needs beside the numbers
    note: str = ""


class StepOf(nn.Module):
    """A way of running a model, as a module that has its parameters, and gradients of them."""

    def __init__(self, run: Callable[..., Any], model: nn.Module):
        super().__init__()
        self.run = run
        self.model = model

    def forward(self, batch: Batch) -> Any:
        """Run the way; parameters that are trained have gradients then."""
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self.run(*batch.args, **batch.kwargs)


class Workload(NamedTuple):
    """A model to train, with its batches, its loss and its optimizer."""

    # all ways share its parameters
    model: nn.Module
    # one a step
    batches: Sequence[Batch]
    # of the output and a batch's target
    loss: Callable[[Any, Any], Tensor]
    # makes the optimizer of parameters
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    # learning rates by step, where they are not the optimizer's own
    rates: Sequence[float] | None = None
    # data that no step sees, on which the trained model is tested
    held_out: Batch | None = None

    def backward(self, run: Callable[..., Any], batch: Batch | None = None) -> Tensor:
        """Run forward and backward, by default on the first batch."""
        batch = batch or self.batches[0]
        # held through backward, as in most loops
        output = run(*batch.args, **batch.kwargs)
        loss = self.loss(output, batch.target)
        loss.backward()
        return loss.detach()

    def once(self, run: Callable[..., Any]) -> None:
        """Take a step on the first batch that leaves no trace, such as one that compiles."""
        with trial(StepOf(run, self.model)):
            self.backward(run)

    def gradients(self, run: Callable[..., Any]) -> list[Tensor]:
        """Return the gradients of a step on the first batch that leaves no trace."""
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        with trial(StepOf(run, self.model)):
            self.backward(run)
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]

    def in_float64(self) -> Workload:
        """Return a copy with the same numbers in float64."""
        batches = [batch.in_float64() for batch in self.batches[:1]]
        model = dequantize(copy.deepcopy(self.model)).double()
        return self._replace(model=model, batches=batches)

    def copied(self) -> nn.Module:
        """Return a copy of the model that shares its parameters and buffers."""
        shared = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})

    def planned(self, name: str, model: nn.Module | None = None, **options: Any) -> Way:
        """Plan a copy of the model, or the one that is given, for the first batch."""
        model = self.copied() if model is None else model
        args, kwargs, target = self.batches[0]
        options |= {"loss": lambda y: self.loss(y, target), "progress": False}
        plan = fusedckpt.plan(model, *args, **options, **kwargs)
        return Way(name, plan.apply(model), plan)

    def report(self, run: Callable[..., Any]) -> MemoryReport:
        """Take a step on the first batch, where gradients exist already."""
        batch = self.batches[0]
        model = StepOf(run, self.model)
        return fusedckpt.report(model, batch, loss=lambda y: self.loss(y, batch.target))

    def flops(self, run: Callable[..., Any], backward: bool = True) -> int:
        """Return the FLOPs of forward and backward, or of the forward alone."""
        with trial(StepOf(run, self.model)), flop_counter() as counter:
            if backward:
                self.backward(run)
            else:
                with torch.no_grad():
                    run(*self.batches[0].args, **self.batches[0].kwargs)
        return counter.get_total_flops()

    def peak_bytes(self, run: Callable[..., Any]) -> int:
        """Return the peak of forward and backward, parameters and new gradients included."""
        held = [*self.model.parameters(), *self.model.buffers(), *self.batches[0].args]
        with trial(StepOf(run, self.model)):
            return nbytes_of(held) + peak_bytes(lambda: self.backward(run), held[0].device)
