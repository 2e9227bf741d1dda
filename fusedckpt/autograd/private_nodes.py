"""Nodes of torch's functions: the facts that their private attributes tell.

A node has packed tensors, and options, of its call; its result's shape is in its metadata. So a
node tells the function of its call (`operation_of`), and where the tensors are that this reads.
Nodes that are not in `_OPERATIONS`, or that lack such an attribute in this torch, tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd.private import raw_saved

# the packed tensors of torch's own nodes are attributes of names that begin so
_SAVED = "_raw_saved_"
# that of the tensor itself, without this part
_RAW = "_raw"
# the attributes by which a node of a product has its packed factors
FACTORS = "_raw_saved_self", "_raw_saved_other"
_BATCH_NORM_NODES = (
    "NativeBatchNormBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
)
_GROUP_NORM_NODE = "NativeGroupNormBackward0"
# the classes of nodes
_NODE_CLASSES: Any = vars(torch._C)["_functions"]
# whether nodes of group norms do not tell it: from torch 2.14 on
LACKS_EPS = not hasattr(getattr(_NODE_CLASSES, _GROUP_NORM_NODE), "_saved_eps")
# in such a node's metadata, that of its layer
_TOLD_EPS = "fusedckpt_eps"
_CHANNEL_READERS = (
    "ConvolutionBackward",
    "MaxPool2DWithIndicesBackward",
    "MaxPool3DWithIndicesBackward",
)


@cache
def name_of_kind(kind: type) -> str:
    """Return the name of a class of torch's nodes, without the number of its overload."""
    return kind.__name__.rstrip("0123456789")


@cache
def names_of_saved(kind: type) -> tuple[str, ...]:
    """Return the attributes by which a class of torch's nodes has its packed tensors."""
    return tuple([name for name in dir(kind) if name.startswith(_SAVED)])


def saved_by(node: Any) -> list[Any]:
    """Return the tensors that a node has saved, and objects of hooks in place of them."""
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            saved: Any = raw_saved(node)
        else:
            saved = []
            for name in names_of_saved(type(node)):
                value = getattr(node, name)
                saved += value if isinstance(value, (list, tuple)) else [value]
        return [part.data for part in saved if part is not None]
    except (RuntimeError, ValueError):
        # the node has run already, or was written since
        return []


def saved_tensor(node: Any, name: str) -> Tensor:
    """Return a packed tensor of a node by its attribute; raise RuntimeError if it was written."""
    return getattr(node, name.removeprefix(_RAW))


