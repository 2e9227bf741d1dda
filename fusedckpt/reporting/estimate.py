"""`estimate`: the bytes that a training step saves, and its least peak, without allocating them."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.autograd import arguments
from fusedckpt.autograd.private import pytree
from fusedckpt.fusing.fuse_report import FuseReport
from fusedckpt.fusing.fuser import fuse
from fusedckpt.memory import SavedTensors, nbytes_of, saved_tensors
from fusedckpt.reporting.step import Step, default_loss, optimizers_of
from fusedckpt.reporting.tables import size, table
from fusedckpt.reporting.without_memory import META, MetaRun, on_meta

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_UNKNOWN = (
    "not known: time, memory within kernels, the allocator's cache, the CUDA context;",
    "attention counts as torch's fused kernel saves it, other functions as on a CPU; one process",
    "has all parameters, and a gradient the dtype of its parameter",
)


@dataclass(frozen=True)
class StepEstimate:
    """Bytes of one training step, eager or fused."""

    # saved for backward
    saved_bytes: int
    # the most between two ops, with parameters, gradients and the optimizer's state
    least_peak_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step before and after `fuse`, none of which was allocated."""

    # the class of the model
    model: str
    # dtypes and shapes of the inputs
    inputs: str
    # bytes of all parameters
    parameter_bytes: int
    # bytes of the gradients of the parameters that are trained
    gradient_bytes: int
    # the class of the optimizer
    optimizer: str
    # bytes of its state
    optimizer_bytes: int
    # the estimate of a step before `fuse`
    eager: StepEstimate
    # the estimate of a step after `fuse`
    fused: StepEstimate
    # the report of `fuse` on the model
    report: FuseReport

    def __str__(self) -> str:
        eager = self.eager
        fused = self.fused
        rows_of_bytes = [
            ("parameters", self.parameter_bytes, self.parameter_bytes),
            ("gradients", self.gradient_bytes, self.gradient_bytes),
            (f"state of {self.optimizer}", self.optimizer_bytes, self.optimizer_bytes),
            ("saved for backward", eager.saved_bytes, fused.saved_bytes),
            ("peak, at least", eager.least_peak_bytes, fused.least_peak_bytes),
        ]
        rows = [(name, size(before), size(after)) for name, before, after in rows_of_bytes]
        head = f"Estimate of a training step of {self.model}, {self.inputs}; nothing was allocated"
        return "\n".join((head, table(("", "eager", "fused"), rows, numbers=(1, 2)), *_UNKNOWN))


def estimate(
    factory: Callable[[], Any],
    batch: int | None = None,
    seq: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: str = "AdamW",
) -> Estimate:
    """Return the bytes that a training step of a model saves, and its least peak, eager and fused.

    The factory runs with the meta device as default, so that the model has no memory; forward,
    backward and the optimizer's step run on it, before and after `fuse`. Saved bytes are those of
    the same step on a CPU.

    Args:
        factory: returns a causal language model of transformers, made of a config; or a model and
            its inputs, `(model, args)`, `(model, kwargs)` or `(model, args, kwargs)`: args is a
            tuple or one tensor.
        batch: sequences. Of inputs that the factory returns, each first dimension as long as that
            of the first tensor becomes so long.
        seq: tokens of a sequence; of given inputs the second dimension likewise.
        dtype: default dtype while the factory runs.
        optimizer: a class of torch.optim, with its default options.

    Raises:
        TypeError, ValueError: an argument is wrong, the model is not on the meta device, or its
            forward cannot run there: it reads numbers, or an op has no shapes without them.
    """
    for key, number in (("batch", batch), ("seq", seq)):
        if number is not None:
            arguments.integer("estimate", key, number, least=1)
    if dtype is not None:
        arguments.dtype("estimate", dtype)
    kind = getattr(torch.optim, optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"estimate: optimizer must be a class of torch.optim, got {optimizer!r}")
    run = MetaRun()
    with on_meta(run), _default_dtype(dtype):
        model, args, kwargs = _parts(factory())
        _check_meta(model)
        if args or kwargs:
            args, kwargs = _resized((args, kwargs), batch, seq)
        else:
            kwargs = _tokens(model, batch, seq)
    step = _step(model.train(), args, kwargs, kind, run)
    name = type(model).__name__
    eager = _estimated(step, run)
    report = fuse(model)
    return Estimate(
        model=name,
        inputs=_described((args, kwargs)),
        parameter_bytes=nbytes_of(model.parameters()),
        gradient_bytes=nbytes_of(p for p in model.parameters() if p.requires_grad),
        optimizer=optimizer,
        optimizer_bytes=nbytes_of(step.state()),
        eager=eager,
        fused=_estimated(step, run),
        report=report,
    )


