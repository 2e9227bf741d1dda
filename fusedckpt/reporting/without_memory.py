"""`MetaRun`: ops on meta tensors, with the bytes that they would have in use, and some values.

Meta tensors have shapes and no memory. Integers and booleans have values all the same, computed on
a CPU beside: code that asks whether a mask is all ones gets its answer. Numbers have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusedckpt.autograd import private_memory
from fusedckpt.autograd.private import TorchDispatchMode, pytree, schema_of, storage_key
from fusedckpt.memory import storages_of

META = torch.device("meta")
# values of more elements are not computed, such as masks of all pairs of tokens in long sequences
_MOST_VALUES = 2**24
_ADD = torch.ops.aten.add.Tensor


class MetaRun(TorchDispatchMode):
    """While it is active, ops on meta tensors get values where they can, and bytes are counted.

    Active again, it has the values of before. `peak` is the most in use between two ops since
    `begin`; memory within an op is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        # a meta tensor of integers or booleans -> the same on a CPU
        self._values = WeakTensorKeyDictionary()
        # whether an unknown number that is read is 1
        self._reads_numbers = False
        self.begin()

    def begin_phase(self, name: str) -> None:
        """Begin a phase of a step: in the optimizer's, no number that is read changes a shape."""
        self._reads_numbers = name == "optimizer"

    @contextmanager
    def reading_numbers(self) -> Iterator[None]:
        """Let an optimizer read numbers meanwhile."""
        self.begin_phase("optimizer")
        try:
            yield
        finally:
            self.begin_phase("")

    def begin(self, resident: Iterable[Tensor] = ()) -> None:
        """Count from now on, above the bytes of tensors that exist."""
        # these stay alive here, so that their keys are theirs
        self._resident = storages_of(resident)
        self._counted = {storage_key(storage): storage.nbytes() for storage in self._resident}
        self.live = self.peak = sum(self._counted.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on meta tensors; where all values are known, on a CPU too."""
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_meta = any(x.is_meta for x in tensors) or _names_meta(kwargs)
        if not is_meta:
            return func(*args, **kwargs)
        is_known = all(not x.is_meta or x in self._values for x in tensors)
        if private_memory.READ is not None and func is private_memory.READ.default:
            if not is_known and self._reads_numbers:
                return 1.0
            if not is_known:
                raise RuntimeError("the value of an activation is read, and meta tensors have none")
            return func(self._values[args[0]])
        self.peak = max(self.peak, self.live)
        result = _run(func, args, kwargs)
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self._count(made)
        # autograd adds gradients in place, but not where a mode sees it: the sum takes the place of
        # the first of them, which lives until the next op
        if func is not _ADD:
            self.peak = max(self.peak, self.live)
        if not is_known:
            if schema_of(func).is_mutable:
                self._forget(tensors)
        elif all(not x.is_floating_point() and x.numel() <= _MOST_VALUES for x in made):
            values = func(*self._on_cpu(args), **self._on_cpu(kwargs))
            for x, value in zip(made, pytree.tree_leaves(values), strict=True):
                self._values[x] = value
        return result

    def _count(self, tensors: list[Tensor]) -> None:
        counted = self._counted
        for storage in storages_of(x for x in tensors if x.is_meta):
            key = storage_key(storage)
            if key not in counted:
                counted[key] = storage.nbytes()
                self.live += counted[key]
                weakref.finalize(storage, self._free, counted, key)

    def _free(self, counted: dict[int, int], key: int) -> None:
        nbytes = counted.pop(key)
        # not of a count that ended
        if counted is self._counted:
            self.live -= nbytes

    def _on_cpu(self, tree: Any) -> Any:
        """Return arguments with values in place of meta tensors, and a CPU as their device."""

        def real(x: Any) -> Any:
            if isinstance(x, Tensor) and x.is_meta:
                return self._values[x]
            return torch.device("cpu") if isinstance(x, torch.device) and x == META else x

        return pytree.tree_map(real, tree)

    def _forget(self, tensors: list[Tensor]) -> None:
        """Forget the values of tensors that an op may have written, and of their views."""
        values = [self._values[x] for x in tensors if x in self._values]
        keys = {storage_key(value.untyped_storage()) for value in values}
        for x, value in list(self._values.items()):
            if storage_key(value.untyped_storage()) in keys:
                del self._values[x]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on meta tensors."""
    grouped_mm = private_memory.GROUPED_MM
    if grouped_mm is not None and func is grouped_mm.default and args[0].is_meta:
        return private_memory.grouped_mm(*args, **kwargs)
    embedding_bag = private_memory.EMBEDDING_BAG
    if embedding_bag is not None and func is embedding_bag.default and args[0].is_meta:
        return private_memory.embedding_bag(*args, **kwargs)
    return func(*args, **kwargs)


def _names_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


@contextmanager
def on_meta(run: MetaRun) -> Iterator[MetaRun]:
    """Make tensors on the meta device inside, where attention runs as it does on a CPU."""
    with private_memory.attention_of_a_cpu(), private_memory.shapes_of_a_cpu(), META, run:
        yield run
