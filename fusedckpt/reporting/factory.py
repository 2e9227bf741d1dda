"""A factory's model and inputs, on the meta device or another, at the sizes that are asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.autograd import arguments, private_memory
from fusedckpt.autograd.accumulation import gradient_dtype
from fusedckpt.autograd.private import pytree
from fusedckpt.reporting.memory_report import MemoryReport, ProfiledRun, memory_of
from fusedckpt.reporting.meta_step import estimated
from fusedckpt.reporting.step import Step, default_loss, optimizers_of
from fusedckpt.reporting.trial import trial
from fusedckpt.reporting.without_memory import META, MetaRun, on_meta


@dataclass(frozen=True)
class MadeModel:
    """A model, and a training step of it."""

    # the model, on the meta device where it is estimated
    model: nn.Module
    # dtypes and shapes of the inputs
    inputs: str
    # a training step of the model
    step: Step
    # where the factory ran: on meta it has the values of integers that were made
    place: MetaRun | torch.device
    # returns args and kwargs of other sizes, batch and seq
    resize: Callable[[int | None, int | None], tuple[Any, Any]]

    def resized(self, batch: int | None, seq: int | None) -> MadeModel:
        """Return the same model with inputs of other sizes."""
        with _made_in(self.place):
            args, kwargs = self.resize(batch, seq)
        step = self.step._replace(args=args, kwargs=kwargs)
        return replace(self, step=step, inputs=_described((args, kwargs)))

    def estimated(
        self, device: torch.device | None = None, accumulate: bool = False
    ) -> MemoryReport:
        """Return the estimate of a step of the model as it is now.

        device: the kind that it would run on. accumulate: whether gradients exist when it begins.
        """
        run = self.place
        assert isinstance(run, MetaRun)
        with on_meta(run), run.reading_numbers(), private_memory.optimizers_of_a(device or META):
            # once, or each estimate would take two steps
            self.step.make_state(self._trained())
        self.model.zero_grad()
        return estimated(self._begun(accumulate), run, device)

    def measured(self, accumulate: bool = False) -> MemoryReport:
        """Return the report of a step that is taken, on the model's device."""
        step = self._begun(accumulate)
        inputs = step.args, step.kwargs
        with trial(self.model, step.optimizers, inputs, loss=step.loss), torch.enable_grad():
            return memory_of(step, ProfiledRun(self.model), str(step.device))

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _begun(self, accumulate: bool) -> Step:
        """Return the step, with gradients that exist when it begins."""
        if not accumulate:
            return self.step
        like = torch.empty_like if isinstance(self.place, MetaRun) else torch.zeros_like
        gradients = {p: like(p, dtype=gradient_dtype(p)) for p in self._trained()}
        return self.step._replace(gradients=gradients)


def made_by_factory(
    caller: str,
    factory: Callable[[], Any],
    batch: int | None = None,
    seq: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: str | None = "AdamW",
    device: torch.device = META,
) -> MadeModel:
    """Call a factory with a default device: with meta its model has no memory.

    Args:
        caller: the name of the caller in errors.
        factory: returns a causal language model of transformers, made of a config; or a model and
            its inputs, `(model, args)`, `(model, kwargs)` or `(model, args, kwargs)`: args is a
            tuple or one tensor.
        batch: sequences. Of inputs that the factory returns, each first dimension as long as that
            of the first tensor becomes so long.
        seq: tokens of a sequence; of given inputs the second dimension likewise.
        dtype: default dtype while the factory runs.
        optimizer: a class of torch.optim, with its default options; None for none.
        device: another default device, on which a step can be measured.

    Raises:
        TypeError, ValueError: an argument is wrong, or the model is not on the device.
    """
    for key, number in (("batch", batch), ("seq", seq)):
        if number is not None:
            arguments.integer(caller, key, number, least=1)
    if dtype is not None:
        arguments.dtype(caller, dtype)
    kind = optimizer_class(caller, optimizer)
    place = MetaRun() if device == META else device
    with _made_in(place), _default_dtype(dtype):
        model, args, kwargs = _parts(caller, factory())
        _check_device(caller, model, device)

        def resize(batch: int | None, seq: int | None) -> tuple[Any, Any]:
            if args or kwargs:
                return _resized((args, kwargs), batch, seq, device)
            return (), _tokens(caller, model, batch, seq)

        inputs = resize(batch, seq)
    step = _step(caller, model.train(), *inputs, kind)
    return MadeModel(model, _described(inputs), step, place, resize)