def _step(model: nn.Module, args: Any, kwargs: Any, kind: type[Optimizer], run: MetaRun) -> Step:
    """Return a training step with the optimizer's state made."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        # the cache of keys and values is for generation
        config.use_cache = False
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = optimizers_of("estimate", kind(trained))  # type: ignore[call-arg]
    step = Step(model, args, kwargs, default_loss, optimizers, caller="estimate")
    with run, run.reading_numbers():
        step.make_state(trained)
    model.zero_grad()
    return step


def _estimated(step: Step, run: MetaRun) -> StepEstimate:
    """Take a step on meta tensors, and return its bytes."""
    held = [*step.parameters(), *step.model.buffers(), *step.inputs(), *step.state()]
    run.begin(held)
    saved: list[SavedTensors] = []

    @contextmanager
    def counted() -> Iterator[None]:
        # not in backward: tensors of a recompute were not saved by the forward
        with saved_tensors(held) as tensors:
            saved.append(tensors)
            yield

    try:
        with on_meta(run), torch.enable_grad():
            step.take(run.begin_phase, held, forward_context=counted())
    except Exception as error:  # arbitrary user code
        if str(error).startswith("estimate: "):
            raise
        name = type(step.model).__name__
        raise ValueError(
            f"estimate: {name} cannot run without numbers, at {_line(error)}: "
            f"{str(error).rstrip('.')}. "
            "fusedckpt.report measures a step of a small batch where the model runs"
        ) from error
    step.model.zero_grad()
    return StepEstimate(saved[0].nbytes, run.peak)


def _line(error: BaseException) -> str:
    """Return the innermost line outside of torch and this library."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    frame = (outside or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _parts(made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Read the result of a factory."""
    model, *inputs = made if isinstance(made, (tuple, list)) and made else (made,)
    kwargs = inputs.pop() if inputs and isinstance(inputs[-1], Mapping) else {}
    args = inputs.pop() if inputs else ()
    args = args if isinstance(args, (tuple, list)) else (args,)
    if inputs or not isinstance(model, nn.Module):
        came = ", ".join(type(part).__name__ for part in (made if made is not model else (made,)))
        raise TypeError(
            "estimate: expected of the factory an nn.Module, or (model, args), (model, kwargs) or "
            f"(model, args, kwargs), got {came}"
        )
    return model, tuple(args), dict(kwargs)


def _check_meta(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            raise ValueError(
                f"estimate: expected parameters on the meta device, {name} is on {tensor.device}: "
                "let the factory make the model of a config, without a device or saved weights"
            )
    if not any(tensor.requires_grad for _, tensor in tensors):
        raise ValueError(f"estimate: no parameter of {type(model).__name__} requires grad")


def _tokens(model: nn.Module, batch: int | None, seq: int | None) -> dict[str, Any]:
    """Return the inputs of a causal language model."""
    names = inspect.signature(model.forward).parameters
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not {"input_ids", "labels"} <= names.keys():
        raise ValueError(
            f"estimate: {type(model).__name__} takes {', '.join(names)}, and is no language model "
            "of transformers with a loss: let the factory return (model, inputs)"
        )
    if batch is None or seq is None:
        raise ValueError("estimate: expected batch and seq, the sizes of the tokens")
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
