"""What stands for the tensors of a checkpointed segment while they are dropped."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.checkpointing.replay import Conditions
from fusedckpt.checkpointing.versions import stale, version_of


class _Keep(torch.autograd.Function):
    """Keeps a tensor, as any function does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)


class _Saved:
    """torch's SavedTensor, made of public parts, which cost some microseconds more."""

    _anchor = torch.empty(0, requires_grad=True)

    def __init__(self, tensor: Tensor, is_output: bool):
        with torch.enable_grad():
            self._output = _Keep.apply(self._anchor, tensor)

    def unpack(self) -> Tensor:
        return self._output.grad_fn.saved_tensors[0]


# private to torch, and not in 2.11
_make_saved: Callable[..., Any] = getattr(
    getattr(torch._C, "_autograd", None), "_make_saved_tensor", _Saved
)


class Held:
    """An argument, kept as autograd keeps a tensor: in the custody of an enclosing checkpoint."""

    def __init__(self, tensor: Tensor):
        # detached: a recompute's graph is its own
        data = tensor.detach()
        self.requires_grad = tensor.requires_grad
        self.version = version_of(tensor)
        # autograd refuses to save an inference tensor
        self._saved = data if tensor.is_inference() else _make_saved(data, is_output=False)

    def tensor(self) -> Tensor:
        """Return the argument, detached; raise where it was written in place since."""
        try:
            tensor = self._saved if isinstance(self._saved, Tensor) else self._saved.unpack()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(stale("an argument")) from error
        if tensor is self._saved and version_of(tensor) != self.version:
            raise RuntimeError(stale("an argument", tensor))
        return tensor.detach()


class Output(NamedTuple):
    """An argument that an earlier call of the segment returned."""

    call: int
    leaf: int


class Call(NamedTuple):
    """One call of the segment, its arguments flattened.

    make: returns what was called. level: what fused layers keep in the recompute.
    """

    make: Callable[[], Callable[..., Any]]
    leaves: list[Any]
    spec: Any
    conditions: Conditions
    level: str


def maker(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return what makes `fn` again, with the variables of its closure as they are bound now.

    They may be bound anew before backward: a loop's variable to the next layer, or the input's name
    to the output, which would then hold itself.
    """
    if not isinstance(fn, types.FunctionType) or not fn.__closure__:
        return lambda: fn
    empty = types.CellType()
    contents = [() if cell == empty else (cell.cell_contents,) for cell in fn.__closure__]
    parts = fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__
    keywords, attributes = fn.__kwdefaults__, fn.__dict__

    def make() -> Callable[..., Any]:
        closure = tuple(types.CellType(*content) for content in contents)
        made = types.FunctionType(*parts, closure)
        made.__kwdefaults__ = keywords
        made.__dict__.update(attributes)
        return made

    return make


class Event:
    """Stands for a dropped tensor; autograd holds it, the segment does not."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int):
        self.index = index


class Leaf(NamedTuple):
    """A tensor that stays alive anyway, with its version."""

    tensor: Tensor
    version: int


class View(NamedTuple):
    """An argument, reshaped."""

    held: Held
    size: torch.Size


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, of no subclass, and no lazy conjugate or negative."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_conj() and not tensor.is_neg()


class Marks(NamedTuple):
    """What a saved tensor and the one at its place in the recompute must share.

    The kind of node that it comes from, and the parameter that it is or views, tell apart tensors
    of one shape.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    node: type | None
    parameter: int | None

    def __str__(self) -> str:
        made = "" if self.node is None else f" from {self.node.__name__}"
        return f"{self.dtype} {list(self.shape)} on {self.device}{made}"


def owner_of(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is a view of, or itself."""
    return tensor if (base := tensor._base) is None else base


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is an nn.Parameter."""
    # the check by isinstance takes a microsecond
    kind = type(tensor)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))


def marks_of(tensor: Tensor, made_here: bool, is_argument: bool = False) -> Marks:
    """Return what marks a tensor; an argument, whose graph is not the recompute's, has no node."""
    node = tensor.grad_fn if made_here and type(tensor) is Tensor else None
    owner = owner_of(tensor)
    # an argument that is a parameter comes detached in the recompute
    parameter = id(owner) if not is_argument and is_parameter(owner) else None
    kind = None if node is None else type(node)
    return Marks(tensor.shape, tensor.dtype, tensor.device, kind, parameter)
