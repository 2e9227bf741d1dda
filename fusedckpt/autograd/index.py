"""Where a tensor comes from: the one index of recipes, by storage.

The entry of a storage's content is an attribute of the storage, so views and aliases share it,
and it goes with the storage: no other storage is taken for it. A write changes the version, which
ends it. It keeps no graph: it holds parameters, as long as the tensor that they made lives, and a
recipe alone while the forward that follows its functions runs (`tracker`).

A maker's recipe is made when its first reader asks, from tensors that the graph has saved by
then, and is the same for all readers as long as there is one. It is of a tensor of the graph, not
of its bytes: readers need that tensor, or a view of it, as an alias hides its hooks and its node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd import next_call, private
from fusedckpt.autograd.recipes import Leaf, Made, View, check_of, unpack

# the makers of results, beside functions that a tracker follows
NORM = "norm"
GATHERED_ROWS = "rows"
MODULE = "module"
LINEAR = "linear"
ACTIVATION = "activation"
CHANNELS = "channels"

# returns the source of a tensor, given that and the parameters that were put with it; None where
# the tensors that it is made from are gone. It holds no tensor
Source = Callable[[Tensor, Sequence[Tensor | None]], Leaf | Made | None]
# the attribute of a storage
KNOWN = "_fusedckpt_known"
# in place of a leaf: torch.utils.swap_tensors takes no parameter with a weak reference
_LEAF = torch.empty(0)


class Known(weakref.ref[Tensor]):
    """The entry of a storage's content; a weak reference to the tensor that had it."""

    # the tensor's version when it had the content
    version: int
    # its dtype then
    dtype: torch.dtype
    # the tensor's maker, None for a function
    maker: str | None = None
    # returns the recipe
    source: Source | None = None
    # parameters that the recipe reads
    parameters: Sequence[Tensor | None] = ()
    # their versions
    versions: tuple[int, ...] = ()
    # a weak reference to the recipe
    made: Callable[[], Leaf | Made | None] = NoneType
    # the tensor's place among the recipe's results
    place = 0
    # a weak reference to the tracker with functions that read the recipe
    forward: Any = None
    # the recipe, while that tracker follows a forward
    kept: Made | None = None
    # whether the recipe reads copies of parameters
    has_copies = False
    # a weak reference to the leaf that these functions read, where they take it for saved
    leaf: Callable[[], Leaf | None] | None = None
    # the last call that made the tensor or saved its recipe
    at: next_call.CallSite | None = None
    # a check of the tensor at a reader
    check: Callable[[Tensor], None] | None = None
    # the entry of this content before
    older: Known | None = None


def known_of(tensor: Tensor) -> Known | None:
    """Return the entry of a tensor's content as it is now."""
    known: Known | None = getattr(tensor.untyped_storage(), KNOWN, None)
    if known is None or known.version != tensor._version or known.dtype is not tensor.dtype:
        return None
    return known


def put(
    tensor: Tensor,
    maker: str | None = None,
    source: Source | None = None,
    *parameters: Tensor | None,
) -> Known:
    """Tell how a tensor is made again; parameters: those that its recipe reads.

    A tracker's recipe of the tensor becomes the maker's as well, unless it reads copies of
    parameters.
    """
    storage = tensor.untyped_storage()
    before: Known | None = getattr(storage, KNOWN, None)
    result = _LEAF if tensor.grad_fn is None else tensor
    known = Known(result, _forget if parameters else None)
    known.version = tensor._version
    known.dtype = tensor.dtype
    # `known_of`, without a call
    if before and before.version == known.version and before.dtype is known.dtype:
        if maker and before() is tensor and before.maker is None and not before.has_copies:
            known.made = before.made
            known.place = before.place
        if maker or (before.maker and before() is not tensor):
            known.older = before
    setattr(storage, KNOWN, known)
    if maker:
        known.maker = maker
        known.source = source
        known.at, _ = next_call.note()
        if parameters:
            known.parameters = parameters
            known.versions = versions_of(*parameters)
    return known


def take_back(tensor: Tensor, known: Known, before: Known | None) -> None:
    """Put back the entry of a tensor before, unless it was written since."""
    if known_of(tensor) is known:
        setattr(tensor.untyped_storage(), KNOWN, before)


def _forget(known: Known) -> None:
    """Let go of the parameters of a tensor that is freed: its storage may live longer."""
    known.parameters = ()
    known.maker = None


