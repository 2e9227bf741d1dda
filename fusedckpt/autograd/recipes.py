"""Recipes: a saved tensor is made again from less, whatever made it.

Between two GEMMs a model runs cheap functions: norms, activations, dropouts, gates, sums. Autograd
saves the results that their readers need:

    h = conv(x)           saves x
    b = batch_norm(h)     saves h
    r = relu(b)           saves r
    y = conv(r)           saves r, the same storage
    z = silu(y * gate)    saves y, gate, and y * gate

Here r can be made again from h, and y * gate from y and gate, which are saved anyway. So autograd
saves, in place of r, the recipe of r: relu of batch_norm of h. Backward makes r once for all of its
readers, right before the first of them needs it.

A result has a recipe if each input of its function has one, is saved by now, or is small. So a sum
`x + f(x)` is made again where both parts are saved anyway, and is saved itself where they are not.
Recipes chain, up to a limit: a longer chain would hold many values at once in backward, so its
value is saved, and ends the chain.

    Stored    the object that autograd saves in place of a tensor: a `View`
    View      sizes, strides and offset of a tensor in the storage of a source
    Leaf      a source that is saved
    Made      a source that is a function's result: the function, and `View`s of its inputs
    Tracker   knows the sources of the storages that are alive during a forward

Tensors are recognised by their storage and version: views need no recipe of their own, and a write
ends a recipe. A tracker holds no tensor that autograd does not: after the forward only autograd's
saved tensors hold recipes, and none outlives the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.private import (
    at_end_of_backward,
    backward_id,
    num_function_modes,
    storage_key,
)

# the longest chain of functions that backward runs again
LIMIT = 12
# inputs of a function that are saved for its recipe alone may take this share of its results
SHARE = 4
# a result so many times smaller than an input is saved
SMALLER = 16
# storages that a tracker knows before it forgets those that are gone
_MANY = 64


class Leaf:
    """A tensor that is saved; reading it raises if it was modified since."""

    depth = 0

    def __init__(self, tensor: Tensor, count: Callable[[Tensor], Any] | None):
        # shares the version of the tensor, but not its graph
        self._tensor = tensor.detach()
        self._count = count
        self.version = tensor._version

    def is_current(self) -> bool:
        """Whether the tensor is as it was."""
        return self._tensor._version == self.version

    def value(self, place: int) -> Tensor:
        """Return the tensor."""
        if not self.is_current():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._tensor.dtype} {list(self._tensor.shape)} is at version "
                f"{self._tensor._version}; expected version {self.version} instead"
            )
        return self._tensor

    def add_reader(self) -> None:
        """Count the tensor, once, for hooks that count saved tensors."""
        count, self._count = self._count, None
        if count is not None:
            count(self._tensor)


class ResultLayout(NamedTuple):
    """How a result lies in its storage, which it fills."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Made:
    """The results of a cheap function of other sources."""

    def __init__(
        self, again: Callable[..., Any], inputs: Sequence[View], results: Sequence[Tensor]
    ):
        # returns the results for the inputs' values; must not hold a tensor
        self.again = again
        self.inputs = inputs
        self.layouts = [ResultLayout(t.shape, t.stride(), t.dtype) for t in results]
        self.depth = 1 + max((view.source.depth for view in inputs), default=0)
        # saved tensors, and other recipes, that read the results, and those that did not yet
        self.num_readers = 0
        self._left = 0
        self._values: list[Tensor] | None = None

    def add_reader(self) -> None:
        """Count a reader; the first one makes this a reader of its inputs."""
        if not self.num_readers:
            for view in self.inputs:
                view.source.add_reader()
        self.num_readers += 1
        self._left += 1

    def is_current(self) -> bool:
        """Whether the inputs are as they were, so that this makes the results again."""
        return self.num_readers > 0 or all(view.source.is_current() for view in self.inputs)

    def value(self, place: int) -> Tensor:
        """Return a result; it stays for the readers that are left in this backward."""
        values = self._values
        if values is None:
            results = tensors_in(self.again(*[view.read() for view in self.inputs]))
            values = [_laid_out(*pair) for pair in zip(results, self.layouts, strict=True)]
        self._left -= 1
        if self._left > 0 and backward_id() != -1:
            if self._values is None:
                # by a weak reference, as this holds what its graph has freed by then
                at_end_of_backward(partial(_forget, weakref.ref(self)))
            self._values = values
        else:
            self.forget()
        return values[place]

    def forget(self) -> None:
        """Free the results."""
        self._left, self._values = self.num_readers, None


def _forget(reference: weakref.ref[Made]) -> None:
    made = reference()
    if made is not None:
        made.forget()


def _laid_out(result: Tensor, layout: ResultLayout) -> Tensor:
    """Return a result with the strides that it had: its views are read by these."""
    if result.stride() == layout.stride and result.storage_offset() == 0:
        return result
    tensor = torch.empty_strided(
        layout.shape, layout.stride, dtype=result.dtype, device=result.device
    )
    return tensor.copy_(result)


class View(NamedTuple):
    """A tensor in the storage of a source."""

    # the source of the storage's content
    source: Leaf | Made
    # its place among the source's results
    place: int
    # the tensor's shape, and how it lies in the storage, in elements
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """Return the tensor."""
        value = self.source.value(self.place)
        layout = value.shape, value.stride(), value.storage_offset()
        if layout == (self.size, self.stride, self.offset):
            return value
        return value.as_strided(self.size, self.stride, self.offset)


def _view(source: Leaf | Made, place: int, tensor: Tensor) -> View:
    offset = int(tensor.storage_offset())
    return View(source, place, tensor.shape, tensor.stride(), offset)


