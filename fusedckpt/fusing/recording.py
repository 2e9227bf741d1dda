"""Run a module's forward once on tensors without values, and write down what it computes.

Ops are recorded as they reach ATen, whatever the Python code is: a graph of matrix products with
parameters, parts of rows, ops on single elements, and others. Nothing is known by a name but the
matrix products.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fusedckpt.fusing import parity
from fusedckpt.fusing.graph import Node
from fusedckpt.fusing.held import Path
from fusedckpt.fusing.spying import Log, spied

_READS_VALUES = ("_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero")
# nodes that hold a number for every element of rows
_ROWS = ("x", "product", "part", "point")
_COPIES = ("_unsafe_view", "clone")
_AUTOCASTING = ("cpu", "cuda")


@dataclass
class Recording:
    """One run of a forward: its result's node, what it read, or why it says nothing."""

    y: Node | None
    log: Log
    reason: str | None
    # of the input and of the result
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()


def record(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    training: bool = False,
    dropping: Path | None = None,
    autocast: bool = False,
    strided: bool = False,
) -> Recording:
    """Record what a module's forward does to an input of this shape, in some dtype or its own.

    training: with gradients, too; dropping: the nn.Dropout in it that drops everything, all others
    drop nothing; autocast: whether it is enabled, which tensors without values do not follow;
    strided: whether the input's first two dimensions are transposed in memory.
    """
    log = Log()
    own = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        with _python_random(log), parity.undisturbed(torch.device("meta")):
            clone = spied(module, log, dtype, training, dropping)
            x = torch.empty(shape, dtype=dtype or own, device="meta")
            x = x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x
            x.requires_grad_(training)
            with (
                torch.set_grad_enabled(training),
                _autocasting(autocast),
                _Watch(log),
                _Recorder(log, x) as recorder,
            ):
                y = type(module).forward(clone, x)
    except Exception as error:  # arbitrary code of others, on tensors without values
        return Recording(None, log, log.stop or f"its forward raised a {type(error).__name__}")
    for name, before, after in log.containers:
        if before != after:
            log.stopped(f"its forward writes to {name}")
    if log.stop is None and (not isinstance(y, Tensor) or type(y) is not Tensor):
        log.stopped(f"its forward returns a {type(y).__name__}")
    if log.stop is not None:
        return Recording(None, log, log.stop)
    return Recording(recorder.node(y), log, None, (shape, tuple(y.shape)), (x.dtype, y.dtype))


