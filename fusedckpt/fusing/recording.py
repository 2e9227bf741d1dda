"""Run a module's forward once on meta tensors, and record its ops and the state that it reads.

A copy of the module runs, over meta tensors. Its classes are subclasses that log the state which
the forward reads. Immutable attributes are the module's own, mutable ones are copied, and at one
that cannot be copied the forward is stopped. Proxies around modules would not do: the forward's
code asks isinstance, calls super() and passes modules to functions of torch, which all need the
class itself.

Ops are recorded when they reach ATen, from any Python code, as a graph of nodes. A node is a
tensor that the forward made; its kind says how, as far as a match needs it (see `Node.kind`). Only
products with a weight are recognized by the names of their ops.

Where the forward does something that a recording cannot cover, it is stopped, and the recording has
the reason.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import Parameter, getattr_static
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fusedckpt.autograd import private
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.private import (
    TorchDispatchMode,
    is_pointwise,
    pytree,
    storage_key,
    written_by,
)
from fusedckpt.fusing.match_reader import Guard, Guards
from fusedckpt.fusing.replica import Path, replica, takes_one, undisturbed
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.outside import sizes as tensor_reads
from fusedckpt.outside.find_reads import outside_reads
from fusedckpt.outside.reads import MISSING, is_function, is_simple
from fusedckpt.outside.watch import CodeWatch
from fusedckpt.state import rng

# containers of simple values, which are copied
_READ_CONTAINERS = (list, dict, set, deque)
# attributes that every module has, and those by which modules call each other
_MODULE_NAMES = private.MODULE_ATTRIBUTES | {"_is_full_backward_hook"}
# the attribute of a spy with its place
_PLACE = "_fusedckpt_place"
# ops that read the values of tensors
_READS_VALUES = ("_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero")
# kinds of nodes with a value for every row of the input, or for some of its columns
_ROW_KINDS = ("x", "product", "columns", "elementwise")
# ops that copy a tensor
_COPIES = ("_unsafe_view", "clone")
# the op of a tensor that the forward did not create: a buffer, or any other
BUFFER_OP = "a buffer"
FOREIGN_OP = "a tensor of its own"
# devices with an autocast mode of their own
_AUTOCASTING = ("cpu", "cuda")
# functions of single elements that are linear, or a cast
_LINEAR_OPS = frozenset(("_to_copy", "add", "clone", "copy", "div", "mul", "neg", "rsub", "sub"))


class Stopped(Exception):
    """A forward did something that a recording cannot cover; the message names it."""


class ForwardLog:
    """Reads and writes by the copies of one module tree, and the tensors that they hold."""

    def __init__(self) -> None:
        # by a module's path, the attributes that were read, as names, and their values
        self.reads: dict[Path, dict[Path, Any]] = {}
        # containers that were read: the name, the contents before, and the copy that may be written
        self.containers: list[tuple[str, Any, Any]] = []
        # the copies' parameters by their ids, with their paths
        self.parameters: dict[int, tuple[Path, Tensor]] = {}
        self.buffers: list[Tensor] = []
        # by a module's path, its class and the number of its children
        self.kinds: dict[Path, tuple[type[nn.Module], int]] = {}
        # the rates of the calls of F.dropout
        self.dropout_rates: list[float] = []
        # the code that ran
        self.watch = CodeWatch()
        # why the forward was stopped, if it was
        self.stop: NotFused | None = None
        # state by which it may compute another function, and that no guard compares, if it read any
        self.unguarded: NotFused | None = None
        # whether it asked for the number of dimensions of a tensor
        self.asks_rank = False

    @property
    def obstacle(self) -> NotFused | None:
        """Return why other calls may compute another function than this run has shown."""
        return self.stop or self.unguarded

    def note_unguarded(self, reason: NotFused) -> None:
        """Note state that the forward read; the first reason is kept."""
        self.unguarded = self.unguarded or reason

    def stopped(self, key: str, about: Any = "") -> Stopped:
        """Remember the first reason, and return the exception to raise."""
        self.stop = self.stop or NotFused(key, about)
        return Stopped(key)

    def read(self, path: Path, names: Path, value: Any) -> Any:
        """Note the value of an attribute, and return the value that the forward gets."""
        reads = self.reads.setdefault(path, {})
        if is_simple(value) or is_function(value):
            reads[names] = value
            return value
        full_name = ".".join(path + names)
        items = value.items() if isinstance(value, dict) else value
        if type(value) in _READ_CONTAINERS and all(is_simple(i) or is_function(i) for i in items):
            before = copy.copy(value)
            copied = copy.copy(value)
            reads[names] = before
            self.containers.append((full_name, before, copied))
            return copied
        is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor))
        # the flag of classes that Python code defines
        if len(names) < 3 and is_object and type(value).__flags__ & (1 << 9):
            clone = object.__new__(_spying(_Spy, type(value)))
            vars(clone).update(vars(value), **{_PLACE: _SpyPlace(self, path, names)})
            return clone
        raise self.stopped("state", f"{full_name}, a {type(value).__name__}")


def guards_of(
    logs: Sequence[ForwardLog], leave: Collection[tuple[Path, str]] = ()
) -> Guards | NotFused:
    """Return guards for the state that runs of one module tree have read, or why there are none.

    leave: paths and names of attributes that may change, as they are read in every call.
    """
    guards = []
    for path, (kind, num_children) in logs[0].kinds.items():
        reads = {names: value for log in logs for names, value in log.reads.get(path, {}).items()}
        guarded = ((n, v) for n, v in sorted(reads.items()) if (path, n[0]) not in leave)
        guards.append(Guard(path, kind if path else None, num_children, tuple(guarded)))
    kinds = {path: kind for path, (kind, _) in logs[0].kinds.items()}
    values = (value for log in logs for reads in log.reads.values() for value in reads.values())
    functions = [value for value in values if is_function(value)]
    outside = outside_reads([log.watch for log in logs], kinds, functions)
    return outside if isinstance(outside, NotFused) else Guards(tuple(guards), outside)


class _SpyPlace(NamedTuple):
    """The place of a spy: a module, or an object in its attributes."""

    log: ForwardLog
    # of the module
    path: Path
    # the attributes that lead from the module to the object, none for the module itself
    names: Path


def _attributes_of(spy: Any) -> Mapping[str, Any]:
    """Return a spy's attributes, without logging a read."""
    return object.__getattribute__(spy, "__dict__")


class _Spy:
    """Base class that records which attributes of an object its methods read and write."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "__dict__" and tensor_reads.is_called_by_user(sys._getframe(1)):
            place = _attributes_of(self).get(_PLACE)
            if place is not None:
                place.log.note_unguarded(NotFused("state", "attributes by vars() or __dict__"))
        if name in _MODULE_NAMES or name.startswith("__") or name == _PLACE:
            return value
        attributes = _attributes_of(self)
        if name not in attributes:
            static = getattr_static(type(self), name, None)
            # attributes computed from others, and methods
            if static is None or hasattr(type(static), "__get__"):
                return value
        log, path, names = attributes[_PLACE]
        return log.read(path, (*names, name), value)

    def __getattr__(self, name: str) -> Any:
        value: Any = MISSING
        try:
            # where a module has its parameters; plain objects have no such method
            value = super().__getattr__(name)  # type: ignore[misc]
            return value
        finally:
            # an attribute that is missing, or a bias that is None, may be set later
            if (value is MISSING or value is None) and not name.startswith("__"):
                log, path, names = _attributes_of(self)[_PLACE]
                log.read(path, (*names, name), value)

    def __setattr__(self, name: str, value: Any) -> None:
        log, path, names = _attributes_of(self)[_PLACE]
        raise log.stopped("sets", ".".join((*path, *names, name)))

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


class _SpyModule(_Spy):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # past the hooks on all modules
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]  # of the module's class


@cache
def _spying(spy: type, kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (spy, kind), names)


def spied_copy(
    module: nn.Module,
    log: ForwardLog,
    dtype: torch.dtype | None,
    training: bool,
    rate: tuple[Path, float] | None,
) -> Any:
    """Return a copy of a module tree over meta tensors; shared modules are copied once per place.

    dtype: of all floating parameters and buffers, their own if None; rate: the path of a dropout
    rate and its value. While training, all others are 0.
    """

    def meta(tensor: Tensor) -> Tensor:
        is_cast = dtype is not None and tensor.is_floating_point()
        return torch.empty(
            tuple(tensor.shape), dtype=dtype if is_cast else tensor.dtype, device="meta"
        )

    def parameter(tensor: Tensor, path: Path) -> Tensor:
        made = nn.Parameter(meta(tensor), requires_grad=tensor.is_floating_point())
        log.parameters[id(made)] = path, made
        return made

    def enter(part: nn.Module, path: Path) -> tuple[type, dict[str, Any]]:
        is_watched = has_hooks(part)
        if path and (is_watched or type(part).__call__ is not nn.Module.__call__):
            raise log.stopped("hook", ".".join(path))
        log.kinds[path] = type(part), len(part._modules)
        buffers = {n: None if b is None else meta(b) for n, b in part._buffers.items()}
        log.buffers += [buffer for buffer in buffers.values() if buffer is not None]
        place = _SpyPlace(log, path, ())
        return _spying(_SpyModule, type(part)), {_PLACE: place, "_buffers": buffers}

    dropping, value = rate or ((), 0.0)
    rates = (lambda path: value if path == dropping else 0.0) if training else None
    return replica(module, parameter, training=training, rate=rates, enter=enter)


@dataclass(eq=False)
class Node:
    """A tensor of the recorded forward."""

    # how it was made:
    #   "x"            the input, also seen through casts and views that keep its rows
    #   "weight"       a parameter
    #   "product"      rows times a weight, plus a bias if there is one
    #   "columns"      some columns of its input
    #   "elementwise"  an op on each element of tensors of one shape
    #   "scalar"       a tensor without dimensions, made from no tensor
    #   "other"        any other op, and tensors that the forward did not create
    kind: str
    # the nodes that it was made of; of a product: rows, the weight and the bias, if there is one
    inputs: tuple[Node, ...] = ()
    # the op that made it, or a tensor described in words
    op: Any = None
    # the op's arguments, with nodes in place of tensors
    args: Any = ()
    # its arguments by name
    kwargs: Any = None
    # of a parameter, the attributes that lead to it
    path: Path = ()
    # of a parameter or product, whether the weight lies as [in, out]
    is_transposed: bool = False
    # of columns, the first and the one behind the last
    span: tuple[int, int] = (0, 0)
    # nodes are numbered in the order in which they were made
    number: int = field(default_factory=count().__next__)

    @property
    def name(self) -> str:
        """Return the op's name, for reasons."""
        return self.op if isinstance(self.op, str) else self.op.overloadpacket.__name__


def nodes_behind(y: Node, through: str | None = None) -> list[Node]:
    """Return a node and the nodes that made it, in the order in which they were made.

    through: the kind of nodes whose inputs are followed, None for all kinds.
    """
    seen: set[Node] = set()
    todo = [y]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.inputs if through in (None, node.kind) else ()
    return sorted(seen, key=lambda node: node.number)


class _OpCall(NamedTuple):
    """A call of an op."""

    # the op
    func: Any
    # its arguments by position
    args: Any
    # its arguments by name
    kwargs: Any
    # the tensors among the arguments
    tensors: list[Tensor]
    # their nodes
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__


class OpRecorder(TorchDispatchMode):
    """Knows the node of every tensor that the ops inside make."""

    def __init__(self, log: ForwardLog, xs: list[Tensor]):
        super().__init__()
        self.log = log
        self.dtype = xs[0].dtype
        # by the tensor's id; the tensors live as long as their ids are looked up
        self.nodes: dict[int, tuple[Tensor, Node]] = {id(x): (x, Node("x")) for x in xs}
        for path, parameter in log.parameters.values():
            self.nodes[id(parameter)] = parameter, Node("weight", path=path)
        for buffer in log.buffers:
            self.nodes[id(buffer)] = buffer, Node("other", op=BUFFER_OP)

    def node_of(self, tensor: Tensor) -> Node:
        """Return a tensor's node; a tensor that the forward did not create is of unknown kind."""
        known = self.nodes.get(id(tensor))
        return Node("other", op=FOREIGN_OP) if known is None else known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS_VALUES:
            raise self.log.stopped("values")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.log.stopped("random")
        written = written_by(func, args, kwargs)
        for node in map(self.node_of, written):
            if node.kind in ("x", "weight") or node.op in (BUFFER_OP, FOREIGN_OP):
                raise self.log.stopped("writes", "a tensor that it did not create")
        tensors = _tensors_in((args, kwargs))
        call = _OpCall(func, args, kwargs, tensors, nodes=tuple(map(self.node_of, tensors)))
        result = func(*args, **kwargs)
        if written:
            self._overwrite(call, written[0])
            return result
        for made in _tensors_in(result):
            self.nodes[id(made)] = made, self._made_by(call, made)
        return result

    def _overwrite(self, call: _OpCall, target: Tensor) -> None:
        """Give a tensor modified in place, and its aliases, the new node."""
        if call.name == "squeeze_" and tuple(call.args[1:]) == (0,) and target.dim():
            # of the row that a product of a vector is
            return
        before = self.node_of(target)
        node = self._elementwise(call, target) or Node("other", call.nodes, call.func)
        storage = storage_key(target.untyped_storage())
        for key, (tensor, old) in self.nodes.items():
            if storage_key(tensor.untyped_storage()) == storage:
                # a view of a part of it, or the tensor that it is a part of, is of unknown kind
                is_whole = old is before
                self.nodes[key] = tensor, node if is_whole else Node("other", (old,), call.func)

    def _made_by(self, call: _OpCall, made: Tensor) -> Node:
        """Return the node of a tensor that a call made."""
        if not call.tensors:
            kind = "scalar" if made.dim() == 0 else "other"
            return Node(kind, (), call.func, call.args, kwargs=call.kwargs)
        node = None
        if len(call.tensors) == 1 and call.name != "detach":
            node = self._view(call, made)
        elif call.name in ("mm", "addmm", "linear"):
            node = _product(call)
        elif call.name == "add" and not call.kwargs and len(call.nodes) == 2:
            node = _product_with_bias(*call.nodes)
        return node or self._elementwise(call, made) or self._node_with_args(call, "other")

    def _view(self, call: _OpCall, made: Tensor) -> Node | None:
        """Return the node of a view, cast or copy of a tensor, or of some of its columns."""
        (source,) = call.tensors
        (node,) = call.nodes
        if call.name == "_to_copy":
            floats = source.is_floating_point() and made.is_floating_point() and source.dim() > 0
            is_wide = made.dtype.itemsize > self.dtype.itemsize or made.dtype == self.dtype
            return node if floats and is_wide else None
        is_view = call.func.is_view or call.name in _COPIES
        if not is_view or 0 in (made.dim(), source.dim()):
            return None
        if node.kind == "weight":
            return _weight_view(node, source, made)
        is_in_order = source.is_contiguous() and made.is_contiguous()
        if made.shape[-1] == source.shape[-1] and made.numel() == source.numel():
            is_same = made.shape == source.shape and (
                call.name == "clone" or made.stride() == source.stride()
            )
            return node if is_in_order or is_same else None
        if made.shape[:-1] != source.shape[:-1] or made.stride() != source.stride():
            return None
        start = int(made.storage_offset()) - int(source.storage_offset())
        return Node("columns", (node,), span=(start, start + made.shape[-1]))

    def _elementwise(self, call: _OpCall, made: Tensor) -> Node | None:
        """Return the node of an elementwise op on tensors of one shape."""
        if not is_pointwise(call.func) or {node.kind for node in call.nodes} == {"scalar"}:
            return None
        are_rows = (
            node.kind == "scalar" or (tensor.shape == made.shape and node.kind in _ROW_KINDS)
            for tensor, node in zip(call.tensors, call.nodes, strict=True)
        )
        return self._node_with_args(call, "elementwise") if all(are_rows) else None

    def _node_with_args(self, call: _OpCall, kind: str) -> Node:
        """Return the node of a call that keeps its arguments, with nodes in place of tensors."""
        args, kwargs = pytree.tree_map(
            lambda value: self.node_of(value) if isinstance(value, Tensor) else value,
            (call.args, call.kwargs),
        )
        return Node(kind, call.nodes, call.func, args, kwargs=kwargs)


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _weight_view(node: Node, source: Tensor, made: Tensor) -> Node | None:
    """Return the node of a view of a whole parameter: the same, or transposed."""
    if made.shape == source.shape and made.stride() == source.stride():
        return node
    is_turned = made.shape == source.shape[::-1] and made.stride() == source.stride()[::-1]
    if source.dim() == 2 and is_turned:
        return Node("weight", path=node.path, is_transposed=not node.is_transposed)
    return None


