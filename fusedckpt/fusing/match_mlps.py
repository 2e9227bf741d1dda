"""Recognize MLPs, gated MLPs and linears with an activation.

Any module with one to four matrices may be one. Its forward is recorded in several shapes and
dtypes, in training and eval; the recordings show its linears, the ops between them and the state it
reads. No names of classes or attributes are used.

The pattern of a recording is its products with weights, and the activation between them. An
activation is a function of single elements that may be made of any ops. It is evaluated from the
recording, on numbers from 1e-30 to 1e30, and looked up in the table of activations: a function that
clamps is another function, at any limit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusedckpt.autograd import arguments
from fusedckpt.autograd.private import pytree, schema_of
from fusedckpt.fusing import adapters, reasons
from fusedckpt.fusing.fused_mlps import (
    FusedMLP,
    LinearPaths,
    MLPMatch,
    MLPPattern,
    Rate,
    chunk_words,
)
from fusedckpt.fusing.match_reader import Guard, Guards, child_at
from fusedckpt.fusing.reasons import acts_itself, is_transposed, looks_like
from fusedckpt.fusing.recomputed_modules import RERUN, Recomputed
from fusedckpt.fusing.recording import (
    Node,
    Recording,
    guards_of,
    is_nonlinear,
    nodes_behind,
    other_inputs,
    record,
)
from fusedckpt.fusing.replica import Path, rates_of, takes_one, undisturbed
from fusedckpt.fusing.swap import Swap, subclass
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.outside.find_reads import METHOD

# activations are told apart by it: another threshold of a softplus shows only here
_TOL = 1e-8
_SHAPE = (2, 3)
# further runs, in which the pattern has to be the same
_RUNS: dict[str, dict[str, Any]] = {
    "for one token": {"shape": (1, 1)},
    "for long inputs": {"shape": (3, 4096)},
    "for two dimensions": {"shape": (5,)},
    "for four dimensions": {"shape": (2, 1, 3)},
    "for strided inputs": {"shape": _SHAPE, "strided": True},
    "while training": {"shape": _SHAPE, "training": True},
    "for long inputs in training": {"shape": (3, 4096), "training": True},
    "under autocast": {"shape": _SHAPE, "autocast": True},
}
# and those of a forward that asks for the number of dimensions
_RANKS: dict[str, dict[str, Any]] = {
    "for one dimension": {"shape": ()},
    "for five dimensions": {"shape": (2, 1, 1, 3)},
}
# those in which other functions may run
_WATCHED = ("while training", "under autocast")
# not every forward takes these
_MAY_RAISE = ("for two dimensions", "for four dimensions", "for strided inputs", *_RANKS)
# a module with more layers is more than an MLP
_MOST_LAYERS = 16


def pattern_of(recording: Recording) -> MLPPattern | NotFused:
    """Return the pattern of a recorded forward, or why it has none."""
    y = recording.y
    if y is None:
        assert recording.reason is not None
        return recording.reason
    input_shape, result_shape = recording.shapes
    input_dtype, result_dtype = recording.dtypes
    if (input_shape[:-1], input_dtype) != (result_shape[:-1], result_dtype):
        sizes = f"{result_dtype} {[*result_shape]} for an input of {input_dtype} {[*input_shape]}"
        return NotFused("result", sizes)
    # the hidden layer, and the last linear if the pattern has one
    hidden, last = (y.inputs[0], [y]) if y.kind == "product" else (y, [])
    pattern = _hidden_pattern(hidden, last)
    if pattern is not None:
        return pattern
    ops = [node for node in recording.nodes if node.kind in ("elementwise", "other")]
    names = dict.fromkeys(node.name.rstrip("_") for node in ops)
    return NotFused("ops", ", ".join(names) or "linears alone")


def _hidden_pattern(hidden: Node, last: list[Node]) -> MLPPattern | None:
    """Return the pattern with this hidden layer, None if it is no activation of products of x."""
    leaves = _leaves(hidden)
    products = [leaf.inputs[0] if leaf.kind == "columns" else leaf for leaf in leaves]
    are_of_x = all(p.kind == "product" and p.inputs[0].kind == "x" for p in products)
    if hidden.kind != "elementwise" or not are_of_x:
        return None
    if len(leaves) == 1 and leaves == products:
        return _with_activation(hidden, leaves[0], last)
    if len(leaves) == 2 and last:
        return _gated(hidden, leaves, products, last)
    return None


def _with_activation(hidden: Node, z: Node, last: list[Node]) -> MLPPattern | None:
    """Return the pattern of a linear and its activation, and of a last linear if there is one."""
    name = _activation_of(hidden, z)
    if name in (None, "identity"):
        return None
    kind = "mlp" if last else "linear_act"
    return MLPPattern(kind, tuple(map(_paths_of, [z, *last])), str(name))


def _gated(
    hidden: Node, leaves: list[Node], products: list[Node], last: list[Node]
) -> MLPPattern | None:
    """Return the gated MLP whose gate is one of two leaves, products or halves of one product."""
    for gate, up in (leaves, leaves[::-1]):
        name = _activation_of(hidden, gate, up)
        if name in (None, "identity"):
            continue
        if leaves == products:
            return MLPPattern("gated_mlp", tuple(map(_paths_of, [gate, up, *last])), name)
        half = gate.span[1] - gate.span[0]
        spans = sorted([gate.span, up.span])
        if products[0] is products[1] and spans == [(0, half), (half, 2 * half)]:
            first = "gate" if gate.span == spans[0] else "up"
            linears = _paths_of(products[0]), _paths_of(last[0])
            return MLPPattern("gated_mlp", linears, name, first)
        return None
    return None


def _paths_of(product: Node) -> LinearPaths:
    """Return the places of the weight and bias of a product."""
    _, weight, *biases = product.inputs
    return LinearPaths(weight.path, biases[0].path if biases else None, product.is_transposed)


def _leaves(y: Node) -> list[Node]:
    """Return the nodes of which elementwise ops make a node, scalars excepted."""
    nodes = nodes_behind(y, through="elementwise")
    return [node for node in nodes if node.kind not in ("elementwise", "scalar")]


@cache
def _grid() -> tuple[Tensor, Tensor]:
    """Return numbers of all sizes, dense where activations bend, and as many in another order."""
    with torch.device("cpu"):
        near = torch.linspace(-30, 30, 1201, dtype=torch.float64)
        large = torch.logspace(-30, 30, 601, dtype=torch.float64)
        z = torch.cat([near, large, -large])
        return z, z[torch.arange(len(z)) * 997 % len(z)]


def _activation_of(hidden: Node, z: Node, up: Node | None = None) -> str | None:
    """Return the activation for which a node is act(z), or act(z) * up; None for others."""
    z_values, other_values = _grid()
    up_values = torch.ones_like(z_values) if up is None else other_values
    known = {z: z_values} if up is None else {z: z_values, up: up_values}
    with undisturbed("cpu"), torch.no_grad():
        try:
            values = _evaluated(hidden, known)
        except Exception:  # arbitrary code of others
            return None
        if not isinstance(values, Tensor) or values.shape != z_values.shape:
            return None
        for name, act in ACTIVATIONS.items():
            expected = act.eager(z_values.clone()) * up_values
            tolerance = _TOL * up_values.abs().clamp_min(1) + _TOL * expected.abs()
            if ((values.double() - expected).abs() <= tolerance).all():
                return name
    return None


def _evaluated(y: Node, known: dict[Node, Tensor]) -> Any:
    """Return a node's value, made by elementwise ops from the `known` values of others."""
    values: dict[Any, Any] = dict(known)
    like = next(iter(known.values()))

    def value_of(argument: Any) -> Any:
        return values[argument] if isinstance(argument, Node) else argument

    for node in nodes_behind(y, through="elementwise"):
        if node in values:
            continue
        args, kwargs = pytree.tree_map(value_of, (node.args, node.kwargs or {}))
        if node.kind == "scalar":
            kwargs = {**kwargs, "dtype": like.dtype, "device": like.device}
        elif schema_of(node.op).is_mutable:
            args = [args[0].clone(), *args[1:]]
        values[node] = node.op(*args, **kwargs)
    return values[y]


