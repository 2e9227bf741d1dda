"""What a checkpoint's forward leaves for its recompute: calls with their arguments, and stand-ins.

Nothing here keeps alive what would not be alive without the checkpoint, but for the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd.saved_tensor import make_saved
from fusedckpt.autograd.surroundings import ATOMS, Surroundings, objects_in

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Options(NamedTuple):
    """Those of `checkpoint`."""

    preserve_rng_state: bool = True
    preserve_python_rng: bool = False
    determinism_check: str = "default"
    early_stop: bool = True
    debug: bool = False
    context_fn: Callable[[], Contexts] = noop_context_fn


class Argument:
    """A tensor argument, saved as autograd saves one.

    So the recompute gets the same object, an enclosing checkpoint may drop it, and a change in
    place raises autograd's own error.
    """

    def __init__(self, tensor: Tensor):
        self.dtype, self.storage = tensor.dtype, storage_of(tensor)
        self.layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        # autograd refuses to save an inference tensor
        self._saved = tensor if tensor.is_inference() else make_saved(tensor, is_output=False)

    def tensor(self, made: dict[Any, Any] | None = None) -> Tensor:
        """Return the argument; raise where it was written in place since."""
        return self._saved if isinstance(self._saved, Tensor) else self._saved.unpack()


class Packed:
    """Stands for a saved tensor: its index, and where it is while something else keeps it.

    source: a weak reference to a parameter or another leaf, or an Argument; None where only a
    recompute brings the tensor back. layout: of a view of the source. Autograd holds this, the
    segment does not, and so knows which tensors are still wanted.
    """

    __slots__ = ("__weakref__", "index", "layout", "source", "version")

    index: int
    source: TensorWeakRef | Argument | None
    layout: tuple[Any, ...] | None
    version: int


class Call:
    """A call of a segment, to be made again with the same objects in the same surroundings."""

    # at which fused layers compute in the recompute
    level = "preact"

    def __init__(self, fn: Any, args: Any, kwargs: Any, options: Options, hold: Any = Argument):
        self.fn, self._names = fn, tuple(kwargs)
        self.held: list[Any] = []
        # tensors that containers keep, which are no Arguments
        self.inner: list[tuple[Tensor, int]] = []
        objects = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self.held.append(hold(value))
                objects.append(value)
                continue
            self.held.append(value)
            if type(value) not in ATOMS:
                inside = [*objects_in(value)]
                objects += inside
                self.inner += [(x, version_of(x)) for x in inside if isinstance(x, Tensor)]
        self.surroundings = Surroundings(objects, *options[:2])

    def check(self) -> None:
        """Raise where a tensor in a container was written in place since."""
        for tensor, version in self.inner:
            if version_of(tensor) != version:
                raise RuntimeError(stale("an argument", tensor))

    def again(self, made: dict[Any, Any]) -> Any:
        """Call `fn` again; in `made` the calls of one recompute leave what they like for others."""
        values = []
        for held in self.held:
            values.append(held.tensor(made) if isinstance(held, Argument) else held)
        count = len(values) - len(self._names)
        return self.fn(*values[:count], **dict(zip(self._names, values[count:], strict=True)))


def storage_of(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from others while it lives, 0 of one not plain.

    Plain is what is dense, of no subclass, and no lazy conjugate or negative.
    """
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    plain = plain and not tensor.is_conj() and not tensor.is_neg()
    return tensor.untyped_storage()._cdata if plain else 0


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def layout_of(tensor: Tensor) -> tuple[Any, Any, Any]:
    """Return where in its storage a tensor is."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def stale(what: str, tensor: Tensor) -> str:
    """Say that something was written in place between forward and backward."""
    return (
        f"checkpoint: {what} ({tensor.dtype} {list(tensor.shape)}) has been modified by an inplace "
        "operation between forward and backward, so that recomputing would give other values"
    )