def saved_options(node: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return options of a call by their names, as its node has saved them."""
    values = [getattr(node, "_saved_" + name) for name in names]
    return tuple([_signed(value) if value.__class__ is int else value for value in values])


def meta_of_result(node: Any, number: int) -> Any:
    """Return the metadata of a node's result: shape, dtype and device; None where it has none.

    node: may be None, as that of a tensor without gradient.
    """
    results = getattr(node, "_input_metadata", ())[number : number + 1]
    return results[0] if results else None


@cache
def is_sum(kind: type) -> bool:
    """Whether a class of nodes is that of sums or differences of two tensors, with a factor."""
    return kind.__name__ in ("AddBackward0", "SubBackward0")


@cache
def is_product(kind: type) -> bool:
    """Whether a class of nodes is that of products or quotients of two tensors."""
    return kind.__name__ in ("MulBackward0", "DivBackward0")


def parts_of_sum(node: Any) -> tuple[tuple[Any, int], ...]:
    """Return the nodes of the two tensors of a sum, each with the number of its result.

    () where one has a factor.
    """
    if getattr(node, "_saved_alpha", None) != 1:
        return ()
    return node.next_functions


@cache
def reads_channels(kind: type) -> bool:
    """Whether a class of nodes is that of convolutions or max pools, which save their input."""
    return name_of_kind(kind) in _CHANNEL_READERS


@cache
def is_norm(kind: type) -> bool:
    """Whether a class of nodes is that of batch or group norms."""
    return kind.__name__ == _GROUP_NORM_NODE or kind.__name__ in _BATCH_NORM_NODES


@cache
def tells_norm(kind: type) -> bool:
    """Whether a class of nodes is that of batch or group norms, and tells their eps."""
    return is_norm(kind) and not (LACKS_EPS and kind.__name__ == _GROUP_NORM_NODE)


def options_of_norm(node: Any) -> tuple[int, float | None, bool, torch.dtype | None] | None:
    """Return options of a batch or group norm's call by its node, None for other nodes.

    That is the number of groups, 0 for batch norm; eps, None where neither the node nor the layer
    tells it; whether batch norm read batch statistics; and the dtype of the weight, None for none.
    """
    # without calls of functions
    kind = node.__class__.__name__
    if kind == _GROUP_NORM_NODE:
        groups, by_batch = node._saved_group, True
        eps = node.metadata.get(_TOLD_EPS) if LACKS_EPS else node._saved_eps
    elif kind in _BATCH_NORM_NODES:
        eps = node._saved_eps if kind == _BATCH_NORM_NODES[0] else node._saved_epsilon
        groups, by_batch = 0, node._saved_training
    else:
        return None
    weight = node._saved_weight
    return groups, eps, by_batch, None if weight is None else weight.dtype


def tell_eps(node: Any, layer: Any) -> None:
    """Tell the node of a layer's call the eps that it lacks, if it is that of a group norm."""
    if node.__class__.__name__ == _GROUP_NORM_NODE:
        node.metadata[_TOLD_EPS] = layer.eps


def vectors_of_norm(node: Any) -> tuple[Any, Any] | None:
    """Return the weight and bias of a norm by its node, None where it does not tell the bias."""
    weight = node._saved_weight
    if weight is None:
        return None, None
    # of a parameter that is trained
    bias = getattr(node.next_functions[2][0], "variable", None)
    return None if bias is None else (weight, bias)


def running_of_norm(node: Any) -> tuple[Any, Any]:
    """Return the running mean and variance of a batch norm by its node, None for a group norm."""
    return getattr(node, "_saved_running_mean", None), getattr(node, "_saved_running_var", None)


@cache
def is_cat(kind: type) -> bool:
    """Whether a class of nodes is that of concatenations."""
    return kind.__name__ == "CatBackward0"


def dim_of_cat(node: Any) -> int:
    """Return the dimension of a concatenation by its node."""
    return _signed(node._saved_dim)


def without_padding(node: Any) -> Any:
    """Return a node, or the one before it where it is that of a padding by nothing."""
    if node.__class__.__name__ == "ConstantPadNdBackward0" and not any(node._saved_pad):
        return node.next_functions[0][0]
    return node


def _signed(number: int) -> int:
    """Return a number that torch shows without its sign."""
    return number - (1 << 64) if number >> 63 else number


class PackedArgument(NamedTuple):
    """A tensor that a node has packed."""

    # the attribute with the packed tensor, or all of them
    name: str = "_raw_saved_tensors"
    # its place among all of them
    place: int | None = None
    # whether it is the node's result, not an argument
    is_result: bool = False
    # whether it is an input of attention
    is_of_attention: bool = False

    def of(self, node: Any) -> Any:
        """Return the packed tensor of a node."""
        packed = getattr(node, self.name)
        return packed if self.place is None else packed[self.place]

    def tensor(self, node: Any) -> Tensor:
        """Return the tensor itself; raise RuntimeError where it was written or is freed."""
        if self.place is None:
            # `saved_tensor`, without a call
            return getattr(node, self.name[len(_RAW) :])
        return node.saved_tensors[self.place]


# those of attention: query, key and value
ATTENTION_INPUTS = tuple(
    [
        PackedArgument(f"_raw_saved_{name}", is_of_attention=True)
        for name in ("query", "key", "value")
    ]
)
# of a function of one tensor that the node does not pack
_ONE = (None,)
_ATTENTION_OUTPUT = PackedArgument("_raw_saved_output", is_result=True)
_PACKED_FACTORS = tuple(map(PackedArgument, FACTORS))
_MM = PackedArgument("_raw_saved_self"), PackedArgument("_raw_saved_mat2")
_ADDMM = PackedArgument("_raw_saved_mat1"), PackedArgument("_raw_saved_mat2")


class Operation(NamedTuple):
    """A function of a node's arguments.

    sources: for each argument, how the node has packed it, if it has; None for one that the node
    never packs. Those without are results of the nodes before.
    """

    function: Callable[..., Tensor]
    sources: Sequence[PackedArgument | None]


@cache
def is_attention(kind: type) -> bool:
    """Whether a class of nodes is that of a kernel of scaled_dot_product_attention."""
    names = names_of_saved(kind)
    is_named = kind.__name__.startswith("ScaledDotProduct")
    return is_named and all(packed.name in names for packed in ATTENTION_INPUTS)


def is_leaf(node: Any) -> bool:
    """Whether a node has a leaf of the graph, as its `variable`."""
    return hasattr(node, "variable")


@cache
def is_view(kind: type) -> bool:
    """Whether a class of nodes is that of views of their one argument."""
    return name_of_kind(kind) in _VIEW_OPERATIONS


def operation_of(node: Any, number: int) -> Operation | None:
    """Return the function of a node's call, None where the node does not tell it.

    number: of the node's results, which the function returns alone.
    """
    kind = node.__class__
    build = _operation_by(kind)
    return None if build is None else build(node, number)


def view_of_node(node: Any, number: int) -> Callable[[Tensor], Tensor] | None:
    """Return the view that a node tells, as a function of the base; None for other nodes.

    number: of the node's results.
    """
    operation = operation_of(node, number) if is_view(node.__class__) else None
    return None if operation is None else operation.function


@cache
def option_reader(kind: type) -> Callable[[Any], Any] | None:
    """Return the reader of options of a class of nodes; None where functions have none."""
    name = name_of_kind(kind)
    if name in _RESULT_OPTIONS:
        return _RESULT_OPTIONS[name]
    names = _SAVED_OPTIONS.get(kind.__name__) or _SAVED_OPTIONS.get(name)
    return attrgetter(*names) if names else None


def _shape(node: Any) -> Any:
    return node._input_metadata[0].shape


def _dtype_and_device(node: Any) -> Any:
    meta = node._input_metadata[0]
    return meta.dtype, meta.device


@cache
def _operation_by(kind: type) -> Callable[[Any, int], Operation | None] | None:
    if is_attention(kind):
        return _attended
    # the numbers of others tell overloads that differ in how options are given
    return _OPERATIONS.get(kind.__name__) or _OPERATIONS.get(name_of_kind(kind))


def _attended(_node: Any, number: int) -> Operation | None:
    # other results are none that code gets
    return None if number else Operation(_same, (_ATTENTION_OUTPUT,))


def _same(x: Tensor) -> Tensor:
    return x


def _reshaped(node: Any, number: int) -> Operation:
    return Operation(methodcaller("reshape", meta_of_result(node, number).shape), _ONE)


def _expanded(node: Any, number: int) -> Operation:
    return Operation(methodcaller("expand", meta_of_result(node, number).shape), _ONE)


def _cast(node: Any, number: int) -> Operation:
    meta = meta_of_result(node, number)
    return Operation(methodcaller("to", meta.device, meta.dtype), _ONE)


def _transposed(node: Any, _: int) -> Operation:
    dims = _signed(node._saved_dim0), _signed(node._saved_dim1)
    return Operation(methodcaller("transpose", *dims), _ONE)


def _permuted(node: Any, _: int) -> Operation:
    return Operation(methodcaller("permute", [*map(_signed, node._saved_dims)]), _ONE)


def _sliced(node: Any, _: int) -> Operation:
    dim, start, end = map(_signed, (node._saved_dim, node._saved_start, node._saved_end))
    part = slice(start, end, node._saved_step)
    index = (*(slice(None),) * dim, part) if dim >= 0 else (..., part, *(slice(None),) * (-1 - dim))
    return Operation(methodcaller("__getitem__", index), _ONE)


def _selected(node: Any, _: int) -> Operation:
    return Operation(
        methodcaller("select", _signed(node._saved_dim), _signed(node._saved_index)), _ONE
    )


def _split(node: Any, number: int) -> Operation:
    return _part(node, number * node._saved_split_size, node._saved_split_size)


def _split_by_sizes(node: Any, number: int) -> Operation:
    sizes = node._saved_split_sizes
    return _part(node, sum(sizes[:number]), sizes[number])


def _part(node: Any, start: int, size: int) -> Operation:
    """Return the function of one part, without the others."""
    dim = _signed(node._saved_dim)
    return Operation(lambda x: x.narrow(dim, start, min(size, x.shape[dim] - start)), _ONE)


def _unbound(node: Any, number: int) -> Operation:
    return Operation(methodcaller("select", _signed(node._saved_dim), number), _ONE)


def _joined(function: Callable[..., Tensor]) -> Callable[[Any, int], Operation]:
    def build(node: Any, _: int) -> Operation:
        dim = _signed(node._saved_dim)
        return Operation(lambda *x: function(x, dim), (None,) * len(node.next_functions))

    return build


def _product_of(function: Callable[..., Tensor]) -> Callable[[Any, int], Operation]:
    operation = Operation(function, _PACKED_FACTORS)
    return lambda _node, _: operation


def _sum_of(function: Callable[..., Tensor]) -> Callable[[Any, int], Operation | None]:
    operation = Operation(function, (None, None))
    return lambda node, _: operation if node._saved_alpha == 1 else None


def _mm(_node: Any, _: int) -> Operation:
    return Operation(torch.mm, _MM)


def _addmm(node: Any, _: int) -> Operation | None:
    if (node._saved_alpha, node._saved_beta) != (1, 1):
        return None
    return Operation(torch.addmm, (None, *_ADDMM))


def _of_one(function: Callable[[Tensor], Tensor]) -> Callable[[Any, int], Operation]:
    operation = Operation(function, _ONE)
    return lambda _node, _: operation


_VIEW_OPERATIONS: dict[str, Callable[[Any, int], Operation]] = {
    "AliasBackward": _reshaped,
    "ViewBackward": _reshaped,
    "UnsafeViewBackward": _reshaped,
    "ReshapeAliasBackward": _reshaped,
    "UnsqueezeBackward": _reshaped,
    "SqueezeBackward": _reshaped,
    "ExpandBackward": _expanded,
    "TransposeBackward": _transposed,
    "TBackward": _of_one(torch.t),
    "PermuteBackward": _permuted,
    "SliceBackward": _sliced,
    "SelectBackward": _selected,
    "SplitBackward": _split,
    "SplitWithSizesBackward": _split_by_sizes,
    "UnbindBackward": _unbound,
    "ViewAsRealBackward": _of_one(torch.view_as_real),
    "ViewAsComplexBackward": _of_one(torch.view_as_complex),
}
_OPERATIONS: dict[str, Callable[[Any, int], Operation | None]] = {
    **_VIEW_OPERATIONS,
    # most are copies of tensors that are not contiguous
    "CloneBackward": _of_one(methodcaller("clone", memory_format=torch.contiguous_format)),
    "ToCopyBackward": _cast,
    "CatBackward": _joined(torch.cat),
    "StackBackward": _joined(torch.stack),
    "NegBackward": _of_one(torch.neg),
    "MulBackward0": _product_of(torch.mul),
    "DivBackward0": _product_of(torch.div),
    "AddBackward0": _sum_of(torch.add),
    "SubBackward0": _sum_of(torch.sub),
    "MmBackward": _mm,
    "AddmmBackward": _addmm,
}
# readers of options that the metadata of the result has
_RESULT_OPTIONS = {"ExpandBackward": _shape, "ToCopyBackward": _dtype_and_device}
for _name, _build in _VIEW_OPERATIONS.items():
    if _build is _reshaped:
        _RESULT_OPTIONS[_name] = _shape
# the attributes of other options
_SAVED_OPTIONS = {
    "TransposeBackward": ("_saved_dim0", "_saved_dim1"),
    "PermuteBackward": ("_saved_dims",),
    "SliceBackward": ("_saved_dim", "_saved_start", "_saved_end", "_saved_step"),
    "SelectBackward": ("_saved_dim", "_saved_index"),
    "SplitBackward": ("_saved_dim", "_saved_split_size"),
    "SplitWithSizesBackward": ("_saved_dim", "_saved_split_sizes"),
    "UnbindBackward": ("_saved_dim",),
    "CatBackward": ("_saved_dim",),
    "StackBackward": ("_saved_dim",),
    "AddBackward0": ("_saved_alpha",),
    "SubBackward0": ("_saved_alpha",),
    "AddmmBackward": ("_saved_alpha", "_saved_beta"),
}