def mlp_swap(module: nn.Module, save: str, chunks: int | None = None) -> Swap | NotFused | None:
    """Return how an MLP is swapped, the reason why it cannot be, or None for another module."""
    if type(module).forward in (nn.Linear.forward, nn.Module.forward):
        return None
    if not _has_mlp_parameters(module):
        return None
    if not takes_one(module):
        return other_inputs(module) if looks_like(module) is not None else None
    match = _match(module)
    if not isinstance(match, MLPMatch):
        return match
    if any(_is_whole_mlp(child, module) for child in module.children()):
        return None
    return _swap(module, match, save, chunks)


def recomputed_swap(module: nn.Module) -> Swap | None:
    """Return the swap of a module of one input that can be run again, as it reads simple state."""
    if not (_has_mlp_parameters(module) and takes_one(module)) or looks_like(module) != "mlp":
        return None
    if reasons.of_parts(module):
        return None
    first = _first_recording(module)
    if first.y is None:
        return None
    input_shape, result_shape = first.shapes
    # a forward that draws in training draws the same again
    others = [record(module, input_shape, training=True)]
    others.append(record(module, input_shape, autocast=True))
    if any(recording.y is None for recording in others) or input_shape[:-1] != result_shape[:-1]:
        return None
    guards = guards_of([recording.log for recording in (first, *others)])
    if isinstance(guards, NotFused):
        return None
    return Swap(
        "mlp",
        f"{type(module).__name__} -> recomputed",
        subclass(Recomputed, type(module)),
        notes={"match": MLPMatch(RERUN, guards)},
        features=input_shape[-1:],
        can_shrink=True,
    )


