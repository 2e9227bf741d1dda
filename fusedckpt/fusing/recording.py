"""Run a module's forward once on meta tensors, and record its ops and the state that it reads.

Where the forward does something that a recording cannot cover, it is stopped, and the recording has
the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fusedckpt.fusing.op_recorder import Node, OpRecorder, nodes_behind
from fusedckpt.fusing.replica import Path, undisturbed
from fusedckpt.fusing.spies import ForwardLog, spied_copy
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.state import rng

_AUTOCASTING = ("cpu", "cuda")


@dataclass
class Recording:
    """One run of a forward."""

    # the result, None where the run stopped
    y: Node | None
    # the state that it read
    log: ForwardLog
    # why it stopped
    reason: NotFused | None
    # of the input and of the result
    shapes: tuple[tuple[int, ...], ...] = ()
    # of the input and of the result
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes that made the result, in order, and the result's."""
        return [] if self.y is None else nodes_behind(self.y)


def record(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    training: bool = False,
    rate: tuple[Path, float] | None = None,
    autocast: bool = False,
    strided: bool = False,
    num_inputs: int = 1,
    watched: bool = True,
) -> Recording:
    """Record the ops of a module's forward on an input of this shape.

    Args:
        module: the module; a copy of it runs.
        shape: the shape of each input.
        dtype: of inputs and parameters; None for the module's own.
        training: whether the module trains, and gradients are enabled.
        rate: the path of a dropout rate and its value; in training all others are 0.
        autocast: whether autocast is enabled, which meta tensors ignore.
        strided: whether an input's first two dimensions are transposed in memory.
        num_inputs: how many tensors the forward takes.
        watched: whether the functions that run are noted, which slows the run.
    """
    log = ForwardLog()
    dtype_of_module = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        with undisturbed("meta"), _python_random(log):
            clone = spied_copy(module, log, dtype, training, rate=rate)
            xs = [_meta_input(shape, dtype or dtype_of_module, strided) for _ in range(num_inputs)]
            for x in xs:
                x.requires_grad_(training)
            with (
                torch.set_grad_enabled(training),
                _autocasting(autocast),
                _FunctionWatch(log),
                OpRecorder(log, xs) as recorder,
                log.watch if watched else nullcontext(),
            ):
                y = type(module).forward(clone, *xs)
    except Exception as error:  # arbitrary user code, on meta tensors
        _put_back(log)
        return Recording(
            None, log, log.stop or other_inputs(module) or NotFused("raised", type(error).__name__)
        )
    _put_back(log)
    for name, before, after in log.containers:
        if before != after:
            log.stopped("writes", name)
    if log.stop is None and (not isinstance(y, Tensor) or type(y) is not Tensor):
        log.stopped("returns", type(y).__name__)
    if log.stop is not None:
        return Recording(None, log, log.stop)
    return Recording(
        recorder.node_of(y),
        log,
        reason=None,
        shapes=(shape, tuple(y.shape)),
        dtypes=(xs[0].dtype, y.dtype),
    )


def _put_back(log: ForwardLog) -> None:
    """Put the state outside of the module back, and stop the log if the forward wrote it."""
    written = log.watch.state.put_back()
    if written is not None:
        log.stopped("writes", written)
    if log.watch.state.restore_generators():
        log.stopped("random")


def _meta_input(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device="meta")
    return x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x


def other_inputs(module: nn.Module) -> NotFused | None:
    """Return the inputs that a forward takes besides one tensor, as a reason; None for none."""
    _, first, *others = inspect.signature(type(module).forward).parameters.values()
    kinds = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD, first.KEYWORD_ONLY)
    names = [parameter.name for parameter in others if parameter.kind in kinds]
    if not names:
        return None
    return NotFused("inputs", " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))))


@contextmanager
def _python_random(log: ForwardLog) -> Iterator[None]:
    """Stop the log if numbers of Python's or numpy's generators were drawn."""
    states = rng.RandomStates(rng.PYTHON)
    try:
        yield
    finally:
        if states.have_moved():
            log.stopped("random")


@contextmanager
def _autocasting(enabled: bool) -> Iterator[None]:
    before = [torch.is_autocast_enabled(device) for device in _AUTOCASTING]
    try:
        for device in _AUTOCASTING:
            torch.set_autocast_enabled(device, enabled)
        yield
    finally:
        for device, was in zip(_AUTOCASTING, before, strict=True):
            torch.set_autocast_enabled(device, was)


class _FunctionWatch(TorchFunctionMode):
    """Stops a forward that changes grad or autocast mode, as autograd.Functions do."""

    def __init__(self, log: ForwardLog):
        super().__init__()
        self.log = log
        self.modes = self._modes_now()

    def _modes_now(self) -> list[bool]:
        return [torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _AUTOCASTING)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._modes_now() != self.modes:
            raise self.log.stopped("function")
        if getattr(func, "__name__", "") in ("register_hook", "retain_grad"):
            raise self.log.stopped("tensor hooks")
        if func in (F.dropout, torch.dropout):
            self.log.dropout_rates.append((kwargs or {})["p"] if len(args) < 2 else args[1])
        return func(*args, **(kwargs or {}))