def view_of(y: Any, *makers: str, is_behind: bool = False) -> View | None:
    """Return how to read a result of one of some makers; None if it has to be saved.

    It has to be if it was written since, as were parameters of its maker, or has hooks: these may
    free or replace the parameters before backward reaches the maker. FSDP2 frees those of a unit
    after its forward, and hooks the results of the unit, but a view of one hides its hooks.

    is_behind: see `next_call.note`.
    """
    if not isinstance(y, Tensor):
        return None
    try:
        known: Known | None = getattr(y.untyped_storage(), KNOWN, None)
        # `known_of`, without a call
        if known is None or known.version != y._version or known.dtype is not y.dtype:
            return None
    except RuntimeError:
        # a tensor without a storage, or one that counts no versions
        return None
    row: Known | None = known if y.grad_fn is not None and torch.is_grad_enabled() else None
    base = y._base
    whole = None
    while row is not None:
        whole = row()
        if row.maker in makers and whole is not None and (whole is y or whole is base):
            break
        if row.maker is LINEAR and LINEAR in makers and _is_sibling(base, whole):
            break
        row = row.older
    if row is None or whole is None or private.hooks_of(y) or private.hooks_of(whole):
        return None
    # `are_as_before`, without a call
    for p, version in zip(row.parameters, row.versions, strict=True):
        if p is not None:
            is_freed = not p.untyped_storage().nbytes() and p.numel()
            if is_freed or (version != p._version and not p.is_inference()):
                return None
    source = row.made()
    if source is None:
        source = row.source and row.source(whole, row.parameters)
        if source is None:
            return None
        # the same one for all readers, as long as there is one
        row.made = weakref.ref(source)
    view = View(source, row.place, y.shape, y.stride(), y.storage_offset())
    row.at, is_next = next_call.note(row.at, is_behind=is_behind)
    if not is_next:
        view.check = check_of(source, y)
    return view


def _is_sibling(base: Tensor | None, whole: Tensor | None) -> bool:
    """Whether a view of a base is one of a linear's result, which may be a view of that itself."""
    return base is not None and whole is not None and whole._base is base


def are_as_before(parameters: Sequence[Tensor | None], versions: Sequence[int]) -> bool:
    """Whether parameters were not freed, nor written since they had these versions."""
    for p, version in zip(parameters, versions, strict=True):
        if p is not None:
            # one that is freed has no memory
            is_freed = not p.untyped_storage().nbytes() and p.numel()
            if is_freed or (version != p._version and not p.is_inference()):
                return False
    return True


def expose(tensor: Tensor, *, is_read: bool = False) -> None:
    """Forget how a tensor is made again: code has got its memory, and may write there unseen.

    Readers of a maker's result check it where that has readers by now.

    is_read: whether such code mostly reads; then they check it in any case.
    """
    known = known_of(tensor)
    while known is not None:
        made = known.made()
        if known.maker and (is_read or (isinstance(made, Made) and made.num_readers)):
            break
        known = known.older
    setattr(tensor.untyped_storage(), KNOWN, known)


def still_tells(known: Known | None, tensor: Tensor) -> bool:
    """Whether an entry still tells how a tensor is made again: nothing wrote or exposed that."""
    entry = known_of(tensor)
    while entry is not None and entry is not known:
        entry = entry.older
    return entry is not None


def versions_of(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return how often each tensor was written; 0 for none and for one that does not count."""
    versions = []
    for t in tensors:  # a comprehension costs a call before Python 3.12
        versions.append(0 if t is None or t.is_inference() else t._version)
    return tuple(versions)


def of_first_saved(
    name: str, again: Callable[..., Tensor], y: Tensor, tensors: Sequence[Tensor | None]
) -> Made | None:
    """Return the source `again(x, *tensors)`, x the first tensor that y's node has saved.

    Tensors that are None are left out. With only a name and `again`, this is a `Source`.
    """
    x = saved_view(y.grad_fn)
    if x is None:
        return None
    inputs = [x]
    for tensor in tensors:
        if tensor is not None:
            inputs.append(Leaf(tensor))
    return Made(name, again, inputs, [y])


def saved_view(node: Any) -> View | Leaf | None:
    """Return how to read the first tensor that a node has saved, None where it is freed."""
    try:
        (raw, *_) = private.raw_saved(node)
        if isinstance(raw.data, (View, Leaf)):
            return raw.data
        return Leaf(node.saved_tensors[0])
    except (RuntimeError, ValueError):
        # the node has run already, has saved nothing, or x was changed in place
        return None


def save_view(node: Any, place: int, view: View, unpack: Callable[[View], Tensor] = unpack) -> bool:
    """Let a node of a Function save a view in place of the tensor that it has saved at a place.

    Return False where torch does not let it. No hooks may be set around the node's call.

    unpack: returns the tensor that the node's backward gets.
    """
    raw = private.raw_saved(node)
    if raw:
        # the pack hook is called at once, and frees the tensor
        raw[place].register_hooks(view.replacing, unpack)
    return bool(raw)