def feed_forward_of(layer: nn.Module) -> nn.Module | None:
    """Return the MLP that a method of a layer is, as a module of the layer's children."""
    if not isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return None
    method = type(layer)._ff_block
    if method is nn.TransformerEncoderLayer._ff_block:
        dropout_of_result = "dropout2"
    elif method is nn.TransformerDecoderLayer._ff_block:
        dropout_of_result = "dropout3"
    else:
        return None
    names = ("linear1", "dropout", "linear2", "activation", dropout_of_result)
    module = object.__new__(_class_with_forward(type(layer), "_ff_block", method))
    children = {name: child for name, child in layer._modules.items() if name in names}
    module.__dict__.update(vars(layer), _modules=children)
    return module


@cache
def _class_with_forward(kind: type[nn.Module], method: str, forward: Any) -> type[nn.Module]:
    names = {"forward": forward, "__module__": kind.__module__, METHOD: (kind, method)}
    return type(kind.__name__, (kind,), names)


def lora_swap(module: nn.Module, save: str, chunks: int | None) -> Swap | NotFused:
    """Return how peft's LoRA around a linear is swapped, or why it is not."""
    base = module.get_submodule("base_layer")
    is_conv1d = is_transposed(base)
    if type(base) is not nn.Linear and not is_conv1d:
        return NotFused("lora", type(base).__name__)
    bias = None if base._parameters["bias"] is None else ("base_layer", "bias")
    linear = LinearPaths(("base_layer", "weight"), bias, is_conv1d)
    pattern = MLPPattern("linear_act", (linear,), "identity")
    guard = Guard(("base_layer",), type(base), 0, ())
    return _swap(module, MLPMatch(pattern, Guards((guard,)), arguments.DTYPES), save, chunks)


