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

    Stored    the object that autograd saves in place of a tensor: a `View`
    View      sizes, strides and offset of a tensor in the storage of a source
    Leaf      a source that is saved
    Made      a source that is a function's result: the function, and `View`s of its inputs

A recipe is known by the node of autograd's graph that made a tensor (`origins`: fused norms, and
the layers that `fuse` lets read them), or by a tensor's storage (`tracker`: any function of a
forward). A reader asks both, and saves a `Stored`.

**How a chain runs in backward.** Autograd unpacks a `Stored`, which reads its view, which asks its
source for a value. A `Made` reads its inputs, which may be `Made` themselves, and calls `again`
with them; a value stays for the readers that this backward has left. So the functions of a chain
run one by one, the deepest first. A kernel that computes several of them at once belongs in
`KERNELS`: it gets the last `Made` of a chain, looks at `again` of it and of the sources of its
`inputs`, reads the inputs of the whole chain, and returns the results, or None for a chain that it
does not know.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusedckpt.autograd import private
from fusedckpt.autograd.private import at_end_of_backward, backward_id, storage_key

# a hook that counts a saved tensor, None where nothing counts
Count = Callable[[Tensor], Any] | None


class Leaf:
    """A tensor that is saved; reading it raises if it was modified since."""

    depth = 0
    name = "saved"

    def __init__(self, tensor: Tensor):
        # shares the version of the tensor, but not its graph
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        # None where writes are not counted
        self.version = None if tensor.is_inference() else tensor._version

    @property
    def dtype(self) -> torch.dtype:
        """Return the tensor's dtype."""
        return self._tensor.dtype

    def is_current(self) -> bool:
        """Whether the tensor is as it was."""
        return self.version is None or self._tensor._version == self.version

    def value(self, place: int) -> Tensor:
        """Return the tensor."""
        # `is_current`, without a call for every reader
        if self.version is not None and self._tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._tensor.dtype} {list(self._tensor.shape)} is at version "
                f"{self._tensor._version}; expected version {self.version} instead"
            )
        return self._tensor

    def expect(self) -> None:
        """Do nothing: the tensor stays."""

    def add_reader(self, count: Count) -> None:
        """Count the tensor for a hook that counts saved tensors."""
        if count is not None:
            count(self._tensor)


class Made:
    """The results of a cheap function of other sources.

    name: the function's, for reports; again: returns the results for the inputs' values, and holds
    no tensor; inputs: how to read these.
    """

    def __init__(
        self,
        name: str,
        again: Callable[..., Any],
        inputs: Sequence[View],
        results: Sequence[Tensor],
    ):
        self.name, self.again, self.inputs = name, again, inputs
        # how each lies in its storage, which it fills: shape, strides, dtype
        self.layouts = [(t.shape, t.stride(), t.dtype) for t in results]
        self.depth = 1 + max(map(_DEPTH, inputs), default=0)
        # saved tensors, and other recipes, that read the results, and those that did not yet
        self.num_readers = 0
        self._left = 0
        self._values: Sequence[Tensor] | None = None

    def add_reader(self, count: Count) -> None:
        """Count a reader; the first one makes this a reader of its inputs."""
        if not self.num_readers:
            for view in self.inputs:
                # leaves have no readers but a hook that counts
                if count is not None or view.source.depth:
                    view.source.add_reader(count)
        self.num_readers += 1
        self._left += 1

    def is_current(self) -> bool:
        """Whether the inputs are as they were, so that this makes the results again."""
        return self.num_readers > 0 or all(view.source.is_current() for view in self.inputs)

    def value(self, place: int) -> Tensor:
        """Return a result; it stays for the readers that are left in this backward."""
        values = self._values
        if values is None:
            values = list(map(_laid_out, self._run(), self.layouts))
        self._left -= 1
        if self._left > 0 and backward_id() != -1:
            if self._values is None:
                # by a weak reference, as this holds what its graph has freed by then
                at_end_of_backward(partial(_forget, weakref.ref(self)))
            self._values = values
        else:
            # `forget`, without a call
            self._left, self._values = self.num_readers, None
        return values[place]

    def _run(self) -> Sequence[Tensor]:
        """Return new results: those of a kernel for the end of this chain, or of its function."""
        for kernel in KERNELS:
            results = kernel(self)
            if results is not None:
                return results
        results = self.again(*map(View.read, self.inputs))
        return [results] if results.__class__ is Tensor else tensors_in(results)

    @property
    def is_made(self) -> bool:
        """Whether the results are there, for readers that are left."""
        return self._values is not None

    def expect(self) -> None:
        """Expect one more reader in this backward."""
        self._left += 1

    def skip(self) -> bool:
        """Count a reader that does not need the results; return whether others are left."""
        self._left -= 1
        if self._left <= 0:
            self.forget()
            return False
        return True

    def forget(self) -> None:
        """Free the results."""
        self._left, self._values = self.num_readers, None


