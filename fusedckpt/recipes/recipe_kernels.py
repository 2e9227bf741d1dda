"""Sequences of recipes that one kernel makes, where kernels run (`kernels/pointwise.py`).

    act(group_norm(x)), act(batch_norm(x) + residual)    from the statistics that autograd saves
    norm(x) * factor + shift                             also of fused norms
    residual + gate * branch

A sequence is found from its end, the recipe that a reader asks for. Values between are not made,
also where other readers will need them later: they are made for these then. On ATen each function
runs as it did in the forward, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt.autograd.dispatch import path_of
from fusedckpt.autograd.recipes import Leaf, Made, View, key_of
from fusedckpt.autograd.replay import Replay
from fusedckpt.blocks import reader
from fusedckpt.kernels import pointwise
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.runtime import as_vector

_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_MULTIPLIES = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
_ACTIVATIONS = {
    F.silu: "silu",
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    Tensor.relu: "relu",
    Tensor.relu_: "relu",
    F.gelu: "gelu",
}
_VIEWS = (View, Leaf)
# norms that save statistics, and the names of their arguments
_NORM_ARGUMENTS = {
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.batch_norm: (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    ),
}
_ROW_NORMS = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}


def recipe_statistics(
    func: Any, x: Tensor, num_groups: int, inputs: Sequence[Tensor], saved: Sequence[Tensor]
) -> list[Tensor]:
    """Return the mean and the inverse deviation that a norm saved, [] where no kernel reads them.

    num_groups: of a group norm; inputs: the tensors of the call, which it may have saved, too.
    """
    if path_of(x.device, x.dtype) == "aten":
        return []
    count = x.shape[1] if func is F.batch_norm else x.shape[0] * num_groups
    keys = {key_of(t) for t in inputs}
    statistics = [
        t
        for t in saved
        if t.numel() == count and t.is_floating_point() and key_of(t) not in keys and t.dim() < 3
    ]
    return statistics if len(statistics) == 2 else []


class _Call(NamedTuple):
    """A recipe of a torch function, with `View`s in place of its tensors."""

    made: Made
    func: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def named(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the arguments by name."""
        return dict(zip(names, self.args, strict=False)) | self.kwargs


def _call_of(source: Leaf | Made) -> _Call | None:
    if not isinstance(source, Made) or not isinstance(source.again, Replay):
        return None
    again = source.again
    if again.autocast is not None:
        return None
    return _Call(source, again.func, *again.filled(source.inputs))


def _inner(view: Any, like: Made) -> Made | None:
    """Return the recipe behind a view of all of its result, if that is to be made yet."""
    if not isinstance(view, View) or not isinstance(view.source, Made) or view.source.is_made:
        return None
    if view.check is not None:
        return None
    layouts = view.source.layouts
    layout = view.size, view.stride
    is_whole = view.offset == 0 and len(layouts) == 1 and layout == layouts[0][:2]
    is_like = layouts[0][0] == like.layouts[0][0] and layouts[0][2] == like.layouts[0][2]
    return view.source if is_whole and is_like else None


def _dtype_of(view: View | Leaf) -> torch.dtype:
    if isinstance(view.source, Made):
        return view.source.layouts[view.place][2]
    return view.source.dtype


class _RecipeSequence:
    """A sequence that a kernel makes; passed: the recipes that it passes over, from the end on."""

    def __init__(self, *passed: Made):
        self._passed = passed
        # the recipes with readers left: their inputs are read once more later
        self._has_readers: dict[int, bool] = {}

    def begin(self) -> None:
        """Tell the recipes that are passed over."""
        is_left = False
        for made in self._passed:
            # behind one that is made later, others are made later, too
            is_left = is_left or made.skip()
            self._has_readers[id(made)] = is_left

    def read(self, view: Any, owner: Made) -> Any:
        """Read an input of a recipe of the sequence; None stays."""
        if view is None:
            return None
        if self._has_readers.get(id(owner), False):
            view.source.expect()
        return view.read()


def run_recipes(made: Made) -> Sequence[Tensor] | None:
    """Return the result of the sequence that ends in a recipe, None where no kernel makes it."""
    if len(made.layouts) != 1 or not made.inputs:
        return None
    device = made.again.device if isinstance(made.again, Replay) else None
    if device is None or path_of(device, made.layouts[0][2]) == "aten":
        return None
    call = _call_of(made)
    if call is None:
        return None
    for match in (_channel_norm, _modulated_norm, _gated_sum):
        launch = match(call)
        if launch is not None:
            return [launch()]
    return None