def _swap(module: nn.Module, match: MLPMatch, save: str, chunks: int | None) -> Swap:
    pattern = match.pattern
    details = [pattern.activation]
    if pattern.packed:
        details.append(f"packed, {pattern.packed} first")
    if any(linear.is_transposed for linear in pattern.linears):
        details.append("weights as [in, out]")
    if pattern.kind != "linear_act":
        details += chunk_words(chunks)
    name = "LoRA" if adapters.is_lora(module) else type(module).__name__
    first = pattern.linears[0]
    in_features = module.get_parameter(".".join(first.weight)).shape[not first.is_transposed]
    return Swap(
        "linear" if pattern.kind == "linear_act" else "mlp",
        f"{name} -> {pattern.kind} ({', '.join(details)})",
        subclass(FusedMLP, type(module)),
        {"save": save, "chunks": chunks},
        {"match": match},
        features=(in_features,),
        can_shrink=True,
    )


def _has_mlp_parameters(module: nn.Module) -> bool:
    """Whether a module has an MLP's number of parameters, and few layers."""
    layers = [*module.modules()]
    if len(layers) > _MOST_LAYERS:
        return False
    parameters = [p for layer in layers for p in layer._parameters.values() if p is not None]
    if any(is_lazy(p) or 0 in p.shape for p in parameters):
        return False
    num_matrices = sum(p.dim() == 2 for p in parameters)
    num_vectors = sum(p.dim() == 1 for p in parameters)
    if num_matrices + num_vectors != len(parameters):
        return False
    return 1 <= num_matrices <= 4 and num_vectors <= 4


def _is_whole_mlp(child: nn.Module, parent: nn.Module) -> bool:
    """Whether a child has all parameters and is itself an MLP, to be swapped instead."""
    has_all = {*parent.parameters()} == {*child.parameters()}
    if not has_all or not _has_mlp_parameters(child) or not takes_one(child):
        return False
    return isinstance(_match(child), MLPMatch)


def _match(module: nn.Module) -> MLPMatch | NotFused | None:
    """Record a module; return its pattern and the state it depends on, or why it has none.

    None for one that does not look like an MLP either.
    """
    first = _first_recording(module)
    pattern = pattern_of(first)
    if isinstance(pattern, NotFused):
        is_lookalike = looks_like(module) is not None
        is_lookalike = is_lookalike or (is_nonlinear(first) and acts_itself(module))
        return pattern if is_lookalike else None
    width = first.shapes[0][-1:]
    recordings = [first]
    for when, options in {**_RUNS, **(_RANKS if first.log.asks_rank else {})}.items():
        shape = (*options["shape"], *width)
        recording = record(module, **{**options, "shape": shape}, watched=when in _WATCHED)
        if recording.log.stop is not None:
            return recording.log.stop
        if pattern_of(recording) != pattern and not (recording.y is None and when in _MAY_RAISE):
            return NotFused("varies", (type(module).__name__, when))
        recordings.append(recording)
    unguarded = next(filter(None, (recording.log.unguarded for recording in recordings)), None)
    if unguarded is not None:
        return unguarded
    dtype_of_module = next(module.parameters()).dtype
    dtypes = [dtype_of_module]
    for dtype in arguments.DTYPES:
        recording = record(module, (*_SHAPE, *width), dtype, watched=False)
        if dtype != dtype_of_module and pattern_of(recording) == pattern:
            dtypes.append(dtype)
            recordings.append(recording)
    return _match_with_dropouts(module, pattern, recordings, tuple(dtypes))


def _first_recording(module: nn.Module) -> Recording:
    """Return a recording for the first width that the forward takes, the inner ones last."""
    shapes = [tuple(p.shape) for p in module.parameters() if p.dim() == 2]
    widths = dict.fromkeys([*(s[1] for s in shapes), *(s[0] for s in shapes)])
    recordings = [record(module, (*_SHAPE, width)) for width in widths]
    with_result = (recording for recording in recordings if recording.y is not None)
    with_reason = (recording for recording in recordings if recording.log.stop is not None)
    return next(with_result, None) or next(with_reason, recordings[0])


