"""Calls with all they need, and stand-ins, which a checkpoint's forward leaves for its recompute.

A call needs its arguments, and finds its surroundings as they were: random numbers, autocast, the
default device. Nothing here keeps an object alive that would not live without the checkpoint, but
for the arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import update_wrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd import arguments, private
from fusedckpt.autograd.backward import Versioned
from fusedckpt.autograd.private import pytree
from fusedckpt.autograd.storages import stale, storage_of
from fusedckpt.checkpointing.determinism import WatchedRun
from fusedckpt.checkpointing.surroundings import Surroundings
from fusedckpt.checkpointing.written_buffers import written_buffers
from fusedckpt.state.holders import ATOMS

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Options(NamedTuple):
    """The options of `checkpoint`; its documentation explains them."""

    # whether the recompute gets the random numbers of the forward, torch's
    preserve_rng_state: bool = True
    # and those of `random` and `numpy.random`
    preserve_python_rng: bool = True
    # "default" or "none"
    determinism_check: str = "default"
    # whether the recompute ends with the last tensor that backward needs
    early_stop: bool = True
    # whether the recompute is compared with the forward bit by bit
    debug: bool = False
    # returns the contexts of the forward and of the recompute
    context_fn: Callable[[], Contexts] = noop_context_fn
    # patterns of the names of regions that the recompute does not run
    save_regions: tuple[str, ...] = ()
    # whether the recompute compares samples of saved tensors with the forward's
    samples: bool = False
    # and no backward waits for the result
    reads_samples_late: bool = False
    # of a selective context_fn: whether tensors that it saves go through hooks around
    respect_saved_tensors_hooks: bool | None = None
    # whether inputs wait for backward in host memory
    offload: bool = False
    # whether the recompute begins with rounded values
    rounds: bool = False
    # whether inputs are packed for that, in nine bits a value; else hooks around bring them so
    packs: bool = False


class Argument:
    """A tensor argument, saved as autograd saves one.

    So the recompute gets the same object, an enclosing checkpoint may drop it, and a change in
    place raises autograd's own error.
    """

    # its class
    _kind: type[Tensor] = Tensor

    def __init__(self, tensor: Tensor):
        self.dtype = tensor.dtype
        self.storage = storage_of(tensor)
        self.layout = layout_of(tensor) if self.storage else None
        self._kind = type(tensor)
        # autograd refuses to save an inference tensor
        is_inference = tensor.is_inference()
        self._saved = tensor if is_inference else private.make_saved(tensor, is_output=False)

    def tensor(self, made: dict[Any, Any] | None = None) -> Tensor:
        """Return the argument; raise where it was written in place since."""
        saved = self._saved
        if isinstance(saved, Tensor):
            return saved
        tensor = saved.unpack()
        is_other = type(tensor) is not self._kind and type(tensor) is Tensor
        # as a parameter it would be a leaf
        if is_other and not issubclass(self._kind, nn.Parameter):
            # autograd saves no class; layers run their own forward for some
            return tensor.as_subclass(self._kind)
        return tensor

    def check(self) -> None:
        """Raise where the argument was written in place since."""
        self.tensor()


class LateArgument(Argument):
    """An argument that is saved with the first tensor that autograd saves, if there is any.

    So hooks on saved tensors do not see the arguments of a call that needs no gradients.
    """

    def __init__(self, tensor: Tensor):
        self.dtype = tensor.dtype
        self.storage = storage_of(tensor)
        self.layout = layout_of(tensor) if self.storage else None
        self._kind = type(tensor)
        self._saved = tensor
        self._problem = ""
        # inference tensors have none
        self._version = None if tensor.is_inference() else tensor._version

    def save(self) -> None:
        """Save the tensor now, unless it was written since, so that a recompute raises."""
        if not isinstance(self._saved, Tensor) or self._version is None:
            return
        if self._saved._version != self._version:
            self._problem = stale("checkpoint: an argument or an output of a region", self._saved)
        self._saved = private.make_saved(self._saved, is_output=False)

    def tensor(self, made: dict[Any, Any] | None = None) -> Tensor:
        """Return the argument; raise where it was written in place since."""
        if self._problem:
            raise RuntimeError(self._problem)
        return super().tensor(made)


class HeldArgument(Argument):
    """An argument that is held as it is: a tensor in a container, which holds it anyway."""

    def __init__(self, tensor: Tensor):
        self.dtype = tensor.dtype
        self.storage = storage_of(tensor)
        self.layout = layout_of(tensor) if self.storage else None
        self._versioned = Versioned(tensor)

    def tensor(self, made: dict[Any, Any] | None = None) -> Any:
        """Return the tensor; raise where it was written in place since."""
        return self._versioned.read()[0]


class LeafSource:
    """Where a saved tensor comes from that is a parameter, another leaf, or a view of one."""

    __slots__ = ("_layout", "reference", "version")

    def __init__(self, tensor: Tensor, owner: Tensor, reference: TensorWeakRef):
        self.reference = reference
        # of the leaf, in the forward
        self.version = owner._version
        self._layout = None if tensor is owner else layout_of(tensor)

    def leaf(self) -> Tensor | None:
        """Return the leaf, None where it is gone; raise where it was written in place since."""
        leaf = self.reference()
        if leaf is not None and leaf._version != self.version:
            raise RuntimeError(stale("checkpoint: a parameter saved for backward", leaf))
        return leaf

    def view_of(self, leaf: Tensor) -> Tensor:
        """Return the tensor, given the leaf."""
        if self._layout is None:
            return leaf
        leaf = leaf.detach() if torch.is_grad_enabled() else leaf
        return leaf.as_strided(*self._layout)

    def tensor(self) -> Tensor | None:
        """Return the tensor, None where the leaf is gone."""
        leaf = self.reference()
        if leaf is None or leaf._version != self.version:
            # raises
            leaf = self.leaf()
        return leaf if leaf is None or self._layout is None else self.view_of(leaf)


class ArgumentSource:
    """Where a saved tensor comes from that is an argument, a saved output, or a view of one."""

    __slots__ = ("_argument", "_layout")

    def __init__(self, argument: Argument, layout: tuple[Any, ...] | None = None):
        self._argument = argument
        self._layout = layout

    def tensor(self) -> Tensor:
        """Return the tensor, without its graph."""
        tensor = self._argument.tensor()
        if tensor.requires_grad and (self._layout is None or torch.is_grad_enabled()):
            tensor = tensor.detach()
        return tensor if self._layout is None else tensor.as_strided(*self._layout)


class Packed:
    """The stand-in of a saved tensor.

    Autograd holds this, the segment does not, and so knows which tensors are still wanted.
    """

    __slots__ = ("__weakref__", "index", "meta", "source", "storage")

    def __init__(
        self, index: int, meta: tuple[Any, ...], source: LeafSource | None, storage: int = 0
    ):
        # the tensor's position among the tensors that the segment's forward saved
        self.index = index
        # its shape, dtype and device
        self.meta = meta
        # the owner that keeps the tensor anyway; None where only a recompute brings it back
        self.source: LeafSource | ArgumentSource | None = source
        # the key of its storage where there is no owner
        self.storage = storage


class Provisional(NamedTuple):
    """A saved tensor that stays until it is clear whether a call writes it or its arguments."""

    packed: Packed
    tensor: Tensor
    # the version of the tensor, when it was saved
    version: int


def objects_in(value: Any) -> list[Any]:
    """Return the objects in plain lists, tuples and dicts but data; nothing else is looked into."""
    objects = []
    # the next one last; no generator, as each of its objects would be a call
    todo = [value]
    seen = set[int]()
    while todo:
        part = todo.pop()
        kind = type(part)
        if kind is dict:
            inside = [*part.values()]
        elif (
            kind is list or kind is tuple or (isinstance(part, tuple) and hasattr(part, "_fields"))
        ):
            inside = [*part]
        else:
            objects.append(part)
            continue
        if id(part) in seen:
            # a container may be in itself
            continue
        seen.add(id(part))
        for x in reversed(inside):
            if type(x) not in ATOMS:
                todo.append(x)
    return objects


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some objects, and in plain containers among them."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in ATOMS:
            for part in objects_in(value):
                if isinstance(part, Tensor):
                    tensors.append(part)
    return tensors


_TENSOR_OR_NONE = {Tensor, type(None)}


def result_tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a function's result: the leaves of any tree of torch's."""
    if isinstance(result, Tensor):
        return [result]
    parts: Any = result
    if type(result) is not tuple or not {*map(type, result)} <= _TENSOR_OR_NONE:
        # which takes many calls
        parts = pytree.tree_leaves(result)
    return [part for part in parts if isinstance(part, Tensor)]