def _operands(call: _Call, kinds: Container[Any]) -> tuple[Any, Any] | None:
    """Return both operands of a sum or product of tensors."""
    is_one = call.func in kinds and len(call.args) == 2 and not call.kwargs
    if not is_one or not all(isinstance(arg, _VIEWS) for arg in call.args):
        return None
    return call.args[0], call.args[1]


def _parts_of_sum(call: _Call, kinds: Container[Any], like: Made) -> tuple[_Call, View] | None:
    """Return the part of a sum that a function of some kinds made, and the other part."""
    operands = _operands(call, _SUMS)
    for view, other in () if operands is None else (operands, operands[::-1]):
        inner = _inner(view, like)
        part = None if inner is None else _call_of(inner)
        if part is not None and part.func in kinds:
            return part, other
    return None


def _activation(call: _Call) -> tuple[str, Any] | None:
    """Return the name of an activation, and its input."""
    name = _ACTIVATIONS.get(call.func)
    rest = dict(call.kwargs)
    rest.pop("inplace", None)
    if name == "gelu":
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(rest.pop("approximate", "none"))
    has_more = rest or any(not isinstance(arg, bool) for arg in call.args[1:])
    return None if name is None or has_more else (name, call.args[0])


def _channel_norm(end: _Call) -> Callable[[], Tensor] | None:
    """Match act(norm(x) + residual), the activation and the residual perhaps absent."""
    call = end
    activation = "identity"
    passed = []
    named = _activation(end)
    if named is not None:
        activation, view = named
        inner = _inner(view, end.made)
        call = None if inner is None else _call_of(inner)
        if call is None:
            return None
        passed.append(call.made)
    residual = None
    owner = call.made
    parts = _parts_of_sum(call, _NORM_ARGUMENTS, end.made)
    if parts is not None:
        call, residual = parts
        passed.append(call.made)
    if call.func not in _NORM_ARGUMENTS:
        return None
    return _of_statistics(end, call, activation, (residual, owner), _RecipeSequence(*passed))


def _of_statistics(
    end: _Call, call: _Call, activation: str, added: tuple[Any, Made], sequence: _RecipeSequence
) -> Callable[[], Tensor] | None:
    """Return the launch of a sequence over a norm's statistics, None where no kernel takes it.

    end: the last function; call: the norm; added: the residual, None where absent, and the recipe
    that reads it.
    """
    options = call.named(_NORM_ARGUMENTS[call.func])
    norm = call.made
    num_given = sum(isinstance(value, _VIEWS) for value in options.values())
    if len(norm.inputs) != num_given + 2:
        # without statistics
        return None
    x = options["input"]
    residual, owner = added
    # a channel's numbers lie in one piece, in all samples alike
    is_dense = x.offset == 0 and (x.size, x.stride) == end.made.layouts[0][:2]
    is_like = residual is None or residual.stride == x.stride
    dtypes = {_dtype_of(view) for view in (x, residual) if view is not None}
    probe = torch.empty_strided(x.size, x.stride, device="meta")
    is_known = probe.is_contiguous() or pointwise.is_channels_last(probe)
    if not (is_dense and is_like and is_known and dtypes == {end.made.layouts[0][2]}):
        return None

    def launch() -> Tensor:
        sequence.begin()
        return pointwise.channel_norm(
            sequence.read(x, norm),
            sequence.read(norm.inputs[-2], norm).contiguous(),
            sequence.read(norm.inputs[-1], norm).contiguous(),
            as_vector(sequence.read(options.get("weight"), norm)),
            as_vector(sequence.read(options.get("bias"), norm)),
            options.get("num_groups", 0),
            activation,
            sequence.read(residual, owner),
        )

    return launch


def _modulated_norm(end: _Call) -> Callable[[], Tensor] | None:
    """Match norm(x) * factor + shift; the shift may be absent."""
    passed: list[Made] = []
    product = end
    shift = None
    parts = _parts_of_sum(end, _MULTIPLIES, end.made)
    if parts is not None:
        product, shift = parts
        passed.append(product.made)
    operands = _operands(product, _MULTIPLIES)
    for view, factor in () if operands is None else (operands, operands[::-1]):
        inner = _inner(view, end.made)
        norm = None if inner is None else _row_norm(inner)
        if norm is not None:
            return _of_rows(
                end, product.made, norm, factor, shift, _RecipeSequence(*passed, norm.made)
            )
    return None