def _match_with_dropouts(
    module: nn.Module,
    pattern: MLPPattern,
    recordings: list[Recording],
    dtypes: tuple[torch.dtype, ...],
) -> MLPMatch | NotFused:
    """Return the match for all that the recordings read, and with the dropouts."""
    logs = [recording.log for recording in recordings]
    rates: list[Rate] = []
    for path in logs[0].kinds:
        child = child_at(module, path)
        for name in rates_of(module if child is None else child):
            if any((name,) in log.reads.get(path, {}) for log in logs):
                rates.append((path, name))
    rate_by_tensor: dict[str, Rate] = {}
    shape = recordings[0].shapes[0]
    for rate in rates:
        tensors = _dropped_by(module, shape, rate, pattern)
        if not rate_by_tensor.keys() & tensors:
            rate_by_tensor |= dict.fromkeys(tensors, rate)
    result_rate = rate_by_tensor.get("result")
    guards = guards_of(logs, rates)
    if isinstance(guards, NotFused):
        return guards
    return MLPMatch(
        pattern,
        guards,
        dtypes,
        zero_rates=tuple(rate for rate in rates if rate not in rate_by_tensor.values()),
        hidden_rate=rate_by_tensor.get("hidden"),
        result_rate=result_rate,
        writes_result=result_rate is not None and _writes_result(module, shape, result_rate),
    )


def _dropped_by(
    module: nn.Module, shape: tuple[int, ...], rate: Rate, pattern: MLPPattern
) -> list[str]:
    """Return the tensors of a pattern that the dropout with this rate drops.

    They are "hidden", the last linear's input, and "result"; a function drops the result alone.
    While the dropout drops everything, it shows as a product with zeros. Nothing is returned where
    the pattern without that product is another one.
    """
    path, name = rate
    is_module = path and isinstance(child_at(module, path), nn.Dropout)
    if not is_module and not _is_probability(module, shape, (*path, name)):
        return []
    recording = record(module, shape, training=True, rate=((*path, name), 1.0), watched=False)
    y = recording.y
    tensors = []
    if y is not None and _is_dropped(y):
        y = y.inputs[0]
        tensors.append("result")
    if y is not None and y.kind == "product" and _is_dropped(y.inputs[0]):
        dropped, *parameters = y.inputs
        y = replace(y, inputs=(dropped.inputs[0], *parameters))
        tensors.append("hidden")
    if not is_module and tensors != ["result"]:
        return []
    return tensors if pattern_of(replace(recording, y=y)) == pattern else []


def _writes_result(module: nn.Module, shape: tuple[int, ...], rate: Rate) -> bool:
    """Whether the dropout of a module's result writes over it."""
    path, name = rate
    y = record(module, shape, training=True, rate=((*path, name), 1.0), watched=False).y
    return y is not None and y.name.endswith("_")


def _is_probability(module: nn.Module, shape: tuple[int, ...], rate: Path) -> bool:
    """Whether a number of a module is, as it is, the probability of one call of F.dropout."""
    for value in (0.25, 0.625):
        log = record(module, shape, training=True, rate=(rate, value), watched=False).log
        if log.dropout_rates.count(value) != 1 or {*log.dropout_rates} - {0.0, value}:
            return False
    return True


def _is_dropped(node: Node) -> bool:
    """Whether a node is a product with zeros, as dropout at a rate of 1 makes it."""
    is_product = node.kind == "elementwise" and node.name.rstrip("_") == "mul"
    if not is_product or len(node.inputs) != 2:
        return False
    factor = node.inputs[1]
    return factor.kind == "scalar" and factor.name == "zeros"
