"""Recipes: a saved tensor is made again from fewer saved bytes.

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

    Leaf      a source that is saved
    Made      a source that is a function's result: the function, and how to read its inputs
    View      how to read a tensor: its sizes, strides and offset in the storage of a source;
              a leaf is a view of itself

Autograd saves a `View` or a `Leaf` in place of a tensor.

`index` tells where a tensor comes from: makers put results there (fused norms, the layers that
`fuse` lets read them, and `tracker`: any function of a forward), and a reader saves a `View`.

**How a sequence of recipes runs in backward.** Autograd unpacks a `View`, which asks its source for
a value. A `Made` reads its inputs, which may be results of other `Made`, and calls `again` with
them; a value is freed when its last reader in this backward has read it. So the functions of a
sequence run one by one, the deepest first. A kernel that computes several of them at once belongs
in `KERNELS`: it gets the last `Made` of a sequence, looks at `again` of it and of the sources of
its `inputs`, reads the inputs of the whole sequence, and returns the results, or None for a
sequence that it does not know.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
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

    __slots__ = ("__weakref__", "_tensor", "version")

    depth = 0
    name = "saved"
    # whether it reads other values than it was made from
    is_rounded = False
    # as a view: of itself
    place = 0

    def __init__(self, tensor: Tensor):
        # shares the version of the tensor, but not its graph
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        # None where writes are not counted
        self.version = None if tensor.is_inference() else tensor._version

    @property
    def source(self) -> Leaf:
        """Return this, which is a source and a view of it."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Return the tensor's dtype."""
        return self._tensor.dtype

    @property
    def size(self) -> torch.Size:
        """Return the tensor's shape."""
        return self._tensor.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """Return the tensor's strides."""
        return self._tensor.stride()

    @property
    def offset(self) -> int:
        """Return the tensor's offset in its storage."""
        return int(self._tensor.storage_offset())

    def is_current(self) -> bool:
        """Whether the tensor is as it was."""
        return self.version is None or self._tensor._version == self.version

    def read(self) -> Tensor:
        """Return the tensor."""
        # `is_current`, without a call for every reader
        if self.version is not None and self._tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._tensor.dtype} {list(self._tensor.shape)} is at version "
                f"{self._tensor._version}; expected version {self.version} instead"
            )
        return self._tensor

    def value(self, place: int) -> Tensor:
        """Return the tensor."""
        return self.read()

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

    __slots__ = (
        "__weakref__",
        "_left",
        "_values",
        "again",
        "depth",
        "inputs",
        "is_rounded",
        "layouts",
        "name",
        "num_readers",
        "result",
    )

    def __init__(
        self,
        name: str,
        again: Callable[..., Any],
        inputs: Sequence[View | Leaf],
        results: Sequence[Tensor],
    ):
        self.name = name
        self.again = again
        self.inputs = inputs
        # how each lies in its storage, which it fills: shape, strides, dtype
        self.layouts: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []
        for t in results:
            self.layouts.append((t.shape, t.stride(), t.dtype))
        # the length of the longest sequence of recipes that ends here
        self.depth = 1
        # whether an input is rounded
        self.is_rounded = False
        for view in inputs:
            # leaves have none
            if isinstance(view, View):
                source = view.source
                if source.depth >= self.depth:
                    self.depth = source.depth + 1
                if source.is_rounded:
                    self.is_rounded = True
        # saved tensors, and other recipes, that read the results, and those that did not yet
        self.num_readers = 0
        self._left = 0
        self._values: Sequence[Tensor] | None = None
        # returns the one result itself, where other code keeps it as it was
        self.result: Callable[[], Tensor | None] = NoneType

    def add_reader(self, count: Count) -> None:
        """Count a reader; the first one makes this a reader of its inputs."""
        if not self.num_readers:
            for view in self.inputs:
                # leaves have no readers but a hook that counts
                if count is not None or view.__class__ is View:
                    view.source.add_reader(count)
        self.num_readers += 1
        self._left += 1

    def is_current(self) -> bool:
        """Whether the inputs are as they were, so that this makes the results again."""
        if not self.num_readers:
            for view in self.inputs:  # without a call of Python's
                if not view.source.is_current():
                    return False
        return True

    def value(self, place: int) -> Tensor:
        """Return a result; it stays for the readers that are left in this backward."""
        values = self._values
        if values is None:
            result = self.result()
            results = self._run() if result is None else [result]
            values = list(map(_laid_out, results, self.layouts))
        self._left -= 1
        if self._left > 0 and backward_id() != -1:
            if self._values is None:
                # by a weak reference, as this holds tensors that its graph has freed by then
                at_end_of_backward(partial(_forget, weakref.ref(self)))
            self._values = values
        else:
            # `forget`, without a call
            self._left = self.num_readers
            self._values = None
        return values[place]

    def passing(self, place: int) -> Tensor:
        """Return a result for a reader long before the others: it does not stay for them.

        Nor do results of the recipes behind, which run again with this one.
        """
        if self._values is not None or self._left < 2 or backward_id() == -1:
            return self.value(place)
        at_end_of_backward(partial(_forget, weakref.ref(self)))
        self._left -= 1
        result = self.result()
        if result is None:
            for view in self.inputs:
                view.source.expect()
            result = self.again(*map(read_passing, self.inputs))
        results = [result] if result.__class__ is Tensor else tensors_in(result)
        return _laid_out(results[place], self.layouts[place])

    def _run(self) -> Sequence[Tensor]:
        """Return new results: of a kernel for the sequence that ends here, or of its function."""
        for kernel in KERNELS:
            results = kernel(self)
            if results is not None:
                return results
        results = self.again(*map(_READ, self.inputs))
        return [results] if results.__class__ is Tensor else tensors_in(results)

    @property
    def is_made(self) -> bool:
        """Whether the results exist, for readers that are left."""
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
        self._left = self.num_readers
        self._values = None


