"""Run a module's forward in a checkpoint: both of its runs find the module in the same state.

Code between forward and backward may change attributes, flags and classes of modules, and a forward
may change its own state, as a counter or a memory of the last keys does: the recompute gets the
state of the call, see `call_state`, and the same forward, also if the module's class changed. Where
it still brings back other tensors than autograd saved, backward raises, see
`checkpointing.samples`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import phases
from fusedckpt.checkpointing.call_state import CallState
from fusedckpt.checkpointing.calls import Options
from fusedckpt.checkpointing.entry import run_checkpoint
from fusedckpt.checkpointing.segment import Segment
from fusedckpt.checkpointing.written_tensors import is_constant
from fusedckpt.layers.notes import NO_NOTES, NOTES, set_notes
from fusedckpt.recipes import shared_layers

# attribute of a module: the name of a parameter that its forward writes, "" for none, None before
# its first call


class RepeatableForward:
    """A forward of a module, for one call with these arguments and its recomputes.

    modules: as those of `recomputed_call`. names: of the last arguments, which are passed by name.
    """

    # for the checkpoint, which puts other buffers back
    is_constant = staticmethod(is_constant)

    def __init__(
        self,
        modules: Sequence[nn.Module],
        forward: Callable[..., Any],
        args: Sequence[Any],
        names: tuple[str, ...] = (),
    ):
        module = modules[0]
        # as a bound method has: the checkpoint looks for the module here
        self.__self__ = module
        self.name_in_errors = f"fuse: {type(module).__name__}"
        self._forward = forward
        self._names = names
        self._state = CallState(modules, args)
        self._context = contextvars.copy_context()
        self._is_first = True

    def __call__(self, *args: Any) -> Any:
        """Run the forward, for a recompute in the state of the first call."""
        if not self._is_first:
            self._state.check()
            with self._state.restored():
                # a copy, as each context is entered once at a time
                return self._context.copy().run(self._run, args)
        self._is_first = False
        if self.__self__.__dict__.get(NOTES, NO_NOTES).writes is None:
            return self._run_first(args)
        result = self._run(args)
        if self._state.end():
            set_notes(self.__self__, writes=self._state.written_parameter())
        return result

    def _run_first(self, args: Sequence[Any]) -> Any:
        """Run the forward, and save its tensors as ever if it writes a tensor without a copy."""
        phase = phases.current()
        segment = phase if isinstance(phase, Segment) and phase.calls[-1].fn is self else None
        if segment is not None:
            segment.provisional = []
        result = self._run(args)
        if not self._state.end() and segment is not None:
            segment.provisional = None
        set_notes(self.__self__, writes=self._state.written_parameter())
        return result

    def _run(self, args: Sequence[Any]) -> Any:
        num_positional = len(args) - len(self._names)
        kwargs = dict(zip(self._names, args[num_positional:], strict=True))
        return self._forward(*args[:num_positional], **kwargs)


def recomputed_call(
    modules: Sequence[nn.Module],
    forward: Callable[..., Any],
    x: Tensor,
    args: Sequence[Any],
    names: tuple[str, ...] = (),
    *,
    regions: Sequence[str] = (),
    draws_torch: bool = True,
    draws_python: bool = False,
) -> Any:
    """Run a module's forward that saves its arguments, and is run again in backward.

    Args:
        modules: the module, those inside, and those among the arguments.
        forward: its forward.
        x: one of the arguments, whose recipe is saved in its place.
        args: the arguments.
        names: of the last arguments, which are passed by name.
        regions: names of regions that do not run again.
        draws_torch: whether the forward may draw random numbers of torch.
        draws_python: whether it may draw random numbers of Python.
    """
    # torch.compile's own checkpoint keeps the tensors that the function reads
    is_compiled = torch.compiler.is_compiling()
    fn = forward if is_compiled and not names else RepeatableForward(modules, forward, args, names)
    options = Options(
        preserve_rng_state=draws_torch,
        preserve_python_rng=draws_python,
        save_regions=tuple(regions),
        samples=True,
        reads_samples_late=True,
    )
    return shared_layers.saving_recipe_of(x, modules[0], run_checkpoint, options, fn, args, {})


def needs_gradient(module: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Whether a call may save tensors for backward: one of these or of its parameters needs it."""
    for x in tensors:
        if x.requires_grad:
            return True
    return any(p.requires_grad for p in module.parameters())