class Stored:
    """The object that autograd saves in place of a tensor."""

    def __init__(self, tensor: Tensor | None, view: View | None = None):
        # until the tracker has resolved it
        self.tensor = None if tensor is None else tensor.detach()
        self.view = view
        if view is not None:
            view.source.add_reader()

    def read(self) -> Tensor:
        """Return the tensor."""
        assert self.view is not None
        with torch.no_grad():
            return self.view.read()


class _Known(NamedTuple):
    """The source of a storage's content."""

    # the storage, which lives as long as its tensors do
    storage: StorageWeakRef
    # the version and dtype of the tensor that had the content
    version: int
    dtype: torch.dtype
    # the function that made it; None: autograd saves the storage itself
    made: Made | None
    # its place among the function's results
    place: int

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the content is that of a tensor over this storage."""
        is_same = (self.version, self.dtype) == (tensor._version, tensor.dtype)
        return is_same and not self.storage.expired()


class Tracker:
    """The sources of the tensors of one forward.

    count: called with each tensor that is saved, for hooks that count saved tensors.
    """

    def __init__(self, count: Callable[[Tensor], Any] | None = None):
        self.count = count
        self._made: dict[int, _Known] = {}
        self._saved: dict[int, _Known] = {}
        self._room = _MANY
        self._leaves: weakref.WeakValueDictionary[Any, Leaf] = weakref.WeakValueDictionary()

    def find(self, tensor: Tensor) -> View | None:
        """Return how to read a tensor that is saved by now, or has a recipe."""
        key = key_of(tensor)
        saved = self._saved.get(key)
        if saved is not None and saved.is_of(tensor):
            return _view(self._leaf(tensor), 0, tensor)
        known = self._made.get(key)
        if known is None or known.made is None or not known.is_of(tensor):
            return None
        return _view(known.made, known.place, tensor)

    def view_of(self, tensor: Tensor) -> View | None:
        """Return how a reader reads a tensor that has a recipe, None where it saves the tensor."""
        view = self.find(tensor)
        if view is None or isinstance(view.source, Leaf) or view.source.depth > LIMIT:
            return None
        return view if view.source.is_current() else None

    def note_saved(self, tensor: Tensor) -> None:
        """Note that autograd saves a tensor, as it is."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._saved[storage_key(storage)] = _Known(
            reference, tensor._version, tensor.dtype, None, 0
        )

    def note_made(
        self,
        again: Callable[..., Any],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        overwritten: View | None = None,
    ) -> None:
        """Note the recipe of results, `again(*inputs)`, if every input can be read in backward.

        overwritten: how to read the first input, where the function wrote the result over it.
        """
        # a part of a storage cannot be made again with its strides
        if any(t.untyped_storage().nbytes() != t.nbytes for t in results):
            return
        written = {key_of(t) for t in results}
        size = sum(t.nbytes for t in results)
        if any(x.nbytes > size * SMALLER for x in inputs):
            return
        room = size // SHARE
        views: list[View] = [] if overwritten is None else [overwritten]
        for x in inputs[len(views) :]:
            if key_of(x) in written:
                return
            view = None if _is_parameter(x) else self.find(x)
            if view is None:
                room -= x.nbytes
                if room < 0:
                    return
                # a copy, as code may write to a tensor that autograd does not save, and a parameter
                # may be whole in its module's forward and backward alone
                copy = x.detach().clone()
                view = _view(Leaf(copy, self.count), 0, copy)
            views.append(view)
        made = Made(again, views, results)
        for place, t in enumerate(results):
            storage = t.untyped_storage()
            reference = StorageWeakRef(storage)
            self._made[storage_key(storage)] = _Known(reference, t._version, t.dtype, made, place)
        if len(self._made) + len(self._saved) > self._room:
            self._trim()

    def _trim(self) -> None:
        """Forget storages that are gone, once as many are known as twice those that were left."""
        for known in (self._made, self._saved):
            for key in [key for key, one in known.items() if one.storage.expired()]:
                del known[key]
        self._room = max(_MANY, 2 * (len(self._made) + len(self._saved)))

    def resolve(self, fresh: Iterable[Stored]) -> None:
        """Let autograd save recipes in place of tensors, where there are any."""
        for saved in fresh:
            tensor, saved.tensor = saved.tensor, None
            assert tensor is not None
            view = self.view_of(tensor)
            if view is None:
                self.note_saved(tensor)
                view = _view(self._leaf(tensor), 0, tensor)
            view.source.add_reader()
            saved.view = view

    def _leaf(self, tensor: Tensor) -> Leaf:
        """Return the leaf of a storage: the same one for all that read it."""
        key = key_of(tensor), tensor.dtype
        leaf = self._leaves.get(key)
        if leaf is None or leaf.version != tensor._version:
            self._leaves[key] = leaf = Leaf(tensor, self.count)
        return leaf


def _is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


# the tracker of the forward that runs in this context
_active: ContextVar[Tracker | None] = ContextVar("tracker", default=None)
active = _active.get


@contextmanager
def tracking(tracker: Tracker) -> Iterator[None]:
    """Let fused layers that are called inside know the tracker of the forward."""
    token = _active.set(tracker)
    try:
        yield
    finally:
        _active.reset(token)


def num_other_modes() -> int:
    """Return the number of function modes around a call, but for the one of a tracker."""
    return max(0, num_function_modes() - (_active.get() is not None))


def key_of(tensor: Tensor) -> int:
    """Return a number of a tensor's storage, its own as long as it lives."""
    return storage_key(tensor.untyped_storage())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value: itself, or those in lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []
