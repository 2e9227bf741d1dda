"""Run a module's forward once on meta tensors, and record its ops.

Ops are recorded when they reach ATen, whatever the Python code: a graph of matmuls with parameters,
slices of rows, elementwise ops, and others. Only matmuls are recognised by name.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fusedckpt.autograd.private import (
    TorchDispatchMode,
    is_pointwise,
    pytree,
    schema_of,
    storage_key,
)
from fusedckpt.fusing.replica import Path, undisturbed
from fusedckpt.fusing.spies import Log, spied
from fusedckpt.layers.fallbacks import NotFused

_READS_VALUES = ("_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero")
# nodes that hold a number for every element of rows
_ROWS = ("x", "product", "part", "point")
_COPIES = ("_unsafe_view", "clone")
_AUTOCASTING = ("cpu", "cuda")
# the op of a tensor that the forward did not create: a buffer, or any other
BUFFER_OP, FOREIGN_OP = "a buffer", "a tensor of its own"


@dataclass(eq=False)
class Node:
    """A tensor of the recorded forward."""

    # "x"; "weight", a parameter; "product", of rows and a weight, with the bias added; "part",
    # some columns of its input; "point", an elementwise op; "number"; "other", any other op
    kind: str
    # the tensors that it was made of
    of: tuple[Node, ...] = ()
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
    # of a part, its first column and the one behind its last
    span: tuple[int, int] = (0, 0)
    # nodes are numbered in the order in which they were made
    number: int = field(default_factory=count().__next__)

    @property
    def name(self) -> str:
        """Return the op's name, for reasons."""
        return self.op if isinstance(self.op, str) else self.op.overloadpacket.__name__