_READ = operator.methodcaller("read")


def read_passing(view: View | Leaf) -> Tensor:
    """Return the tensor that a view reads; a recipe's result does not stay for other readers."""
    source = view.source
    if isinstance(view, Leaf) or isinstance(source, Leaf):
        return view.read()
    return view.read(source.passing(view.place))


# kernels for several functions in sequence. Each returns the results of the last recipe, or None.
# It tells each recipe whose results it passes over (`skip`), and reads each input of the
# sequence once; `expect` comes before a read that a recipe with readers left will repeat
KERNELS: list[Callable[[Made], Sequence[Tensor] | None]] = []


class Finder(NamedTuple):
    """Finds how to read a layer's input that the index does not know."""

    # of the input, for a layer with a parameter
    find: Callable[[Tensor, Tensor], View | None]
    # whether it may find a result of a class of nodes
    tells: Callable[[type], bool]
    # returns the least bytes of such a result
    floor: Callable[[], int]


FINDERS: list[Finder] = []


Check = Callable[[Tensor], None]
# returns checks of the values that are made again in place of tensors, None where there is none; it
# is called with the makers' name, the tensors, and whether the makers' input will be rounded
CHECKS: list[Callable[[str, Sequence[Tensor], bool], Sequence[Check | None]]] = []


def check_of(source: Leaf | Made, tensor: Tensor) -> Check | None:
    """Return a check that a source makes the values of a tensor now."""
    if not CHECKS or source.__class__ is Leaf:
        return None
    return CHECKS[0](source.name, (tensor,), source.is_rounded)[0]


def checks_of(name: str, tensors: Sequence[Tensor], is_rounded: bool) -> Sequence[Check | None]:
    """Return checks that sources of a name make the values of tensors now, compared together.

    is_rounded: whether the sources' inputs will be rounded.
    """
    return CHECKS[0](name, tensors, is_rounded) if CHECKS else [None] * len(tensors)


# compares a tensor with the values of a recipe, with an input that may be rounded: whether all are
# the same but for rounding, None where the device may not be waited for
COMPARISONS: list[Callable[[Tensor, Tensor, bool], bool | None]] = []