class _RowNorm(NamedTuple):
    """A norm over the last dimension."""

    # its recipe
    made: Made
    # its kind and eps
    rule: NormRule
    # its input
    x: View | Leaf
    # its factor for each column
    weight: View | Leaf | None
    # its summand for each column
    bias: View | Leaf | None


def _row_norm(made: Made) -> _RowNorm | None:
    fused = reader.rule_of_recipe(made)
    if fused is not None:
        rule, are_given = fused
        remaining = iter(made.inputs[1:])
        vectors = [next(remaining) if is_given else None for is_given in (*are_given, False)[:2]]
        is_plain = rule.offset == 0 and rule.cast == "torch"
        return _RowNorm(made, rule, made.inputs[0], *vectors) if is_plain else None
    call = _call_of(made)
    names = None if call is None else _ROW_NORMS.get(call.func)
    if call is None or names is None:
        return None
    options = call.named(names)
    eps = options.get("eps", 1e-5 if call.func is F.layer_norm else None)
    if eps is None or len(options["normalized_shape"]) != 1:
        return None
    rule = NormRule("layer" if call.func is F.layer_norm else "rms", eps)
    return _RowNorm(made, rule, options["input"], options.get("weight"), options.get("bias"))


def _of_rows(
    end: _Call,
    product: Made,
    norm: _RowNorm,
    factor: View,
    shift: View | None,
    sequence: _RecipeSequence,
) -> Callable[[], Tensor] | None:
    """Return the launch of a modulated norm, None where no kernel takes it.

    product: the recipe that reads the factor; end reads the shift.
    """
    layout = end.made.layouts[0]
    x = norm.x
    n = x.size[-1]
    is_contiguous = (
        x.stride[-1] == 1 and torch.empty_strided(x.size, x.stride, device="meta").is_contiguous()
    )
    parts = [view for view in (factor, shift) if view is not None]
    dtypes = {_dtype_of(view) for view in (x, *parts)}
    rows = {_rows_of(view, x.size) for view in parts}
    if not (is_contiguous and pointwise.fits(n) and dtypes == {layout[2]} and len(rows) == 1):
        return None
    per_part = rows.pop()
    if per_part is None:
        return None

    def launch() -> Tensor:
        sequence.begin()
        y = pointwise.modulated_norm(
            sequence.read(x, norm.made).reshape(-1, n),
            as_vector(sequence.read(norm.weight, norm.made)),
            as_vector(sequence.read(norm.bias, norm.made)),
            sequence.read(factor, product).reshape(-1, n),
            None if shift is None else sequence.read(shift, end.made).reshape(-1, n),
            per_part,
            norm.rule,
        )
        return y.view(x.size)

    return launch


def _rows_of(view: View, size: torch.Size) -> int | None:
    """Return how many rows of x share one of a factor [B, 1, ..., N], [N]; None for others."""
    sizes = (1,) * (len(size) - len(view.size)) + tuple(view.size)
    if len(view.size) > len(size) or sizes[-1] != size[-1] or view.stride[-1] != 1:
        return None
    num_rows = torch.Size(size[:-1]).numel()
    if all(s == 1 for s in sizes[:-1]):
        return num_rows
    if sizes[0] == size[0] and all(s == 1 for s in sizes[1:-1]):
        return num_rows // size[0]
    return None


def _gated_sum(end: _Call) -> Callable[[], Tensor] | None:
    """Match residual + gate * branch."""
    parts = _parts_of_sum(end, _MULTIPLIES, end.made)
    if parts is None:
        return None
    product, residual = parts
    layout = end.made.layouts[0]
    operands = _operands(product, _MULTIPLIES)
    for branch, gate in () if operands is None else (operands, operands[::-1]):
        probe, gates = (
            torch.empty_strided(v.size, v.stride, device="meta") for v in (branch, gate)
        )
        are_alike = {(v.size, v.stride) for v in (branch, residual)} == {layout[:2]}
        dtypes = {_dtype_of(v) for v in (branch, gate, residual)}
        places = pointwise.operand_places_of(gates, probe) if are_alike else None
        if places is not None and dtypes == {layout[2]}:
            return partial(_launch_sum, end.made, product.made, (residual, branch, gate), places)
    return None


def _launch_sum(
    end: Made, product: Made, views: tuple[View, View, View], places: pointwise.GatePlaces
) -> Tensor:
    residual, branch, gate = views
    sequence = _RecipeSequence(product)
    sequence.begin()
    values = sequence.read(branch, product), sequence.read(gate, product)
    return pointwise.gated_sum(sequence.read(residual, end), *values, places)
