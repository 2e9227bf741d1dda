"""`MetaRun`: ops on meta tensors, with the bytes that they would have in use, and some values.

Meta tensors have shapes and no memory. Integers, booleans, float64 and single numbers have values
all the same, computed on a CPU beside: code that asks whether a mask is all ones gets its answer,
and an optimizer the number of its step. Other numbers have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fusedckpt.allocations import Change
from fusedckpt.autograd import private_memory
from fusedckpt.autograd.backward import implementations
from fusedckpt.autograd.private import TorchDispatchMode, pytree, schema_of, storage_key
from fusedckpt.memory import storages_of
from fusedckpt.reporting.timeline import RunningModules, TimelineReader, TimelineReading

META = torch.device("meta")
# values of more elements are not computed, such as masks of all pairs of tokens in long sequences
_MOST_VALUES = 2**24
# nor those of as many elements that nothing was written to: weights that are made so
_MOST_UNWRITTEN = 2**16
# ops without a tensor as result
_COMPARES = (torch.ops.aten.allclose.default, torch.ops.aten.equal.default)
_ADD = torch.ops.aten.add.Tensor
_EMPTY = torch.ops.aten.empty.memory_format


class MetaRun(TorchDispatchMode):
    """While it is active, ops on meta tensors get values where they can, and bytes are counted.

    Active again, it has the values of before. `reading()` has the bytes in use between ops since
    `begin`; memory within an op is not seen. A tensor with memory that meets a meta tensor is taken
    for one of its shape.
    """

    def __init__(self) -> None:
        super().__init__()
        # a meta tensor of a kind that has values -> the same on a CPU
        self._values = WeakTensorKeyDictionary()
        # a tensor with memory -> the meta tensor in its place
        self._stand_ins = WeakTensorKeyDictionary()
        # whether an unknown number that is read is 1
        self._reads_numbers = False
        self.begin()

    @contextmanager
    def reading_numbers(self) -> Iterator[None]:
        """Let an optimizer read numbers meanwhile."""
        self._reads_numbers = True
        try:
            yield
        finally:
            self._reads_numbers = False

    def begin(self, resident: Iterable[Tensor] = (), beside: int = 0) -> None:
        """Count from now on, above the bytes of tensors that exist, and of others beside."""
        # these stay alive here, so that their keys are theirs
        self._resident = storages_of(resident)
        self._counted = {storage_key(storage): storage.nbytes() for storage in self._resident}
        self._live = sum(self._counted.values()) + beside
        self._noted = -1
        self._reader = TimelineReader(self._live)
        # the node whose backward runs, and how many modules run in it, one inside the other
        self._node: Any = None
        self._depth = 0
        # the number of ops so far
        self._time = 0

    def mark(self, kind: str, name: str) -> None:
        """Note that a module was entered or left, or that a phase of a step began."""
        if kind == "phase":
            self._leave_node()
            # in the optimizer's, no number that is read changes a shape
            self._reads_numbers = name == "optimizer"
            self._reader.phase((name, 0))
            self._note()
            return
        if self._node is not None:
            # in a recompute, which runs in a node
            self._depth += 1 if kind == "enter" else -1
        getattr(self._reader, kind)(name)

    def reading(self, gradients: Collection[int] = ()) -> TimelineReading:
        """Return the timeline; gradients: keys of the storages of gradients that stay."""
        return self._reader.reading(gradients)

    def set_value(self, tensor: Tensor, value: Tensor) -> None:
        """Let a meta tensor have a value."""
        self._values[tensor] = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on meta tensors; where all values are known, on a CPU too."""
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_meta = any(x.is_meta for x in tensors) or _names_meta(kwargs)
        if not is_meta:
            return func(*args, **kwargs)
        if func in implementations:
            # the buffers of a block live and die inside
            with self:
                return implementations[func](*args, **kwargs)
        if not all(x.is_meta for x in tensors):
            args, kwargs = pytree.tree_map(self._stand_in, (args, kwargs))
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_known = all(x in self._values for x in tensors)
        if (private_memory.READ and func is private_memory.READ.default) or func in _COMPARES:
            if not is_known and self._reads_numbers:
                return 1.0
            if not is_known:
                raise RuntimeError(
                    "its code reads the value of an activation, and meta tensors have no values"
                )
            return func(*self._on_cpu(args), **kwargs)
        is_sum = self._enter_op(func)
        # memory that exists already and is not counted, such as that of a constant
        self._count(tensors, is_new=False)
        result = _run(func, args, kwargs)
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self._count(made)
        # autograd adds gradients in place, but not where a mode sees it: the sum takes the place of
        # the first of them, which lives until the next op
        if not is_sum:
            self._note()
        if not is_known:
            if schema_of(func).is_mutable:
                self._forget(tensors)
        elif all(_has_value(x, func) for x in made):
            values = func(*self._on_cpu(args), **self._on_cpu(kwargs))
            leaves = (x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))
            for x, value in zip(made, leaves, strict=True):
                self._values[x] = value
        return result

    def _enter_op(self, func: Any) -> bool:
        """Follow nodes and modules; return whether the op adds gradients up."""
        self._time += 1
        self._note()
        node = private_memory.current_node()
        if node is not self._node and not self._depth:
            self._leave_node()
            if node is not None:
                self._reader.node((0, private_memory.number_of(node)))
                self._node = node
        if node is None or torch.is_grad_enabled():
            # a forward, or a recompute's
            self._reader.first_op((0, private_memory.last_number()))
        is_sum = func is _ADD and node is not None
        if is_sum:
            self._reader.sum(None)
        return is_sum

    def _leave_node(self) -> None:
        if self._node is not None:
            self._reader.done(None)
            self._node = None

    def _note(self) -> None:
        """Add a moment, if bytes have changed since the last one."""
        if self._reader.phase_name and self._live != self._noted:
            self._noted = self._live
            self._reader.note(self._time)

    def _count(self, tensors: list[Tensor], is_new: bool = True) -> None:
        counted = self._counted
        for storage in storages_of(x for x in tensors if x.is_meta):
            key = storage_key(storage)
            if key not in counted:
                counted[key] = storage.nbytes() if is_new else 0
                self._change(key, counted[key])
                weakref.finalize(storage, self._free, counted, key)

    def _free(self, counted: dict[int, int], key: int) -> None:
        nbytes = counted.pop(key)
        # not of a count that ended
        if counted is self._counted:
            self._change(key, -nbytes)

    def _change(self, key: int, nbytes: int) -> None:
        self._live += nbytes
        if nbytes:
            self._reader.memory(Change(self._time, key, nbytes))

    def _stand_in(self, x: Any) -> Any:
        """Return a meta tensor in the place of a tensor with memory."""
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        if x not in self._stand_ins:
            self._stand_ins[x] = meta = torch.empty_like(x, device=META)
            if may_have_value(x):
                self._values[meta] = x.detach().to("cpu", copy=True)
        return self._stand_ins[x]

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
        if not keys:
            # most ops write tensors without values, and those with values are many
            return
        for x, value in list(self._values.items()):
            if storage_key(value.untyped_storage()) in keys:
                del self._values[x]


