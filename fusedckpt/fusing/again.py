"""A module's forward that a checkpoint calls twice: both calls find the module in the same state.

Code between forward and backward may change attributes, flags and classes of modules, and a forward
may change its own state, as a counter or a memory of the last keys does: the recompute gets the
state of the call, see `state`, and the same forward, whatever class the module has then. Where it
still brings back other tensors than autograd saved, backward raises, see
`checkpointing.samples`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fusedckpt.checkpointing.segment import checkpoint
from fusedckpt.fusing import sharing
from fusedckpt.fusing.sharing import recipe_of
from fusedckpt.fusing.state import State
from fusedckpt.fusing.written import is_constant


class Again:
    """A forward of a module, for one call with these arguments and its recomputes.

    names: of the last arguments.
    """

    # for the checkpoint, which puts other buffers back
    is_constant = staticmethod(is_constant)

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        names: tuple[str, ...] = (),
    ):
        self.__self__, self._forward, self._names = module, forward, names
        self.name_in_errors = f"fuse: {type(module).__name__}"
        self._state, self._is_first = State(module, args), True
        self._context = contextvars.copy_context()

    def __call__(self, *args: Any) -> Any:
        """Run the forward, for a recompute in the state of the first call."""
        if not self._is_first:
            self._state.check()
            with self._state.restored():
                # a copy, as each context is entered once at a time
                return self._context.copy().run(self._run, args)
        self._is_first = False
        result = self._run(args)
        self._state.end()
        return result

    def _run(self, args: Sequence[Any]) -> Any:
        count = len(args) - len(self._names)
        kwargs = dict(zip(self._names, args[count:], strict=True))
        return self._forward(*args[:count], **kwargs)


def recomputed(
    module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, draws: bool
) -> Tensor:
    """Run a module's forward that saves x, or the recipe of x, and is run again in backward."""
    if not needs_gradient(module, (x,)):
        return forward(x)
    recipe, again = recipe_of(x), Again(module, forward, (x,))
    run = partial(checkpoint, again, preserve_rng_state=draws, debug="samples")
    return run(x) if recipe is None else sharing.read(recipe, x, run)


def needs_gradient(module: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Whether a call may save tensors for backward: one of these or of its parameters needs it."""
    return any(x.requires_grad for x in tensors) or any(
        p.requires_grad for p in module.parameters()
    )