# of a view; without a call of Python's
_DEPTH = operator.attrgetter("source.depth")

# kernels for several functions of a chain. Each returns the results of a chain's last recipe, or
# None. It tells each recipe whose results it passes over (`skip`), and reads each input of the
# chain once; `expect` comes before a read that a recipe with readers left will repeat
KERNELS: list[Callable[[Made], Sequence[Tensor] | None]] = []


def _forget(reference: weakref.ref[Made]) -> None:
    made = reference()
    if made is not None:
        made.forget()


def _laid_out(result: Tensor, layout: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
    """Return a result with the strides that it had: its views are read by these."""
    shape, stride, _ = layout
    if result.stride() == stride and result.storage_offset() == 0:
        return result
    tensor = torch.empty_strided(shape, stride, dtype=result.dtype, device=result.device)
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


def view_in(source: Leaf | Made, tensor: Tensor, place: int = 0) -> View:
    """Return how to read a tensor in the storage of a source."""
    return View(source, place, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def view_of_leaf(tensor: Tensor) -> View:
    """Return how to read a tensor that is saved."""
    offset = int(tensor.storage_offset())
    return View(Leaf(tensor), 0, tensor.shape, tensor.stride(), offset)


def cast(view: View, tensor: Tensor, to: Tensor) -> View:
    """Return how to read `to`, a tensor that a view reads, or a copy of it in another dtype."""
    if to.dtype == tensor.dtype:
        return view
    return view_in(Made("to", partial(_to, to.dtype), [view], [to]), to)


def _to(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype)


class Stored:
    """The object that autograd saves in place of a tensor.

    With a view, this is a pack hook: autograd passes the tensor, which is not held.
    """

    __slots__ = ("__weakref__", "alive", "leaf", "view")

    def __init__(self, view: View | None = None, _tensor: Tensor | None = None) -> None:
        self.view = view
        # a small tensor, which is saved without a view
        self.leaf: Leaf | None = None
        # a recipe that lives as long as this, for readers to come
        self.alive: Made | None = None

    def save(self, view: View, count: Count) -> Stored:
        """Let this read a view."""
        view.source.add_reader(count)
        self.view = view
        return self

    def read(self) -> Tensor:
        """Return the tensor."""
        if self.leaf is not None:
            return self.leaf.value(0)
        view = self.view
        assert view is not None
        if isinstance(view.source, Leaf) or not torch.is_grad_enabled():
            return view.read()
        with torch.no_grad():
            return view.read()


def unpack(stored: Stored) -> Tensor:
    """Return the tensor that an object replaces."""
    # compiled autograd cannot trace a look at versions
    return _uncompiled(stored) if torch.compiler.is_compiling() else stored.read()


@private.breaks_graph
def _uncompiled(stored: Stored) -> Tensor:
    return stored.read()


def saving_recipes(view: View, x: Tensor, count: Count, run: Callable[[], Any]) -> Any:
    """Return run(), which saves a view in place of x, and other tensors as they are.

    count: called with the tensors that are saved for it.
    """
    # autograd keeps the pack hook as long as the saved tensors: it must not hold x
    key, dtype = key_of(x), x.dtype

    def pack(tensor: Tensor) -> Stored:
        if key_of(tensor) == key and tensor.dtype == dtype:
            return Stored().save(view_in(view.source, tensor, view.place), count)
        if count is not None:
            # before it loses its graph, by which a view of a parameter is known
            count(tensor)
        return Stored().save(view_of_leaf(tensor), None)

    with saved_tensors_hooks(pack, unpack):
        return run()


def key_of(tensor: Tensor) -> int:
    """Return a number of a tensor's storage, its own as long as it lives."""
    return storage_key(tensor.untyped_storage())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value: itself, or those in lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    tensors = []
    if isinstance(value, (list, tuple)):
        for part in value:  # without a call for each
            if isinstance(part, Tensor):
                tensors.append(part)
            elif isinstance(part, (list, tuple)):
                tensors += tensors_in(part)
    return tensors