def _product(call: _OpCall) -> Node | None:
    """Return the node of a product of rows with a weight."""
    if call.kwargs or (call.name == "addmm" and len(call.args) > 3):
        return None
    # addmm has the bias first, linear may have one last
    rows, weight, *biases = call.nodes if call.name != "addmm" else (*call.nodes[1:], call.nodes[0])
    if any(node.kind != "weight" for node in (weight, *biases)):
        return None
    # F.linear's weight is [out, in], which mm reads transposed
    is_transposed = weight.is_transposed == (call.name == "linear")
    return Node("product", (rows, weight, *biases), is_transposed=is_transposed)


def _product_with_bias(a: Node, b: Node) -> Node | None:
    """Return a product with a bias, of a product without one and a parameter, in any order."""
    product, bias = (b, a) if a.kind == "weight" else (a, b)
    if product.kind != "product" or bias.kind != "weight" or len(product.inputs) == 3:
        return None
    return Node("product", (*product.inputs, bias), is_transposed=product.is_transposed)


@dataclass
class Recording:
    """One run of a forward."""

    # the result, None where the run stopped
    y: Node | None
    # the state that it read
    log: ForwardLog
    # why it stopped
    reason: NotFused | None
    # of the input and of the result
    shapes: tuple[tuple[int, ...], ...] = ()
    # of the input and of the result
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes that made the result, in order, and the result's."""
        return [] if self.y is None else nodes_behind(self.y)