@dataclass
class Recording:
    """One run of a forward."""

    # the result, None where the run stopped
    y: Node | None
    # the state that it read
    log: Log
    # why it stopped
    reason: NotFused | None
    # of the input and of the result
    shapes: tuple[tuple[int, ...], ...] = ()
    # of the input and of the result
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes that made the result, in order, and its own."""
        return [] if self.y is None else walk(self.y)


def described(recording: Recording) -> list[tuple[Any, ...]]:
    """Return the nodes that made a result as values to compare: ops, numbers, places of inputs."""
    places = {node: place for place, node in enumerate(recording.nodes)}

    def described_node(node: Node) -> tuple[Any, ...]:
        args, kwargs = pytree.tree_map(
            lambda value: f"node {places[value]}" if isinstance(value, Node) else value,
            (node.args, node.kwargs or {}),
        )
        inputs = [places[parent] for parent in node.of]
        return node.kind, str(node.op), inputs, args, kwargs, node.path, node.span

    return [described_node(node) for node in recording.nodes]


def walk(y: Node, through: str | None = None) -> list[Node]:
    """Return a node and the nodes that made it in order, past nodes of that kind alone if given."""
    seen: set[Node] = set()
    todo = [y]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.of if through in (None, node.kind) else ()
    return sorted(seen, key=lambda node: node.number)


def record(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    training: bool = False,
    rate: tuple[Path, float] | None = None,
    autocast: bool = False,
    strided: bool = False,
    keeps_rates: bool = False,
    grad: bool | None = None,
    inputs: int = 1,
) -> Recording:
    """Record the ops of a module's forward on an input of this shape, in some dtype or its own.

    training: the mode; rate: the path of a dropout rate and its value, while all others are 0 in
    training, unless `keeps_rates`; autocast: whether it is enabled, which meta tensors ignore;
    strided: whether the input's first two dimensions are transposed in memory; grad: whether
    gradients are enabled, by default in training; inputs: how many tensors of the shape it takes.
    """
    grad = training if grad is None else grad
    log = Log()
    dtype_of_module = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        with _python_random(log), undisturbed("meta"):
            clone = spied(module, log, dtype, training, rate=rate, keeps_rates=keeps_rates)
            xs = [
                torch.empty(shape, dtype=dtype or dtype_of_module, device="meta")
                for _ in range(inputs)
            ]
            if strided:
                xs = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in xs]
            for x in xs:
                x.requires_grad_(grad)
            with (
                torch.set_grad_enabled(grad),
                _autocasting(autocast),
                _Watch(log),
                _Recorder(log, xs) as recorder,
            ):
                y = type(module).forward(clone, *xs)
    except Exception as error:  # arbitrary user code, on meta tensors
        return Recording(None, log, log.stop or _raised(module, error))
    for name, before, after in log.containers:
        if before != after:
            log.stopped("writes", name)
    if log.stop is None and (not isinstance(y, Tensor) or type(y) is not Tensor):
        log.stopped("returns", type(y).__name__)
    if log.stop is not None:
        return Recording(None, log, log.stop)
    return Recording(
        recorder.node(y), log, None, (shape, tuple(y.shape)), dtypes=(xs[0].dtype, y.dtype)
    )


def _raised(module: nn.Module, error: Exception) -> NotFused:
    """Return why a forward raised on one tensor: it takes more, or another reason."""
    _, first, *others = inspect.signature(type(module).forward).parameters.values()
    kinds = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD, first.KEYWORD_ONLY)
    names = [parameter.name for parameter in others if parameter.kind in kinds]
    if names:
        return NotFused("inputs", " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))))
    return NotFused("raised", type(error).__name__)


@contextmanager
def _python_random(log: Log) -> Iterator[None]:
    """Restore the random states of Python and numpy, and stop the log if numbers were drawn."""
    state: Any = random.getstate()
    theirs: Any = np.random.get_state()
    try:
        yield
    finally:
        now: Any = np.random.get_state()
        same = np.array_equal(theirs[1], now[1]) and theirs[2:] == now[2:]
        if random.getstate() != state or not same:
            log.stopped("random")
        random.setstate(state)
        np.random.set_state(theirs)


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


class _Watch(TorchFunctionMode):
    """Stops a forward that changes grad or autocast mode, as autograd.Functions do."""

    def __init__(self, log: Log):
        super().__init__()
        self.log, self.modes = log, self._modes()

    def _modes(self) -> list[bool]:
        return [torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _AUTOCASTING)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._modes() != self.modes:
            raise self.log.stopped("function")
        if getattr(func, "__name__", "") in ("register_hook", "retain_grad"):
            raise self.log.stopped("tensor hooks")
        if func in (F.dropout, torch.dropout):
            self.log.dropped.append((kwargs or {})["p"] if len(args) < 2 else args[1])
        return func(*args, **(kwargs or {}))


class _Call(NamedTuple):
    """A call of an op, the tensors among its arguments, and their nodes."""

    func: Any
    args: Any
    kwargs: Any
    given: list[Tensor]
    of: tuple[Node, ...]

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__


class _Recorder(TorchDispatchMode):
    """Keeps the node of every tensor that the ops inside make."""

    def __init__(self, log: Log, xs: list[Tensor]):
        super().__init__()
        self.log, self.dtype = log, xs[0].dtype
        # tensors live as long as their ids are looked up
        self.nodes: dict[int, tuple[Tensor, Node]] = {id(x): (x, Node("x")) for x in xs}
        for path, parameter in log.parameters.values():
            self.nodes[id(parameter)] = parameter, Node("weight", path=path)
        for buffer in log.buffers:
            self.nodes[id(buffer)] = buffer, Node("other", op=BUFFER_OP)

    def node(self, tensor: Tensor) -> Node:
        """Return a tensor's node; a tensor that the forward did not create is of unknown kind."""
        known = self.nodes.get(id(tensor))
        return Node("other", op=FOREIGN_OP) if known is None else known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS_VALUES:
            raise self.log.stopped("values")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.log.stopped("random")
        written = _written(func, args, kwargs)
        for node in map(self.node, written):
            if node.kind in ("x", "weight") or node.op in (BUFFER_OP, FOREIGN_OP):
                raise self.log.stopped("writes", "a tensor that it did not create")
        tensors = _tensors((args, kwargs))
        call = _Call(func, args, kwargs, tensors, of=tuple(map(self.node, tensors)))
        out = func(*args, **kwargs)
        if written:
            self._overwrite(call, written[0])
            return out
        for made in _tensors(out):
            self.nodes[id(made)] = made, self._made(call, made)
        return out

    def _overwrite(self, call: _Call, target: Tensor) -> None:
        """Give a tensor modified in place, and its aliases, the new node."""
        before = self.node(target)
        node = self._point(call, target) or Node("other", call.of, call.func)
        storage = storage_key(target.untyped_storage())
        for key, (tensor, old) in self.nodes.items():
            if storage_key(tensor.untyped_storage()) == storage:
                # a view of a part of it, or the tensor that it is a part of
                kept = node if old is before else Node("other", (old,), call.func)
                self.nodes[key] = tensor, kept

    def _made(self, call: _Call, made: Tensor) -> Node:
        if not call.given:
            is_number = made.dim() == 0
            return Node(
                "number" if is_number else "other", (), call.func, call.args, kwargs=call.kwargs
            )
        node = None
        if len(call.given) == 1 and call.name != "detach":
            node = self._viewed(call, made)
        elif call.name in ("mm", "addmm", "linear"):
            node = _product(call)
        elif call.name == "add" and not call.kwargs and len(call.of) == 2:
            node = _biased(*call.of)
        return node or self._point(call, made) or self._as(call, "other")

    def _viewed(self, call: _Call, made: Tensor) -> Node | None:
        """Return the node of a view with some columns of another tensor."""
        (a,), (node,) = call.given, call.of
        if call.name == "_to_copy":
            floats = a.is_floating_point() and made.is_floating_point() and a.dim() > 0
            is_wide = made.dtype.itemsize > self.dtype.itemsize or made.dtype == self.dtype
            return node if floats and is_wide else None
        if not (call.func.is_view or call.name in _COPIES) or 0 in (made.dim(), a.dim()):
            return None
        if node.kind == "weight":
            return _turned(node, a, made)
        is_in_order = a.is_contiguous() and made.is_contiguous()
        if made.shape[-1] == a.shape[-1] and made.numel() == a.numel():
            is_same = made.shape == a.shape and (
                call.name == "clone" or made.stride() == a.stride()
            )
            return node if is_in_order or is_same else None
        if made.shape[:-1] != a.shape[:-1] or made.stride() != a.stride():
            return None
        start = int(made.storage_offset()) - int(a.storage_offset())
        return Node("part", (node,), span=(start, start + made.shape[-1]))

    def _point(self, call: _Call, made: Tensor) -> Node | None:
        """Return the node of an elementwise op on tensors of one shape."""
        if not is_pointwise(call.func) or {one.kind for one in call.of} == {"number"}:
            return None
        fits = (
            node.kind == "number" or (tensor.shape == made.shape and node.kind in _ROWS)
            for tensor, node in zip(call.given, call.of, strict=True)
        )
        return self._as(call, "point") if all(fits) else None

    def _as(self, call: _Call, kind: str) -> Node:
        """Return the node of a call, with nodes in place of tensors."""
        args, kwargs = pytree.tree_map(
            lambda v: self.node(v) if isinstance(v, Tensor) else v, (call.args, call.kwargs)
        )
        return Node(kind, call.of, call.func, args, kwargs=kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an op modifies."""
    arguments = schema_of(func).arguments
    by_name = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [by_name[name] for name in names if isinstance(by_name.get(name), Tensor)]


def _turned(node: Node, a: Tensor, made: Tensor) -> Node | None:
    """Return the node of a view of a whole parameter: the same, or transposed."""
    if made.shape == a.shape and made.stride() == a.stride():
        return node
    turned = made.shape == a.shape[::-1] and made.stride() == a.stride()[::-1]
    if a.dim() == 2 and turned:
        return Node("weight", path=node.path, is_transposed=not node.is_transposed)
    return None


def _product(call: _Call) -> Node | None:
    if call.kwargs or (call.name == "addmm" and len(call.args) > 3):
        return None
    # addmm has the bias first, linear may have one last
    rows, weight, *biases = call.of if call.name != "addmm" else (*call.of[1:], call.of[0])
    bias = biases[0] if biases else None
    if weight.kind != "weight" or (bias is not None and bias.kind != "weight"):
        return None
    of = (rows, weight) if bias is None else (rows, weight, bias)
    # F.linear's weight is [out, in], which mm reads transposed
    return Node("product", of, is_transposed=weight.is_transposed == (call.name == "linear"))


def _biased(a: Node, b: Node) -> Node | None:
    """Return a product with a bias, of a product without one and a parameter."""
    if a.kind == "weight":
        a, b = b, a
    if a.kind != "product" or b.kind != "weight" or len(a.of) == 3:
        return None
    return Node("product", (*a.of, b), is_transposed=a.is_transposed)
