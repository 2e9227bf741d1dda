"""One training step as `report` takes it: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.memory import nbytes_of
from fusedckpt.reporting.trial import aliased, tensors_of


class Step(NamedTuple):
    """One training step.

    gradients: those that are there when it begins, by parameter. beside: bytes that live through it
    unseen, such as a reducer's buckets. last: bytes of the output of the step before, which lives
    until the model returns the next one. is_last: whether the optimizer steps after it. caller: the
    public function that takes it. reseed: puts random states to those that each step begins with.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any]
    optimizer: Optimizer | None
    gradients: Mapping[Tensor, Tensor] = MappingProxyType({})
    beside: int = 0
    last: int = 0
    is_last: bool = True
    caller: str = "report"
    reseed: Callable[[], None] | None = None

    def take(
        self,
        mark: Callable[[str], Any],
        held: list[Tensor],
        around: AbstractContextManager[Any] | None = None,
        made: Callable[[list[Tensor]], Any] = len,
    ) -> None:
        """Run it as a training loop does, where output and loss live on until the next step.

        mark: gets the name of each phase as that begins. around: of forward and loss. made: gets
        the output's tensors and the loss.
        """
        mark("forward")
        with around or nullcontext():
            last = held[0].new_empty(self.last, dtype=torch.uint8)
            output = self.model(*self.args, **self.kwargs)
            del last
            loss = _checked(self.caller, self.loss(output))
        made([*tensors_of([output]), loss])
        # as where autocast ends before backward
        torch.clear_autocast_cache()
        mark("backward")
        loss.backward()
        if self.optimizer is not None and self.is_last:
            mark("optimizer")
            self.optimizer.step()
        mark("end")

    def fresh(self) -> tuple[Step, list[Tensor]]:
        """Return the step from `gradients` alone, on aliases of its inputs, and tensors held."""
        if self.reseed is not None:
            self.reseed()
        # weights that autocast has cast already would not be seen to take memory
        torch.clear_autocast_cache()
        for parameter in self.parameters():
            parameter.grad = self.gradients.get(parameter)
        args, kwargs = aliased((self.args, self.kwargs))
        step = self._replace(args=args, kwargs=kwargs)
        buffers = list(self.model.buffers())
        held = [*self.parameters(), *buffers, *step.inputs(), *self.state()]
        return step, [*held, *self.gradients.values()]

    def resident(self, held: list[Tensor]) -> int:
        """Return the bytes there are on the first parameter's device when the step begins."""
        device = held[0].device
        return nbytes_of(x for x in held if x.device == device) + self.beside

    def inputs(self) -> list[Tensor]:
        """Return the tensors that the model gets."""
        return list(tensors_of((self.args, self.kwargs)))

    def parameters(self) -> list[Tensor]:
        """Return the model's parameters, then those that only the optimizer has."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        theirs = [parameter for group in groups for parameter in group["params"]]
        return list(dict.fromkeys([*self.model.parameters(), *theirs]))

    def state(self) -> list[Tensor]:
        """Return the tensors that the optimizer has, but for parameters and gradients."""
        parameters = {id(x) for x in self.parameters()}
        found = {id(x): x for x in _held_by(self.optimizer, set()) if id(x) not in parameters}
        return list(found.values())


def _held_by(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in an optimizer: in its state, groups and attributes, or one it wraps."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Optimizer):
            value = vars(value)
        if isinstance(value, Mapping):
            value = list(value.values())
        for item in value if isinstance(value, (list, tuple)) else ():
            yield from _held_by(item, seen)


def default_loss(output: Any) -> Any:
    """Return the output's `.loss`, or the sum of the mean squares of its tensors."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    found = [x for x in tensors_of(output) if x.is_floating_point() and x.requires_grad]
    return sum(x.float().square().mean() for x in found)


def _checked(caller: str, loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    came = type(loss).__name__
    if isinstance(loss, Tensor):
        came = f"shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
    raise ValueError(f"{caller}: the loss must be a scalar tensor that requires grad, got {came}")