def record(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    training: bool = False,
    rate: tuple[Path, float] | None = None,
    autocast: bool = False,
    strided: bool = False,
    num_inputs: int = 1,
    watched: bool = True,
) -> Recording:
    """Record the ops of a module's forward on an input of this shape.

    Args:
        module: the module; a copy of it runs.
        shape: the shape of each input.
        dtype: of inputs and parameters; None for the module's own.
        training: whether the module trains, and gradients are enabled.
        rate: the path of a dropout rate and its value; in training all others are 0.
        autocast: whether autocast is enabled, which meta tensors ignore.
        strided: whether an input's first two dimensions are transposed in memory.
        num_inputs: how many tensors the forward takes.
        watched: whether the functions that run are noted, which slows the run.
    """
    log = ForwardLog()
    dtype_of_module = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        with undisturbed("meta"), _python_random(log):
            clone = spied_copy(module, log, dtype, training, rate=rate)
            xs = [_meta_input(shape, dtype or dtype_of_module, strided) for _ in range(num_inputs)]
            for x in xs:
                x.requires_grad_(training)
            with (
                torch.set_grad_enabled(training),
                _autocasting(autocast),
                _FunctionWatch(log),
                OpRecorder(log, xs) as recorder,
                log.watch if watched else nullcontext(),
            ):
                y = type(module).forward(clone, *xs)
    except Exception as error:  # arbitrary user code, on meta tensors
        _put_back(log)
        return Recording(
            None, log, log.stop or other_inputs(module) or NotFused("raised", type(error).__name__)
        )
    _put_back(log)
    for name, before, after in log.containers:
        if before != after:
            log.stopped("writes", name)
    if log.stop is None and (not isinstance(y, Tensor) or type(y) is not Tensor):
        log.stopped("returns", type(y).__name__)
    if log.stop is not None:
        return Recording(None, log, log.stop)
    return Recording(
        recorder.node_of(y),
        log,
        reason=None,
        shapes=(shape, tuple(y.shape)),
        dtypes=(xs[0].dtype, y.dtype),
    )