@contextmanager
def _python_random(log: Log) -> Iterator[None]:
    """Put back the random states of Python and numpy, and stop the log if they were drawn from."""
    state: Any = random.getstate()
    theirs: Any = np.random.get_state()
    try:
        yield
    finally:
        now: Any = np.random.get_state()
        same = np.array_equal(theirs[1], now[1]) and theirs[2:] == now[2:]
        if random.getstate() != state or not same:
            log.stopped("its forward draws random numbers in Python")
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
    """Stops a forward that computes in other modes than it was called in, as own gradients do."""

    def __init__(self, log: Log):
        super().__init__()
        self.log, self.modes = log, self._modes()

    def _modes(self) -> list[bool]:
        return [torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _AUTOCASTING)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._modes() != self.modes:
            raise self.log.stopped("its forward has gradients of its own, or switches autocast")
        if getattr(func, "__name__", "") in ("register_hook", "retain_grad"):
            raise self.log.stopped("its forward hooks tensors")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Keeps the node of every tensor that the ops inside make."""

    def __init__(self, log: Log, x: Tensor):
        super().__init__()
        self.log, self.dtype = log, x.dtype
        # tensors live as long as their ids are looked up
        self.nodes: dict[int, tuple[Tensor, Node]] = {id(x): (x, Node("x"))}
        for path, parameter in log.parameters.values():
            self.nodes[id(parameter)] = parameter, Node("weight", path=path)

    def node(self, tensor: Tensor) -> Node:
        """Return what a tensor is: one that the forward did not make is nothing known."""
        found = self.nodes.get(id(tensor))
        return Node("other", op="a tensor of its own") if found is None else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _READS_VALUES:
            raise self.log.stopped("its forward depends on the values of tensors")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.log.stopped("its forward draws random numbers")
        written = self._written(func, args, kwargs)
        if any(self._is_strange(tensor) for tensor in written):
            raise self.log.stopped("its forward writes to a tensor that it did not make")
        out = func(*args, **kwargs)
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        of = tuple(self.node(t) for t in given)
        if written:
            self._overwrite(func, args, kwargs, written, of)
            return out
        for made in tree_flatten(out)[0]:
            if isinstance(made, Tensor):
                node = self._made(func, name, args, kwargs, given, of, made)
                self.nodes[id(made)] = made, node
        return out

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        named = zip(func._schema.arguments, args, strict=False)
        pairs = [(a, v) for a, v in named] + [
            (a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs
        ]
        return [
            value
            for argument, value in pairs
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value, Tensor)
        ]

    def _is_strange(self, tensor: Tensor) -> bool:
        node = self.node(tensor)
        return node.kind in ("x", "weight") or node.op == "a tensor of its own"

    def _overwrite(
        self, func: Any, args: Any, kwargs: Any, written: list[Tensor], of: tuple[Node, ...]
    ) -> None:
        """Give all names of a tensor written in place its new node."""
        (target,) = written[:1]
        before = self.node(target)
        node = self._point(func, args, kwargs, target) or Node("other", of, func)
        storage = target.untyped_storage()._cdata
        for key, (tensor, old) in self.nodes.items():
            if tensor.untyped_storage()._cdata == storage:
                # a view of a part of it, or what it is a part of
                kept = node if old is before else Node("other", (old,), func)
                self.nodes[key] = tensor, kept

    def _made(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        given: list[Tensor],
        of: tuple[Node, ...],
        made: Tensor,
    ) -> Node:
        if not given:
            is_number = made.dim() == 0
            return Node("number" if is_number else "other", (), func, args, kwargs)
        found = None
        if len(given) == 1 and name != "detach":
            found = self._viewed(func, name, given[0], of[0], made)
        if found is None and name in ("mm", "addmm", "linear"):
            found = _product(name, args, kwargs, [self.node(t) for t in given])
        if found is None and name == "add" and not kwargs and len(of) == 2:
            found = _biased(*of)
        found = found or self._point(func, args, kwargs, made)
        return found or Node("other", of, func, self._named(args), self._named(kwargs))

    def _viewed(self, func: Any, name: str, a: Tensor, node: Node, made: Tensor) -> Node | None:
        """Return what a tensor is whose elements are some of another, in the same rows."""
        if name == "_to_copy":
            floats = a.is_floating_point() and made.is_floating_point() and a.dim() > 0
            is_wide = made.dtype.itemsize > self.dtype.itemsize or made.dtype == self.dtype
            return node if floats and is_wide else None
        if not func.is_view and name not in _COPIES:
            return None
        if made.dim() == 0 or a.dim() == 0:
            return None
        if node.kind == "weight":
            return _turned(node, a, made)
        same_rows = made.shape[-1] == a.shape[-1] and made.numel() == a.numel()
        is_in_order = a.is_contiguous() and made.is_contiguous()
        if same_rows and (is_in_order or made.shape == a.shape):
            return node if is_in_order or name == "clone" or made.stride() == a.stride() else None
        if made.shape[:-1] != a.shape[:-1] or made.stride() != a.stride():
            return None
        start = int(made.storage_offset()) - int(a.storage_offset())
        return Node("part", (node,), span=(start, start + made.shape[-1]))

    def _point(self, func: Any, args: Any, kwargs: Any, made: Tensor) -> Node | None:
        """Return the node of an op on single elements of tensors of one shape."""
        if torch.Tag.pointwise not in func.tags:
            return None
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        nodes = [self.node(t) for t in given]
        for tensor, node in zip(given, nodes, strict=True):
            if node.kind == "number":
                continue
            if tensor.shape != made.shape or node.kind not in _ROWS:
                return None
        if all(node.kind == "number" for node in nodes):
            return None
        return Node("point", tuple(nodes), func, self._named(args), self._named(kwargs))

    def _named(self, arguments: Any) -> Any:
        """Put nodes in the places of tensors."""
        return tree_map(lambda v: self.node(v) if isinstance(v, Tensor) else v, arguments)


def _turned(node: Node, a: Tensor, made: Tensor) -> Node | None:
    """Return what a view of a whole parameter is: the same, or transposed."""
    if made.shape == a.shape and made.stride() == a.stride():
        return node
    turned = made.shape == a.shape[::-1] and made.stride() == a.stride()[::-1]
    if a.dim() == 2 and turned:
        return Node("weight", path=node.path, is_transposed=not node.is_transposed)
    return None


def _product(name: str, args: Any, kwargs: Any, of: list[Node]) -> Node | None:
    if kwargs or (name == "addmm" and len(args) > 3):
        return None
    if name == "addmm":
        bias, rows, weight = of
    else:
        rows, weight, *rest = of
        bias = rest[0] if rest else None
    if weight.kind != "weight" or (bias is not None and bias.kind != "weight"):
        return None
    # F.linear's weight is [out, in], which mm reads transposed
    is_transposed = weight.is_transposed == (name == "linear")
    return Node(
        "product",
        (rows, weight) if bias is None else (rows, weight, bias),
        is_transposed=is_transposed,
    )


def _biased(a: Node, b: Node) -> Node | None:
    """Return a product with a bias where one is a product without, the other a parameter."""
    if a.kind == "weight":
        a, b = b, a
    if a.kind != "product" or b.kind != "weight" or len(a.of) == 3:
        return None
    return Node("product", (*a.of, b), is_transposed=a.is_transposed)
