"""The sources of the tensors of one forward, by their storages.

A result has a recipe if each input of its function has one, is saved by now, or is small. So a sum
`x + f(x)` is made again where both parts are saved anyway, and is saved itself where they are not.
A recipe may read the result of another one, up to a limit: a longer sequence would hold many values
at once in backward, so its value is saved, and ends the sequence.

Tensors are recognized by their storage and version: views need no recipe of their own, and a write
ends a recipe. A tracker holds no tensor that autograd does not: after the forward only autograd's
saved tensors hold recipes, and none outlives the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd.index import KNOWN, Known, known_of, put, take_back
from fusedckpt.autograd.private import (
    KNOWN_PACKAGES,
    function_modes,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
)
from fusedckpt.autograd.recipes import Count, Leaf, Made, View, check_of, view_in

# the longest sequence of functions that backward runs again
LIMIT = 12
# the same for functions in a layer that saves recipes without a tracker: its linear, and the
# functions before it, count
NO_LIMIT = 1 << 10
# inputs of a function that are saved only for its recipe may take this share of its results. The
# parts of a concatenation may take more, as the next one may read them again, as in dense blocks
SHARE = 4
_SHARES = {"cat": 2, "concat": 2, "concatenate": 2}
# a result so many times smaller than an input is saved
SMALLER = 16


class Choice(NamedTuple):
    """A tensor for which autograd saved a recipe, or the tensor itself, for reports."""

    # the tensor's sizes
    shape: torch.Size
    # its dtype
    dtype: torch.dtype
    # its bytes
    nbytes: int
    # the functions that make it again, the last one first; () if it is saved
    functions: tuple[str, ...]
    # the functions that would make it again in a sequence that was cut here; () for none
    cut: tuple[str, ...]
    # a number of the tensor's source, its own while the graph lives
    source: int


# called with each choice of a forward
_observer: ContextVar[Callable[[Choice], Any] | None] = ContextVar("observer", default=None)


@contextmanager
def choices() -> Iterator[list[Choice]]:
    """Yield a list in which functions with recipes note the tensors that they save, in order."""
    noted: list[Choice] = []
    token = _observer.set(noted.append)
    try:
        yield noted
    finally:
        _observer.reset(token)


def functions_of(source: Leaf | Made) -> tuple[str, ...]:
    """Return the names of the functions that make a source again, the last one first."""
    if isinstance(source, Leaf):
        return ()
    names: dict[int, str] = {}
    sources: list[Leaf | Made] = [source]
    for part in sources:
        if isinstance(part, Made) and id(part) not in names:
            names[id(part)] = part.name
            sources += [view.source for view in part.inputs]
    return tuple(names.values())


class Tracker:
    """Knows the sources of the storages that are alive during a forward.

    count: called with each tensor that is saved, for hooks that count saved tensors.
    limit: the longest sequence of functions.
    copies_parameters: whether code may write to parameters, or a parameter may be whole only in
        its module's forward and backward.
    is_whole: whether no module gathers its parameters only for its call.
    floor: the bytes of a tensor that is worth a recipe.
    note_remade: called with each tensor that a recipe replaces, except those of a layer that
        also saves recipes without a tracker.
    takes_samples: whether samples of saved tensors are compared with those of their recipes: code
        may write to a tensor, by an address for example, before a function saves it.
    """

    def __init__(
        self,
        count: Count = None,
        limit: int | None = None,
        *,
        copies_parameters: bool = True,
        is_whole: bool = False,
        floor: int = 0,
        note_remade: Count = None,
        takes_samples: bool = False,
    ):
        self.count = count
        self.takes_samples = takes_samples
        self.note_remade = note_remade
        self.floor = floor
        self.copies_parameters = copies_parameters
        self.is_whole = is_whole
        self.limit = LIMIT if limit is None else limit
        # the last view that was saved in place of a tensor
        self.saved: View | None = None
        self._observe = _observer.get()
        # for the entries of this tracker
        self.reference = weakref.ref(self)
        # the entries of results, by weak references
        self._made: list[weakref.ref[Known]] = []

    def find(self, tensor: Tensor) -> View | None:
        """Return how to read a tensor that is saved by now, or has a recipe."""
        known = known_of(tensor)
        while known is None or known.forward is not self.reference:
            if known is None:
                return None
            known = known.older
        source = known.made() if known.leaf is None else known.leaf() or _leaf_of(known, tensor)
        if source is None:
            return None
        view = view_in(source, tensor, known.place)
        view.check = known.check
        return view

    def recipe_of(self, tensor: Tensor) -> Leaf | Made | None:
        """Return the recipe of a tensor, or of the storage that it is a view of, if it has one."""
        known: Known | None = getattr(tensor.untyped_storage(), KNOWN, None)
        if known is None or known.forward is not self.reference or known.leaf is not None:
            return None
        return known.made()

    def know(self, known: Known, source: Leaf | Made | None) -> None:
        """Take the recipe of a tensor from its maker; a leaf is none."""
        if not isinstance(source, Made):
            return
        known.forward = self.reference
        known.made = weakref.ref(source)
        known.kept = source
        self._made.append(weakref.ref(known))

    def view_of(self, tensor: Tensor) -> View | None:
        """Return how a reader reads a tensor that has a recipe, None where it saves the tensor."""
        try:
            view = self.find(tensor)
        except RuntimeError:
            # a tensor without a storage, or one that counts no versions
            return None
        if view is None or view.source.__class__ is Leaf or view.source.depth > self.limit:
            return None
        return view if view.source.is_current() else None

    def note_saved(self, tensor: Tensor) -> Known:
        """Note that autograd saves a tensor as it is."""
        known = known_of(tensor) or put(tensor)
        if known.forward is not self.reference or known.leaf is None:
            known.forward = self.reference
            known.leaf = NoneType
            known.kept = None
        return known

    def saves(self, tensor: Tensor) -> bool:
        """Whether a function has saved a tensor as it is."""
        view = self.find(tensor)
        return view is not None and view.source.__class__ is Leaf

    def note_rounded(self, tensor: Tensor, leaf: Leaf) -> None:
        """Note that autograd saves a tensor rounded: functions after that save, and read, this."""
        self.note_saved(tensor).leaf = weakref.ref(leaf)

    @contextmanager
    def knowing(self, tensor: Tensor, view: View) -> Iterator[None]:
        """Let functions that are called inside save a view in place of a tensor."""
        before = known_of(tensor)
        known = put(tensor)
        known.forward = self.reference
        known.place = view.place
        known.check = view.check
        if isinstance(view.source, Leaf):
            known.leaf = weakref.ref(view.source)
        else:
            known.made = weakref.ref(view.source)
        try:
            yield
        finally:
            take_back(tensor, known, before)

    @contextmanager
    def unlimited(self, *, copies_parameters: bool, is_product: bool = False) -> Iterator[None]:
        """Let functions called inside save recipes of any size, in sequences of any length.

        So a layer that saves recipes without a tracker saves the same ones with it.
        is_product: whether a GEMM makes the tensors: those that recipes stand for are noted, and
        sampled.
        """
        before = self.floor, self.limit, self.copies_parameters, self.takes_samples
        note_remade = self.note_remade
        self.note_remade = note_remade if is_product else None
        self.takes_samples = is_product
        self.floor = 0
        self.limit = NO_LIMIT
        self.copies_parameters = copies_parameters
        try:
            yield
        finally:
            self.floor, self.limit, self.copies_parameters, self.takes_samples = before
            self.note_remade = note_remade

    def end(self) -> None:
        """Keep no recipes but those of saved tensors: the forward is over."""
        for reference in self._made:
            known = reference()
            if known is not None:
                known.kept = None
        self._made.clear()

    def make(
        self,
        name: str,
        again: Callable[..., Any],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        overwritten: View | Leaf | None = None,
        *,
        saved: Sequence[Saved] = (),
        saves_parameters: bool = False,
    ) -> Made | None:
        """Note the recipe of results, `again(*inputs)`, if every input can be read in backward.

        name: the function's; overwritten: how to read the first input, where the function wrote
        the result over it; saved: the tensors that it saved; saves_parameters: whether it saved
        the parameters that it reads. Code may not write to these in eager, either.
        """
        size = 0
        for t in results:
            nbytes = t.nbytes
            # a part of a storage cannot be made again with its strides
            if t.untyped_storage().nbytes() != nbytes:
                return None
            size += nbytes
        room = size // _SHARES.get(name, SHARE)
        has_copies = False
        views: list[View | Leaf] = [] if overwritten is None else [overwritten]
        for x in inputs[1:] if views else inputs:
            nbytes = x.nbytes
            if nbytes > size * SMALLER:
                return None
            view = None
            if x.__class__ is not nn.Parameter and x._base.__class__ is not nn.Parameter:
                view = self.find(x) or _leaf_among(saved, x)
            elif not self.copies_parameters or (saves_parameters and self.is_whole):
                view = Leaf(x)
            elif self.is_whole:
                view = _leaf_among(saved, x) if nbytes < self.floor else self.find(x)
            if view is None:
                room -= nbytes
                if room < 0:
                    return None
                # a copy, as code may write to a tensor that autograd does not save
                view = Leaf(x.data.clone())
                has_copies = has_copies or isinstance(x, nn.Parameter)
            views.append(view)
        made = Made(name, again, views, results)
        for place, t in enumerate(results):
            known = put(t)
            known.has_copies = has_copies
            known.place = place
            known.forward = self.reference
            known.made = weakref.ref(made)
            known.kept = made
            self._made.append(weakref.ref(known))
        return made

    def save(self, view: View | Leaf, tensor: Tensor) -> None:
        """Let the object that autograd saved in place of a tensor read its recipe, or the tensor.

        view: a leaf of a tensor below the floor, which has no recipe, or an unfilled view.
        """
        if isinstance(view, Leaf):
            if self.count is not None:
                self.count(tensor)
            return
        known = known_of(tensor)
        while known is not None and known.forward is not self.reference:
            known = known.older
        made = known.made() if known is not None and known.leaf is None else None
        # a function's result is made, not a leaf
        assert not isinstance(made, Leaf)
        is_cut = made is not None and (made.depth > self.limit or not made.is_current())
        if self._observe is not None:
            self._observe(_choice(tensor, made, is_cut))
        if known is None or made is None or is_cut:
            # saved as it is, as a tensor that is known as saved
            made = None
            known = self.note_saved(tensor)
            assert known.leaf is not None
            source = known.leaf() or _leaf_of(known, tensor)
        else:
            source = made
        offset = tensor.storage_offset()
        view.fill(source, known.place, tensor.shape, tensor.stride(), offset)
        self.saved = view
        if made is not None:
            view.check = check_of(made, tensor) if self.takes_samples else known.check
            made.add_reader(self.count)
            if self.note_remade is not None:
                self.note_remade(tensor)
        elif source.is_rounded:
            source.add_reader(self.count)
        elif self.count is not None:
            # the tensor itself, as a view of a parameter is known by its graph
            self.count(tensor)


def _leaf_of(known: Known, tensor: Tensor) -> Leaf:
    """Return a leaf for all that read a storage."""
    leaf = Leaf(tensor)
    known.leaf = weakref.ref(leaf)
    return leaf


# the object that autograd saved in place of a tensor, and the tensor
Saved = tuple[View | Leaf, Tensor]


def _leaf_among(saved: Sequence[Saved], x: Tensor) -> Leaf | None:
    """Return the leaf of a small tensor that a function has saved."""
    for leaf, tensor in saved:
        if isinstance(leaf, Leaf) and _is_set_to(tensor, x) and tensor.dtype is x.dtype:
            return leaf if leaf.version == x._version else None
    return None


def _is_set_to(a: Tensor, b: Tensor) -> bool:
    """Return `a.is_set_to(b)`, which meta tensors do not have."""
    if a.shape != b.shape or a.untyped_storage() is not b.untyped_storage():
        return False
    return a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def _choice(tensor: Tensor, made: Made | None, is_cut: bool) -> Choice:
    names = () if made is None else functions_of(made)
    functions, cut = ((), names) if is_cut else (names, ())
    kind = tensor.shape, tensor.dtype, tensor.nbytes
    return Choice(*kind, functions=functions, cut=cut, source=id(made))


# a weak reference to the tracker of the forward that runs in this context: a module that runs again
# in backward keeps a copy of the context, which must not keep tensors
_active: ContextVar[Callable[[], Tracker | None]] = ContextVar("tracker", default=NoneType)
# returns that reference: `active()` is `reference()()`, which takes no call of Python's
reference: Callable[[], Callable[[], Tracker | None]] = _active.get


def active() -> Tracker | None:
    """Return the tracker of the forward that runs in this context."""
    return reference()()


@contextmanager
def tracking(tracker: Tracker | None) -> Iterator[None]:
    """Let fused layers that are called inside know the tracker of the forward, None for none."""
    token = _active.set(NoneType if tracker is None else tracker.reference)
    try:
        yield
    finally:
        _active.reset(token)
        if tracker is not None:
            tracker.end()


def sees_alone() -> bool:
    """Whether a tracker's function mode is the only one here.

    Callers ask for the number of modes first, which takes no call of Python's.
    """
    is_alone = num_function_modes() == 1 and active() is not None
    return is_alone and not torch.compiler.is_compiling()


def outside_mode(run: Callable[..., Any], *args: Any) -> Any:
    """Return run(*args), which calls no function of the model, outside of a tracker's mode.

    The mode would be called for each attribute of a tensor that code of ours reads.
    """
    mode = pop_function_mode()
    try:
        return run(*args)
    finally:
        if mode is not None:
            push_function_mode(mode)


def num_other_modes() -> int:
    """Return the number of function modes around a call, but for the one of a tracker."""
    return max(0, num_function_modes() - (active() is not None))


def has_foreign_modes() -> bool:
    """Whether code beside torch and ours has a function mode here, which may change functions.

    Callers ask for the number of modes first, which takes no call of Python's. torch.compile traces
    modes itself.
    """
    if torch.compiler.is_compiling() or not num_other_modes():
        return False
    return not all(type(m).__module__.startswith(KNOWN_PACKAGES) for m in function_modes())