def _made_in(place: MetaRun | torch.device) -> AbstractContextManager[Any]:
    return on_meta(place) if isinstance(place, MetaRun) else place


def optimizer_class(caller: str, name: str | None) -> type[Optimizer] | None:
    """Return a class of torch.optim by its name."""
    if name is None:
        return None
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ValueError(f"{caller}: optimizer must be a class of torch.optim, got {name!r}")
    return kind


def _step(
    caller: str, model: nn.Module, args: Any, kwargs: Any, kind: type[Optimizer] | None
) -> Step:
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        # the cache of keys and values is for generation
        config.use_cache = False
    trained = [p for p in model.parameters() if p.requires_grad]
    made = None if kind is None else kind(trained)  # type: ignore[call-arg]
    optimizers = optimizers_of(caller, made)
    return Step(model, args, kwargs, default_loss, optimizers, caller=caller)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _parts(caller: str, made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Read the result of a factory."""
    model, *inputs = made if isinstance(made, (tuple, list)) and made else (made,)
    kwargs = inputs.pop() if inputs and isinstance(inputs[-1], Mapping) else {}
    args = inputs.pop() if inputs else ()
    args = args if isinstance(args, (tuple, list)) else (args,)
    if inputs or not isinstance(model, nn.Module):
        came = ", ".join(type(part).__name__ for part in (made if made is not model else (made,)))
        raise TypeError(
            f"{caller}: the factory must return an nn.Module, (model, args), (model, kwargs) or "
            f"(model, args, kwargs), got {came}"
        )
    return model, tuple(args), dict(kwargs)


def _check_device(caller: str, model: nn.Module, device: torch.device) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if isinstance(tensor, nn.Parameter) and tensor.device.type != device.type:
            raise ValueError(
                f"{caller}: expected parameters on the {device.type} device, {name} is on "
                f"{tensor.device}: let the factory make the model of a config, without a device or "
                "saved weights"
            )
    if not any(tensor.requires_grad for _, tensor in tensors):
        raise ValueError(
            f"{caller}: no parameter of {type(model).__name__} requires grad, so a step trains "
            "nothing: let the factory return a model with trainable parameters"
        )


def _tokens(caller: str, model: nn.Module, batch: int | None, seq: int | None) -> dict[str, Any]:
    """Return the inputs of a causal language model."""
    names = inspect.signature(model.forward).parameters
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not {"input_ids", "labels"} <= names.keys():
        raise ValueError(
            f"{caller}: {type(model).__name__} takes {', '.join(names)}, and is no language model "
            "of transformers with a loss: let the factory return (model, inputs)"
        )
    if batch is None or seq is None:
        raise ValueError(
            f"{caller}: the factory returned no inputs: pass batch and seq, sizes of input_ids, "
            "or let it return (model, inputs)"
        )
    ids = torch.zeros(batch, seq, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _resized(inputs: Any, batch: int | None, seq: int | None, device: torch.device) -> Any:
    """Return inputs on a device, of the sizes that are asked for."""
    first = next((x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)), None)
    lengths = () if first is None else first.shape[:2]

    def resized(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        shape = list(x.shape)
        for axis, (length, wanted) in enumerate(zip(lengths, (batch, seq), strict=False)):
            if wanted is not None and axis < len(shape) and shape[axis] == length:
                shape[axis] = wanted
        return x.new_zeros(shape, device=device).requires_grad_(x.requires_grad)

    return pytree.tree_map(resized, inputs)


def _described(inputs: Any) -> str:
    """Write dtypes and shapes of tensors."""
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    texts = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors]
    return ", ".join(dict.fromkeys(texts))
