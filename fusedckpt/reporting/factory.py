"""A factory's model and inputs on the meta device, at the sizes that are asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.autograd import arguments, private_memory
from fusedckpt.autograd.accumulation import gradient_dtype
from fusedckpt.autograd.private import pytree
from fusedckpt.reporting.memory_report import MemoryReport
from fusedckpt.reporting.meta_step import estimated
from fusedckpt.reporting.step import Step, default_loss, optimizers_of
from fusedckpt.reporting.without_memory import META, MetaRun, on_meta


@dataclass(frozen=True)
class MadeModel:
    """A model without memory, and a training step of it."""

    # the model, on the meta device
    model: nn.Module
    # dtypes and shapes of the inputs
    inputs: str
    # a training step of the model
    step: Step
    # has the values of integers that the factory made
    run: MetaRun
    # returns args and kwargs of other sizes, batch and seq
    resize: Callable[[int | None, int | None], tuple[Any, Any]]

    def resized(self, batch: int | None, seq: int | None) -> MadeModel:
        """Return the same model with inputs of other sizes."""
        with on_meta(self.run):
            args, kwargs = self.resize(batch, seq)
        step = self.step._replace(args=args, kwargs=kwargs)
        return replace(self, step=step, inputs=_described((args, kwargs)))

    def estimated(
        self, device: torch.device | None = None, accumulate: bool = False
    ) -> MemoryReport:
        """Return the estimate of a step of the model as it is now.

        device: the kind that it would run on. accumulate: whether gradients exist when it begins.
        """
        step = self.step
        trained = [p for p in self.model.parameters() if p.requires_grad]
        with (
            on_meta(self.run),
            self.run.reading_numbers(),
            private_memory.optimizers_of_a(device or META),
        ):
            # once, or each estimate would take two steps
            step.make_state(trained)
        self.model.zero_grad()
        if accumulate:
            gradients = {p: torch.empty_like(p, dtype=gradient_dtype(p)) for p in trained}
            step = step._replace(gradients=gradients)
        return estimated(step, self.run, device)


def made_on_meta(
    caller: str,
    factory: Callable[[], Any],
    batch: int | None = None,
    seq: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: str | None = "AdamW",
) -> MadeModel:
    """Call a factory with the meta device as default, so that its model has no memory.

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

    Raises:
        TypeError, ValueError: an argument is wrong, or the model is not on the meta device.
    """
    for key, number in (("batch", batch), ("seq", seq)):
        if number is not None:
            arguments.integer(caller, key, number, least=1)
    if dtype is not None:
        arguments.dtype(caller, dtype)
    kind = optimizer_class(caller, optimizer)
    run = MetaRun()
    with on_meta(run), _default_dtype(dtype):
        model, args, kwargs = _parts(caller, factory())
        _check_meta(caller, model)

        def resize(batch: int | None, seq: int | None) -> tuple[Any, Any]:
            if args or kwargs:
                return _resized((args, kwargs), batch, seq)
            return (), _tokens(caller, model, batch, seq)

        inputs = resize(batch, seq)
    step = _step(caller, model.train(), *inputs, kind)
    return MadeModel(model, _described(inputs), step, run, resize)


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


def _check_meta(caller: str, model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            raise ValueError(
                f"{caller}: expected parameters on the meta device, {name} is on {tensor.device}: "
                "let the factory make the model of a config, without a device or saved weights"
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


def _resized(inputs: Any, batch: int | None, seq: int | None) -> Any:
    """Return inputs on the meta device, of the sizes that are asked for."""
    first = next((x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)), None)
    lengths = () if first is None else first.shape[:2]

    def resized(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        shape = list(x.shape)
        for axis, (length, wanted) in enumerate(zip(lengths, (batch, seq), strict=False)):
            if wanted is not None and axis < len(shape) and shape[axis] == length:
                shape[axis] = wanted
        return x.new_zeros(shape, device=META).requires_grad_(x.requires_grad)

    return pytree.tree_map(resized, inputs)


def _described(inputs: Any) -> str:
    """Write dtypes and shapes of tensors."""
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    texts = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors]
    return ", ".join(dict.fromkeys(texts))
