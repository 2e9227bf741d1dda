"""Reads of tensors by which a forward may compute another function in another call.

A recording runs on a few shapes, with gradients or without. A forward that compares the number of
its rows with another number, or asks whether a tensor requires a gradient, may do something else in
a call, and no run shows it. So while a forward is recorded, sizes of tensors are numbers that know
when code compares them, or numbers computed from them. The last size is that of the weights; the
number of dimensions is recorded instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fusedckpt.outside.watch import is_library

# attributes and methods of tensors that tell their sizes, and those that tell other state
SIZES = frozenset(("shape", "size", "numel", "nelement"))
STATE = frozenset(
    ("requires_grad", "grad", "grad_fn", "is_leaf", "is_inference", "data_ptr", "_version")
)
# and those that tell the number of dimensions
RANKS = frozenset(("dim", "ndim", "ndimension", "shape", "size"))
# the modules of those that are Python code, such as __len__
_OF_TENSORS = "torch._tensor", "torch.overrides"
_OPERATORS = ("add", "sub", "mul", "floordiv", "mod")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def is_called_by_user(frame: FrameType | None) -> bool:
    """Whether the code that runs in a frame is the user's, or called by it as a tensor's method."""
    while frame is not None and frame.f_globals.get("__name__") in _OF_TENSORS:
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_globals.get("__name__"))


def method_name(func: Any) -> str:
    """Return the name of a method of tensors, or of the attribute that a getter reads."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


class WatchedSize(int):
    """A size of a tensor, or a number computed from sizes, that tells when code compares it."""

    note: Callable[[], None]

    def __bool__(self) -> bool:
        self.compared(sys._getframe(1))
        return int(self) != 0

    def compared(self, frame: FrameType) -> None:
        """Note that code of the user, if it runs in this frame, compares the number."""
        if is_called_by_user(frame):
            self.note()

    __hash__ = int.__hash__


def _operator(name: str) -> Any:
    operate = getattr(int, name)

    def method(self: WatchedSize, *others: Any) -> Any:
        result = operate(self, *others)
        return _watched(result, self.note) if type(result) is int else result

    return method


def _comparison(name: str) -> Any:
    compare = getattr(int, name)

    def method(self: WatchedSize, other: Any) -> Any:
        # two sizes of the same input
        if not isinstance(other, WatchedSize):
            self.compared(sys._getframe(1))
        return compare(self, other)

    return method


for _name in _OPERATORS:
    setattr(WatchedSize, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(WatchedSize, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in _COMPARISONS:
    setattr(WatchedSize, f"__{_name}__", _comparison(f"__{_name}__"))


def _watched(size: int, note: Callable[[], None]) -> WatchedSize:
    number = WatchedSize(size)
    number.note = note
    return number


def watched_sizes(result: Any, args: Any, kwargs: Any, note: Callable[[], None]) -> Any:
    """Return the result of a function that tells sizes, with sizes that tell when code compares.

    args, kwargs: of the function; note: is called then.
    """
    x: Tensor = args[0]
    if isinstance(result, torch.Size):
        return torch.Size([*(_watched(size, note) for size in result[:-1]), *result[-1:]])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is not None and dim % x.dim() == x.dim() - 1:
        return result
    return _watched(result, note)