def makes_again(made: Made, tensor: Tensor) -> bool | None:
    """Return whether a recipe makes all values of a tensor; None where they cannot be compared."""
    if tensor.is_meta:
        return True
    # a read in backward would count as that of a reader
    if not COMPARISONS or backward_id() != -1:
        return None
    with private.unseen(), torch.no_grad():
        return COMPARISONS[0](tensor, made.value(0), made.is_rounded)


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


class View:
    """How to read a tensor in the storage of a source."""

    __slots__ = ("alive", "check", "offset", "place", "size", "source", "stride")

    # a recipe that lives as long as this, for readers to come
    alive: Made

    def __init__(
        self,
        source: Leaf | Made,
        place: int,
        size: torch.Size,
        stride: tuple[int, ...],
        offset: int | torch.SymInt,
    ):
        # the source of the storage's content, and its place among the source's results
        self.source = source
        self.place = place
        # how the tensor lies in the storage, in elements
        self.size = size
        self.stride = stride
        self.offset = offset
        # called with the source's value, where code may have written to the tensor
        self.check: Check | None = None

    # autograd asks for an object to save before its source is known
    fill = __init__

    def read(self, value: Tensor | None = None) -> Tensor:
        """Return the tensor; value: the source's, if that is known."""
        if value is None:
            value = self.source.value(self.place)
        if self.check is not None:
            self.check(value)
        if (
            value.shape == self.size
            and value.stride() == self.stride
            and value.storage_offset() == self.offset
        ):
            return value
        return value.as_strided(self.size, self.stride, self.offset)

    def replacing(self, _tensor: Tensor) -> View:
        """Return this, as a pack hook: autograd passes the tensor, which is not held."""
        return self


# returns a view to be filled; without a call of Python's
unfilled: Callable[[], View] = partial(View.__new__, View)


def view_in(source: Leaf | Made, tensor: Tensor, place: int = 0) -> View:
    """Return how to read a tensor in the storage of a source."""
    return View(source, place, tensor.shape, tensor.stride(), tensor.storage_offset())


def cast(view: View, tensor: Tensor, to: Tensor) -> View:
    """Return how to read `to`, a tensor that a view reads, or a copy of it in another dtype."""
    if to.dtype == tensor.dtype:
        return view
    return view_in(Made("to", partial(_to, to.dtype), [view], [to]), to)


def copied(view: View, copy: Tensor) -> View:
    """Return how to read a contiguous copy of the tensor that a view reads."""
    return view_in(Made("contiguous", Tensor.contiguous, [view], [copy]), copy)


def _to(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype)


def unpack(saved: View | Leaf) -> Tensor:
    """Return the tensor that an object replaces."""
    # compiled autograd cannot trace a look at versions
    return _uncompiled(saved) if torch.compiler.is_compiling() else _read(saved)


def _read(saved: View | Leaf) -> Tensor:
    if saved.__class__ is Leaf or not torch.is_grad_enabled():
        return saved.read()
    with torch.no_grad():
        return saved.read()


_uncompiled = private.breaks_graph(_read)


def saving_recipes(
    view: View, x: Tensor, run: Callable[[], Any], count: Count, *, samples: bool = False
) -> Any:
    """Return run(), which saves a view in place of x, and other tensors as they are.

    count: called with the tensors that are saved for it; samples: whether run() may write to x.
    """
    if private.why_no_hooks() is not None:
        return run()
    # autograd keeps the pack hook as long as the saved tensors: it must not hold x
    key = key_of(x)
    dtype = x.dtype

    def pack(tensor: Tensor) -> View | Leaf:
        # `key_of`, without a call
        if storage_key(tensor.untyped_storage()) == key and tensor.dtype == dtype:
            view.source.add_reader(count)
            saved = view_in(view.source, tensor, view.place)
            # code of the model may have run since the layer was called
            saved.check = check_of(view.source, tensor) if samples else view.check
            return saved
        if count is not None:
            # before it loses its graph, by which a view of a parameter is known
            count(tensor)
        return Leaf(tensor)

    # for a checkpoint inside: of the storage of which tensors come back elsewhere in memory
    pack.moved = key  # type: ignore[attr-defined]
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