def _put_back(log: ForwardLog) -> None:
    """Put the state outside of the module back, and stop the log if the forward wrote it."""
    written = log.watch.state.put_back()
    if written is not None:
        log.stopped("writes", written)
    if log.watch.state.restore_generators():
        log.stopped("random")


def _meta_input(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device="meta")
    return x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x


def other_inputs(module: nn.Module) -> NotFused | None:
    """Return the inputs that a forward takes besides one tensor, as a reason; None for none."""
    # without the module itself, and the tensor, which a parametrization's list does not take
    others = [*inspect.signature(type(module).forward).parameters.values()][2:]
    kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    names = [parameter.name for parameter in others if parameter.kind in kinds]
    if not names:
        return None
    return NotFused("inputs", " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))))


@contextmanager
def _python_random(log: ForwardLog) -> Iterator[None]:
    """Stop the log if numbers of Python's or numpy's generators were drawn."""
    states = rng.RandomStates(rng.PYTHON)
    try:
        yield
    finally:
        if states.have_moved():
            log.stopped("random")


@contextmanager
def _autocasting(enabled: bool) -> Iterator[None]:
    before = [torch.is_autocast_enabled(device) for device in _AUTOCASTING]
    try:
        for device in _AUTOCASTING:
            torch.set_autocast_enabled(device, enabled)
        yield
    finally:
        for device, was in zip(_AUTOCASTING, before, strict=True):
            torch.set_autocast_enabled(device, was)


class _FunctionWatch(TorchFunctionMode):
    """Stops a forward that changes grad or autocast mode, as autograd.Functions do.

    Notes reads of tensors that may differ in other calls.
    """

    def __init__(self, log: ForwardLog):
        super().__init__()
        self.log = log
        self.modes = self._modes_now()

    def _modes_now(self) -> list[bool]:
        return [torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _AUTOCASTING)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._modes_now() != self.modes:
            raise self.log.stopped("function")
        if getattr(func, "__name__", "") in ("register_hook", "retain_grad"):
            raise self.log.stopped("tensor hooks")
        if func in (F.dropout, torch.dropout):
            self.log.dropout_rates.append((kwargs or {})["p"] if len(args) < 2 else args[1])
        result = func(*args, **(kwargs or {}))
        if not tensor_reads.is_called_by_user(sys._getframe(1)):
            return result
        name = tensor_reads.method_name(func)
        if name in tensor_reads.STATE:
            self.log.note_unguarded(NotFused("state", f"{name} of a tensor"))
        if name in tensor_reads.RANKS:
            self.log.asks_rank = True
        # the sizes of its own tensors do not change
        is_own = args and (
            isinstance(args[0], nn.Parameter) or any(args[0] is x for x in self.log.buffers)
        )
        if is_own or name not in ("__len__", *tensor_reads.SIZES):
            return result
        note = partial(self.log.note_unguarded, NotFused("sizes"))
        if name == "__len__":
            # len() returns a plain int, which tells nothing
            note()
            return result
        return tensor_reads.watched_sizes(result, args, kwargs or {}, note)


def is_nonlinear(recording: Recording) -> bool:
    """Whether a recorded forward computes a function of single elements that is not linear.

    False if it computes anything but such functions, products and columns.
    """
    kinds = ("elementwise", "other")
    ops = [node for node in recording.nodes if node.kind in kinds and not isinstance(node.op, str)]
    if not all(is_pointwise(node.op) for node in ops if node.kind == "other"):
        return False
    return any(node.name.rstrip("_") not in _LINEAR_OPS for node in ops)


def is_activation(module: nn.Module) -> bool:
    """Whether a module is a function of single elements, as its recorded forward shows."""
    if module._modules or any(is_lazy(p) or p.dim() > 1 for p in module.parameters()):
        return False
    if not takes_one(module):
        return False
    # code of others may write outside of its module
    is_of_torch = type(module).__module__.startswith("torch.")
    return is_nonlinear(record(module, (2, 3, 8), watched=not is_of_torch))
