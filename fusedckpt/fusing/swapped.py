"""The base of fused forwards: a call that was not proven equal runs the original forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from fusedckpt.autograd import dispatch, private, tracker
from fusedckpt.fusing.subclass import made_of, refuse_script
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import ModuleNotes

# the parts of a function, as FunctionType takes them
_FUNCTION = ("__code__", "__globals__", "__name__", "__defaults__", "__closure__")


class Swapped(nn.Module):
    """Forward of a swapped module: fused if proven equal for this call, else the original one."""

    # how many tensors a fused call takes
    _fusedckpt_count = 1
    # their names in the original's signature
    _fusedckpt_names: tuple[str, ...]
    # of a module that is swapped
    _fusedckpt: ModuleNotes
    # returns the result, or why this call cannot run fused
    _fused: Callable[..., Tensor | NotFused]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours, original = made_of(cls) or (nn.Module, nn.Module)
        if issubclass(ours, Swapped):
            # with the original's signature, by which torch.fx names a trace's inputs
            forward = FunctionType(*(getattr(ours.forward, key) for key in _FUNCTION))
            cls.forward = wraps(original.forward)(forward)
            _, *parameters = inspect.signature(original.forward).parameters.values()
            names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            cls._fusedckpt_names = tuple(names[: cls._fusedckpt_count])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fused forward, or that of the original class."""
        tensors = self._by_position(args, kwargs) if kwargs else args
        if not dispatch.is_traced(tensors[0] if tensors else None):
            is_taken = len(tensors) == self._fusedckpt_count
            for x in tensors:
                is_taken = is_taken and isinstance(x, Tensor)
            if private.num_function_modes() and tracker.has_foreign_modes():
                y = NotFused("mode")
            else:
                y = self._fused(*tensors) if is_taken else NotFused("arguments")
            if not isinstance(y, NotFused):
                return y
            fallbacks.note_fallback(self, y)
        if self._fusedckpt.sharding is not None and len(tensors) == 1:
            return sharded.on_dtensors(super().forward, tensors[0], self._fusedckpt.sharding)
        return super().forward(*args, **kwargs)

    __prepare_scriptable__ = refuse_script

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return a fused call's tensors, nothing where others are passed by name."""
        names = self._fusedckpt_names[len(args) :]
        return (*args, *(kwargs[n] for n in names)) if {*names} == kwargs.keys() else ()

    def _original(self, x: Tensor) -> Any:
        return super().forward(x)

    def _function_now(self) -> str:
        """Name the function that it computes now, "" for its own."""
        return ""

    def extra_repr(self) -> str:
        """Describe the module as its class does, and name the function that it computes now."""
        return ", ".join(filter(None, (super().extra_repr(), self._function_now())))
