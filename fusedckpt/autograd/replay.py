"""A call of a torch function that backward makes again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.dispatch import autocast_dtype, cast_by
from fusedckpt.autograd.private import is_any_autocast_on

# in place of a tensor
_HOLE = object()
# classes of tensors without operations of their own
PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))


class Replay:
    """A call as a function of its tensors alone, under the autocast of the first call.

    It holds no tensor of that. args, kwargs: with holes for tensors; writes: the function
    writes over its first tensor, which is a copy then. A kernel for several functions knows the
    function by `func`.
    """

    __slots__ = ("args", "autocast", "device", "func", "kwargs", "writes")

    def __init__(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device: torch.device,
        writes: bool = False,
    ):
        self.func = func
        self.device = device
        self.writes = writes
        self.args = args
        self.kwargs = kwargs
        self.autocast = autocast_dtype(device) if is_any_autocast_on() else None

    def filled(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with values in place of tensors; those beyond the last are left."""
        remaining = iter(values)
        args = [_filled(value, remaining) for value in self.args]
        return args, {name: _filled(value, remaining) for name, value in self.kwargs.items()}

    def __call__(self, *tensors: Tensor) -> Any:
        """Call the function with other tensors."""
        if self.writes:
            tensors = tensors[0].clone(), *tensors[1:]
        args, kwargs = self.filled(tensors)
        with cast_by(self.device, self.autocast):
            return self.func(*args, **kwargs)


def _emptied(values: Iterable[Any], tensors: list[Tensor]) -> list[Any]:
    """Return values with holes in place of tensors, which are appended to a list."""
    holed: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind in PLAIN_TENSORS or isinstance(value, Tensor):
            tensors.append(value)
            holed.append(_HOLE)
        elif kind is list or kind is tuple:
            holed.append(kind(_emptied(value, tensors)))
        else:
            holed.append(value)
    return holed


def replay_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], writes: bool = False
) -> tuple[Replay, list[Tensor]]:
    """Return a call as a function of its tensors, and these, of which there is at least one."""
    tensors: list[Tensor] = []
    args = _emptied(args, tensors)
    if kwargs:
        kwargs = dict(zip(kwargs, _emptied(kwargs.values(), tensors), strict=True))
    return Replay(func, args, kwargs, tensors[0].device, writes), tensors


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value with tensors in its holes."""
    if value is _HOLE:
        return next(tensors)
    if type(value) in (list, tuple):
        return type(value)([_filled(part, tensors) for part in value])
    return value
