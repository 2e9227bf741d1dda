"""A module's forward that a checkpoint calls twice: both calls find the module in the same state.

Code between forward and backward may change attributes, flags and parameters, and a forward may
change its own, as a counter or a memory of the last keys does. The first call notes the state of
the module and of those inside, shallowly; the recompute runs in it, and the present state is put
back after it. A buffer is copied if it is small, or if code of its module writes in place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.checkpointing.segment import checkpoint
from fusedckpt.fusing import sharing
from fusedckpt.fusing.reasons import called_by
from fusedckpt.fusing.sharing import recipe_of

_State = dict[str, Any]
# bytes of a buffer that is copied in any case
_SMALL = 1 << 16


class Again:
    """A forward of a module, for one call and its recomputes; names: of the last arguments."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], names: tuple[str, ...] = ()):
        self.__self__, self._forward, self._names = module, forward, names
        self._states: list[tuple[nn.Module, _State]] = []
        self._flags: list[tuple[Tensor, bool]] = []

    def __call__(self, *given: Any) -> Any:
        """Run the forward, for a recompute in the state of the first call."""
        count = len(given) - len(self._names)
        args, kwargs = given[:count], dict(zip(self._names, given[count:], strict=True))
        if self._states:
            with self._restored():
                return self._forward(*args, **kwargs)
        module = self.__self__
        self._states = [(one, _copied(one, vars(one))) for one in module.modules()]
        self._flags = [(p, p.requires_grad) for p in module.parameters() if p.is_leaf]
        return self._forward(*args, **kwargs)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Put the modules into the state of the first call meanwhile."""
        present = [(one, dict(vars(one))) for one, _ in self._states]
        toggled = [p for p, flag in self._flags if p.requires_grad != flag]
        try:
            for one, state in self._states:
                _put(one, _copied(one, state))
            _toggle(toggled)
            yield
        finally:
            _toggle(toggled)
            for one, state in present:
                _put(one, state)


def recomputed(
    module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, draws: bool
) -> Tensor:
    """Run a module's forward that saves x, or the recipe of x, and is run again in backward."""
    recipe = recipe_of(x)
    again = partial(checkpoint, Again(module, forward), preserve_rng_state=draws)
    return again(x) if recipe is None else sharing.read(recipe, x, again)


def _toggle(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)


def _put(module: nn.Module, state: _State) -> None:
    attributes = vars(module)
    attributes.clear()
    attributes.update(state)


def _copied(module: nn.Module, state: _State) -> _State:
    """Return attributes, containers copied, and the buffers that may be written."""
    # those of parameters, buffers and children among them
    containers = (dict, list, set, deque)
    found = {k: type(v)(v) if type(v) in containers else v for k, v in state.items()}
    most = math.inf if _writes(type(module)) else _SMALL
    for name, buffer in found["_buffers"].items():
        if buffer is None or buffer.requires_grad or buffer.layout is not torch.strided:
            continue
        if buffer.nbytes <= most:
            found["_buffers"][name] = buffer.detach().clone()
    return found


@cache
def _writes(kind: type[nn.Module]) -> bool:
    """Whether the code of a class writes to tensors in place."""
    return any(name.endswith("_") and not name.endswith("__") for name in called_by(kind))