class Call:
    """A call of a segment, to be made again with the same objects in the same surroundings."""

    def __init__(self, fn: Any, args: Any, kwargs: Any, options: Options, save: Any = Argument):
        self.fn = fn
        self._names = tuple(kwargs)
        # of all arguments, tensors as Arguments
        self.values: list[Any] = []
        objects = []
        inner = []
        # a tensor that is passed several times is one again, also through hooks
        arguments: dict[int, Argument] = {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if id(value) not in arguments:
                    arguments[id(value)] = save(value)
                    objects.append(value)
                self.values.append(arguments[id(value)])
                continue
            self.values.append(value)
            if type(value) not in ATOMS:
                inside = [*objects_in(value)]
                objects += inside
                inner += [x for x in inside if isinstance(x, Tensor)]
        # the tensors in containers
        self.inner = [HeldArgument(tensor) for tensor in inner]
        self.surroundings = Surroundings(objects, *options[:2])
        # those that the call may write; None for none
        self.buffers = written_buffers(fn, (x for x in objects if not isinstance(x, Tensor)))

    def arguments(self, made: dict[Any, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments; made: the tensors that earlier calls of this recompute left."""
        arguments = []
        tensors = dict[Argument, Tensor]()
        for value in self.values:
            if isinstance(value, Argument):
                if value not in tensors:
                    tensors[value] = value.tensor(made)
                value = tensors[value]
            arguments.append(value)
        count = len(arguments) - len(self._names)
        return arguments[:count], dict(zip(self._names, arguments[count:], strict=True))

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield the arguments with their names or numbers, tensors as Arguments."""
        count = len(self.values) - len(self._names)
        names = [*(f"argument {i}" for i in range(count)), *self._names]
        return zip(names, self.values, strict=True)

    def leave(self, result: Any, made: dict[Any, Any]) -> None:
        """Leave in `made` the parts of a result that later calls of this recompute take."""


class Checkpointed:
    """A function that is called through `run`, a checkpoint; in a class, a method."""

    def __init__(self, run: Callable[..., Any], function: Callable[..., Any]):
        if not callable(function):
            arguments.wrong_type("checkpoint", "function", "callable", function)
        self._run = run
        self._function = function
        # not its attributes, which may be changed later
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result, saving its arguments."""
        return self._run(self._function, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Checkpointed:
        bind = getattr(self._function, "__get__", None)
        if instance is None or bind is None:
            return self
        return Checkpointed(self._run, bind(instance, owner))


# those of a checkpoint without a context_fn
NO_CONTEXTS: Contexts = noop_context_fn()


class Trace:
    """The record that a segment's forward leaves for its recompute."""

    def __init__(self, options: Options):
        self.options = options
        self.contexts = NO_CONTEXTS
        if options.context_fn is not noop_context_fn:
            self.contexts = options.context_fn()
            private.respect_hooks(self.contexts[0], options.respect_saved_tensors_hooks)
        # whether its recompute begins with rounded values, or one around it
        self.may_differ = options.rounds
        # whether a recompute runs only when, and as far as, backward needs it
        self.stops = options.early_stop and not options.debug
        # the calls of the segment, one unless it is a `MultiCallSegment`
        self.calls: list[Call] = []
        # whether the last call has returned
        self.is_complete = False
        # the stand-ins of the tensors that autograd saved, in order
        self.saved: list[weakref.ref[Packed]] = []
        # by place of a saved tensor, in order: the leaves that it is, or is computed from
        self.leaves: dict[int, list[TensorWeakRef]] = {}
        # of fused layers, by the place of their saved tensors: name, and slot for GEMM outputs
        self.slots: dict[int, tuple[str, weakref.ref[Any]]] = {}
        # the forward's record, where the recompute is compared with it bit by bit
        self.watch: WatchedRun | None = None
        # places of the outputs that were saved behind all other tensors
        self.outputs: list[int] = []
        # the calls of regions
        self.region_calls: list[Any] = []
        # the places of tensors of regions, which stay saved and no recompute brings back
        self.staying: set[int] = set()
        # elements of the tensors that were dropped
        self.samples: Any = None


class Leaves:
    """Finds the leaves that a saved tensor is computed from, up to the first saved leaf.

    A weight is saved only where its input needs a gradient: weights before the first such one are
    found by the graph of saved tensors. Once leaves are found, weights after them are saved.
    """

    def __init__(self) -> None:
        # whether leaves are found
        self.are_found = False
        self._since = private.num_nodes()

    def behind(self, tensor: Tensor) -> list[Tensor]:
        """Return the leaves that a tensor is computed from, by nodes made since the last."""
        leaves = list[Tensor]()
        if tensor.grad_fn is None:
            return leaves
        nodes = [tensor.grad_fn]
        seen = set[Any]()
        # each thread counts its own nodes, and a GPU's backward has a thread of its own: a node of
        # the forward's thread may have any number
        now = private.num_nodes()
        while nodes:
            node: Any = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            elif self._since <= private.number_of(node) < now:
                nodes += [after for after, _ in node.next_functions if after is not None]
        self.are_found = len(leaves) > 0
        self._since = now
        return leaves


def layout_of(tensor: Tensor) -> tuple[Any, Any, Any]:
    """Return where in its storage a tensor is."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()