class MetaModules(RunningModules):
    """Knows which module's forward runs, and tells a run on meta tensors."""

    def __init__(self, model: nn.Module, run: MetaRun):
        super().__init__(model)
        self._run = run

    def mark(self, kind: str, name: str) -> None:
        """Tell the run that a module was entered or left, or that a phase began."""
        self._run.mark(kind, name)


def may_have_value(x: Tensor, most: int = _MOST_VALUES) -> bool:
    """Whether a tensor is of the kinds, and as small, as those that have values on meta."""
    # a head without logits probes them with numbers in float64, which its model may change
    is_read = x.dtype == torch.float64 or not (x.is_floating_point() or x.is_complex())
    return x.numel() <= (most if is_read else 1)


def _has_value(x: Tensor, func: Any) -> bool:
    return may_have_value(x, _MOST_UNWRITTEN if func is _EMPTY else _MOST_VALUES)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on meta tensors."""
    grouped_mm = private_memory.GROUPED_MM
    if grouped_mm is not None and func is grouped_mm.default and args[0].is_meta:
        return private_memory.grouped_mm(*args, **kwargs)
    embedding_bag = private_memory.EMBEDDING_BAG
    if embedding_bag is not None and func is embedding_bag.default and args[0].is_meta:
        return private_memory.embedding_bag(*args, **kwargs)
    histc = private_memory.HISTC
    if histc is not None and func is histc.default and args[0].is_meta:
        return private_memory.histc(*args, **kwargs)
    if private_memory.is_fused_update(func):
        return None
    if func in private_memory.SPARSE_COPIES and args[0].layout == torch.sparse_coo:
        return private_memory.sparse_copy(func, args[0])
    return func(*args, **kwargs)


def _names_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


class _Literals(TorchFunctionMode):
    """Gives values to tensors that `torch.tensor` makes, which no dispatch mode sees."""

    def __init__(self, run: MetaRun):
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a tensor of numbers on meta, with a value where these have them."""
        kwargs = kwargs or {}
        if func is not torch.tensor or torch.device(kwargs.get("device") or META) != META:
            return func(*args, **kwargs)
        value = func(*args, **{**kwargs, "device": "cpu", "requires_grad": False})
        made = torch.empty_like(value, device=META)
        if may_have_value(value):
            self._run.set_value(made, value)
        return made.requires_grad_(kwargs.get("requires_grad", False))


@contextmanager
def on_meta(run: MetaRun) -> Iterator[MetaRun]:
    """Make tensors on the meta device inside, where attention runs as it does on a CPU."""
    kernels = private_memory.attention_of_a_cpu(), private_memory.shapes_of_a_cpu()
    with kernels[0], kernels[1], META, _Literals(run), run:
        yield run
