"""Norms of any class: how they are recognized, and their forward.

torch's own norms, and subclasses that inherit their forward, are known. Any other module with at
most two vectors of weights is recorded: it may be a LayerNorm if its forward is one layer_norm of
its input or subtracts a mean, an RMSNorm if it has at most one vector. A norm with a gate,
norm(x) * act(gate) or norm(x * act(gate)), takes two inputs. The rules of `functional` that a
module may compute by are proposed here, and `verification.best_rule` decides: it is a norm in the
dtypes where a rule gives its results on random numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fusedckpt.autograd import dispatch, private, tracker
from fusedckpt.autograd.dispatch import own_forward
from fusedckpt.blocks import reader
from fusedckpt.blocks.eager import forcing
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.fusing.match_reader import Guards, Reader
from fusedckpt.fusing.reasons import looks_like
from fusedckpt.fusing.recording import BUFFER_OP, FOREIGN_OP, Recording, guards_of, record
from fusedckpt.fusing.replica import Draw, takes_one
from fusedckpt.fusing.swap import Swap, Swapped, run_forward, subclass
from fusedckpt.fusing.verification import CHECKED_DTYPES, Dtypes, RuleTrial, best_rule
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.gated_norm import gated_rms_norm
from fusedckpt.layers.input_copies import InputCopies
from fusedckpt.layers.norm import LayerNorm, NormOptions, RMSNorm
from fusedckpt.layers.notes import NO_NOTES, NOTES
from fusedckpt.state.code_names import (
    defining_class,
    has_functions_that_write,
    writes_in_place,
)
from fusedckpt.state.holders import is_of_library

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
# offsets and casts of RMSNorms. Llama's and Gemma's first: torch's differs from the third only
# under autocast on a GPU
_RULES = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"), (1.0, "llama"))
# how many numbers of an input are drawn
_ELEMENTS = 4096
# ops by which a norm shows: of a LayerNorm, of all, means and roots
_CENTRES = frozenset(("native_layer_norm", "std", "std_mean", "sub", "var", "var_mean"))
_STATISTICS = frozenset(("_fused_rms_norm", "linalg_vector_norm", "norm")) | _CENTRES - {"sub"}
_MEANS = frozenset(("mean", "sum"))
_ROOTS = frozenset(("rsqrt", "sqrt"))
# inputs of other ranks than the recorded one, without the last size; None: the width
_OTHER_RANKS = {
    "for one dimension": (),
    "for two dimensions": (5,),
    "for four dimensions": (2, None, 3),
    "for five dimensions": (2, None, 1, 3),
}
# the least norm of a row by which F.normalize divides
_LEAST_NORM = 1e-12
# these first: all known models have one of them; an identity gates nothing
_GATES = dict.fromkeys(("silu", "sigmoid", *ACTIVATIONS))
del _GATES["identity"]


class Gate(NamedTuple):
    """The gate of a norm: see `functional.gated_rms_norm`."""

    # the function of the gate
    activation: str
    # how many groups of columns are normalized apart
    groups: int
    # whether x is gated before it is normalized
    gates_first: bool


class NormMatch(NamedTuple):
    """The norm that a module of some class computes: see `functional.rms_norm` and `layer_norm`."""

    # the attribute of the weight, None for a norm without one
    weight: str | None
    # the attribute of epsilon, or its value
    eps: str | float
    # added to the weight: 1 for Gemma's
    offset: float
    # where the norm rounds: "torch", "llama" or "gemma"
    cast: str
    # the dtypes that were verified: those of x, of the gate if there is one, and of the weight,
    # which is x's without a weight
    dtypes: tuple[Dtypes, ...] = ()
    # "rms" or "layer"
    kind: str = "rms"
    # the attribute of the bias
    bias: str | None = None
    # whether the result has x's dtype even under autocast
    casts_back: bool = False
    # state that must not change
    guards: Guards = Guards()
    # whether it may run under autocast
    autocasts: bool = True
    # the gate by which it multiplies, None without one
    gate: Gate | None = None
    # whether the result has the strides of an input that is not contiguous
    keeps_strides: bool = False

    def reader(self) -> Reader:
        """Return the reader of the match's state in calls."""
        return Reader(self.guards)

    @property
    def words(self) -> str:
        """Describe the rule, for reports."""
        if self.gate is not None:
            activation, groups, gates_first = self.gate
            gate = f"{activation}(gate)"
            order = f"norm(x * {gate})" if gates_first else f"norm(x) * {gate}"
            return f"gated_rms_norm ({order}{f', {groups} groups' if groups > 1 else ''})"
        if self.kind == "rms":
            offset = f", offset {self.offset:g}" if self.offset else ""
            return f"rms_norm ({self.cast} cast{offset})"
        return "layer_norm" + (f" (offset {self.offset:g})" if self.offset else "")

    @property
    def is_exact(self) -> bool:
        """Whether its bits tell it from others; with a gate, classes round in several places."""
        return self.gate is None

    def result(self, module: nn.Module, inputs: Sequence[Tensor], weights: Any) -> Tensor | None:
        """Return the rule's result, None where it takes no such dtypes; weights: by name."""
        weight, bias = (None if n is None else weights[n] for n in (self.weight, self.bias))
        if self.gate is not None:
            x, gate = inputs
            return _gated(module, self, x, gate, weight)
        (x,) = inputs
        try:
            with forcing(None):
                return normalized(module, self, x, weight, bias)
        except RuntimeError:
            return None


class FusedNorm(Swapped):
    """Forward of a norm of any class; saves only x for the verified dtypes."""

    save_levels = ()

    def _fused(self, x: Tensor) -> Tensor | NotFused:
        match = self._fusedckpt.match
        if private.num_function_modes() and not match.casts_back and tracker.sees_alone():
            return tracker.outside_mode(self._fused, x)
        weight = None if match.weight is None else self._parameters.get(match.weight)
        bias = None if match.bias is None else self._parameters.get(match.bias)
        if dispatch.are_plain(x, weight, bias):
            return self._normalized(x, weight, bias)
        # DTensors: each rank has whole rows
        y = sharded.on_rows(self._normalized, 1, x, weight, bias)
        by_name = {match.weight or "": weight, match.bias or "": bias}
        return fallbacks.fallback_of(x, **by_name) if y is None else y

    def _normalized(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor | NotFused:
        match = self._fusedckpt.match
        if (changed := self._fusedckpt.reader.change(self)) is not None:
            return changed
        for name, tensor in ((match.weight, weight), (match.bias, bias)):
            if name is not None and tensor is None:
                return NotFused("changed", name)
        dtype = x.dtype if weight is None else weight.dtype
        # F.layer_norm takes two dtypes on a CPU, and where autocast casts them
        is_taken = match.kind == "rms" or x.device.type in ("cpu", "meta") or dtype == x.dtype
        is_cast = dispatch.autocast_dtype(x.device) is not None
        is_taken = match.autocasts if is_cast else is_taken
        if (x.dtype, dtype) not in match.dtypes or not is_taken:
            return NotFused("dtype", x.dtype)
        return normalized(self, match, x, weight, bias)

    def _function_now(self) -> str:
        match = self._fusedckpt.match
        ours = "layer_norm" if match.kind == "layer" else f"rms_norm, cast={match.cast}"
        return f"fused as {ours}"


class FusedGatedNorm(Swapped):
    """Forward of a norm with a gate of any class; saves only x and the gate."""

    _fusedckpt_count = 2
    save_levels = ()

    def _fused(self, x: Tensor, gate: Tensor) -> Tensor | NotFused:
        match = self._fusedckpt.match
        weight = None if match.weight is None else self._parameters.get(match.weight)
        if not dispatch.are_plain(x, gate, weight):
            return fallbacks.fallback_of(x, gate=gate, **{match.weight or "": weight})
        if (change := self._fusedckpt.reader.change(self)) is not None:
            return change
        if match.weight is not None and weight is None:
            return NotFused("changed", match.weight)
        if x.shape != gate.shape:
            return NotFused("arguments")
        dtypes = x.dtype, gate.dtype, x.dtype if weight is None else weight.dtype
        is_cast = dispatch.autocast_dtype(x.device) is not None
        if dtypes not in match.dtypes or (is_cast and not match.autocasts):
            return NotFused("dtype", x.dtype)
        return _gated(self, match, x, gate, weight)

    def _function_now(self) -> str:
        return f"fused as {self._fusedckpt.match.words}"


def normalized(
    module: nn.Module, match: NormMatch, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the norm that a match describes; note its inputs for readers of the result."""
    if match.keeps_strides and not x.is_contiguous():
        rows = match._replace(keeps_strides=False)
        return _with_strides(lambda x: normalized(module, rows, x, weight, bias), x)
    shape = x.shape[-1:] if weight is None else weight.shape
    eps = getattr(module, match.eps) if isinstance(match.eps, str) else match.eps
    notes = module.__dict__.get(NOTES, NO_NOTES)
    store = notes.store
    if notes.input_copies is not None and notes.input_copies.is_on:
        x = notes.input_copies.input_of(x)
    if match.kind == "layer":
        weight = weight + match.offset if weight is not None and match.offset else weight
        options = NormOptions("layer_norm", "layer", shape, eps, store=store)
    else:
        rule = match.offset, match.cast
        options = NormOptions("rms_norm", "rms", shape, eps, *rule, store=store)
    y = run_layer(options, x, (weight, None if match.kind == "rms" else bias))
    if match.casts_back and y.dtype != x.dtype:
        return y.to(x.dtype)
    return reader.note_norm(module, y, weight, bias)


def copying_inputs(name: str, swap: Swap, modules: Mapping[str, nn.Module]) -> Swap:
    """Return the swap of an RMSNorm that copies inputs which the code around it, or hooks, write.

    modules: of the model, by name.
    """
    match = swap.notes.get("match")
    is_rms = isinstance(match, NormMatch) and match.kind == "rms" and match.gate is None
    if not (is_rms or issubclass(swap.new_class, RMSNorm)):
        return swap
    norm = around = modules[name]
    while name and (around is norm or is_of_library(type(around))):
        name = name.rpartition(".")[0]
        around = modules[name]
    if has_functions_that_write(norm) or (
        around is not norm
        and not is_of_library(type(around))
        and (writes_in_place(type(around)) or has_functions_that_write(around))
    ):
        return replace(swap, notes={**swap.notes, "input_copies": InputCopies()})
    return swap


def _with_strides(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return norm(x) with the strides that functions of single elements give it.

    Code may call `view` on it, or write to it through `reshape`, which is a view or a copy.
    """
    strides = torch.empty_like(x, device="meta").stride()
    dims = range(x.dim())
    order = sorted(dims, key=lambda dim: -strides[dim])
    inverse = [order.index(dim) for dim in dims]
    if order == [*dims]:
        return norm(x)
    if order[-1] == dims[-1]:
        # the rows of x are rows in memory
        return norm(x.permute(*order)).permute(*inverse)
    return reader.in_order(norm(x), order).permute(*inverse)


def _gated(
    module: nn.Module, match: NormMatch, x: Tensor, gate: Tensor, weight: Tensor | None
) -> Tensor:
    """Return the norm with a gate that a match describes."""
    activation, groups, gates_first = match.gate  # type: ignore[misc]  # it has one
    return gated_rms_norm(
        x,
        gate,
        x.shape[-1],
        weight,
        getattr(module, match.eps),  # type: ignore[arg-type]  # by name
        activation=activation,
        groups=groups,
        gates_first=gates_first,
        offset=match.offset,
        cast=match.cast,
    )


# how they are recognized


def norm_swap(module: nn.Module) -> Swap | NotFused | None:
    """Return how a norm is swapped, the reason why it cannot be, or None for other modules."""
    return _gated_norm_swap(module) or _plain_norm_swap(module)


def _plain_norm_swap(module: nn.Module) -> Swap | NotFused | None:
    """Return the swap of a norm of one input, why it has none, or None for other modules."""
    if isinstance(module, (RMSNorm, LayerNorm)):
        return None
    kind = type(module)
    for original, ours, attributes in (
        (nn.RMSNorm, RMSNorm, {"offset": 0.0, "cast": "torch"}),
        (nn.LayerNorm, LayerNorm, {}),
    ):
        if isinstance(module, original) and kind.forward is own_forward(original):
            if parametrize.is_parametrized(module):
                return NotFused("parametrized", "it")
            change = f"{'nn.' if kind is original else ''}{kind.__name__} -> {ours.__name__}"
            new_class = ours if kind is original else subclass(ours, kind)
            features: Any = tuple(module.normalized_shape)  # type: ignore[arg-type]  # of torch's norms
            return Swap("norm", change, new_class, attributes, features=features)
    return _recorded_norm_swap(module)


def _recorded_norm_swap(module: nn.Module) -> Swap | NotFused | None:
    """Return the swap of a module whose forward is recorded, why it has none, or None."""
    weights = [*module.parameters(recurse=False)]
    names = _names_of_weights(module)
    if module._modules or len(names) > 2 or not _has_own_forward(type(module)):
        return None
    if any(w.dim() > 1 or w.numel() == 0 for w in weights) or not takes_one(module):
        return None
    eps = _epsilon_of(module)
    width = _width(module, weights)
    recordings = [record(module, (2, 3, width), training=training) for training in (False, True)]
    obstacle = next(filter(None, (r.log.obstacle for r in recordings)), None)
    first = recordings[0]
    # one that raised takes vectors alone, or no such tensor
    if obstacle is None and first.shapes and first.log.asks_rank:
        obstacle = _rank_obstacle(module, width, first)
    if obstacle is not None:
        return obstacle if eps is not None or looks_like(module) == "norm" else None
    is_norm = _normalizes(recordings[0]) or bool(weights and eps is not None)
    if any(map(_reads_unknown_tensors, recordings)):
        return NotFused("foreign") if is_norm else None
    match = None
    if (is_norm or weights or eps is not None) and all(w.numel() > 1 for w in weights):
        candidates = _candidates(module, recordings, names, eps, width=width)
        match = _proven_rule(module, names, width, candidates)
    if match is not None and not weights and not _normalized_shape(module):
        # a rule that holds only for the width in the module's code is not accepted
        match = _proven_rule(module, [], width // 2, [match])
    dtype = weights[0].dtype if weights else torch.float32
    if match is None or (dtype, dtype) not in match.dtypes:
        return NotFused("rule", dtype) if is_norm or match is not None else None
    autocasting = [record(module, (2, 3, width), training=True, autocast=True)]
    return _swap(module, FusedNorm, match, recordings, autocasting, features=(width,))


def _gated_norm_swap(module: nn.Module) -> Swap | NotFused | None:
    """Return how a norm with a gate is swapped, why it is not, or None for other modules."""
    weights = [*module.parameters(recurse=False)]
    names = _names_of_weights(module)
    eps = _epsilon_of(module)
    if eps is None or len(names) > 1 or len([*module.parameters()]) > len(weights):
        return None
    if any(w.dim() != 1 or w.numel() < 2 for w in weights) or not _has_own_forward(type(module)):
        return None
    if not _takes_two(module):
        return None
    width = weights[0].shape[0] if weights else getattr(module, "hidden_size", 64)

    def recorded(autocast: bool) -> list[Recording]:
        options: dict[str, Any] = {"autocast": autocast, "num_inputs": 2}
        return [record(module, (2, 3, width), training=mode, **options) for mode in (False, True)]

    recordings = recorded(autocast=False)
    if any(r.log.obstacle is not None or _reads_unknown_tensors(r) for r in recordings):
        return None
    match = _proven_gated_rule(module, names, eps, width)
    if match is None:
        return None
    features = (2 * width,)
    autocasting = recorded(autocast=True)
    return _swap(module, FusedGatedNorm, match, recordings, autocasting, features)


def _swap(
    module: nn.Module,
    fused_class: type[nn.Module],
    match: NormMatch,
    recordings: list[Recording],
    autocasting: list[Recording],
    features: tuple[int, ...],
) -> Swap | NotFused:
    """Return the swap for a match that is proven; autocasting: the recordings under autocast."""
    # an epsilon is read in every call
    guards = guards_of([r.log for r in recordings], [((), str(match.eps))])
    if isinstance(guards, NotFused):
        return guards
    autocasts = all(recording.log.stop is None for recording in autocasting)
    match = match._replace(guards=guards, autocasts=autocasts)
    return Swap(
        "norm",
        f"{type(module).__name__} -> {match.words}",
        subclass(fused_class, type(module)),
        notes={"match": match},
        features=features,
        run=run_forward if match.gate is None else _run_on_halves,
    )


def _run_on_halves(module: Any, x: Tensor) -> Any:
    """Run a module on x and a gate, the halves of a tensor."""
    return type(module).forward(module, *x.chunk(2, -1))


def _takes_two(module: nn.Module) -> bool:
    try:
        inspect.signature(type(module).forward).bind(module, None, None)
    except (TypeError, ValueError):
        return False
    return True


def _names_of_weights(module: nn.Module) -> list[str]:
    return [*dict(module.named_parameters(recurse=False, remove_duplicate=False))]


def _epsilon_of(module: nn.Module) -> str | None:
    """Return the attribute that is a norm's epsilon, None without one."""
    named = (name for name in EPSILONS if type(getattr(module, name, None)) in (int, float))
    return next(named, None)


def _width(module: nn.Module, weights: list[nn.Parameter]) -> int:
    """Return the width of a module's weights or buffers; 64, one of many, where it has none."""
    tensors = [*weights, *module.buffers(recurse=False)]
    widths = [tensor.shape[0] for tensor in tensors if tensor.dim() == 1 and tensor.numel() > 1]
    return next(iter([*widths[: len(weights)], *_normalized_shape(module), *widths]), 64)


def _normalized_shape(module: nn.Module) -> tuple[int, ...]:
    """Return the one size that a module normalizes, nothing where it knows none or several."""
    shape: Any = getattr(module, "normalized_shape", None)
    return (int(shape[0]),) if isinstance(shape, (tuple, list)) and len(shape) == 1 else ()


def _has_own_forward(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class is not torch's."""
    return not defining_class(kind, "forward").__module__.startswith("torch.")


def _reads_unknown_tensors(recording: Recording) -> bool:
    """Whether a result was made of buffers, or of tensors that are no parameters."""
    return any(node.op in (BUFFER_OP, FOREIGN_OP) for node in recording.nodes)


def _ops(recording: Recording) -> set[str]:
    """Return the names of the ops that make a forward's result, a root by pow as "rsqrt"."""
    return {
        "rsqrt" if node.name == "pow" and node.args[1] in (0.5, -0.5) else node.name
        for node in recording.nodes
        if node.kind in ("elementwise", "other")
    }


def _rank_obstacle(module: nn.Module, width: int, first: Recording) -> NotFused | None:
    """Return why a norm may compute another function for an input of another rank."""
    for when, sizes in _OTHER_RANKS.items():
        # equal sizes: the norm of another dimension may take them, too
        other = record(module, (*(width if size is None else size for size in sizes), width))
        if other.y is None and other.log.stop is None:
            # it takes no such input
            continue
        if (obstacle := other.log.obstacle) is not None:
            return obstacle
        if _function(other) != _function(first):
            return NotFused("varies", (type(module).__name__, when))
    return None


def _function(recording: Recording) -> list[Any]:
    """Return the ops that make a forward's result, with the numbers among their arguments."""
    rank = len(recording.shapes[0])
    ops = []
    for node in recording.nodes:
        if node.kind not in ("elementwise", "other") or isinstance(node.op, str):
            continue
        kinds = (int, float) if private.is_pointwise(node.op) else (float,)
        leaves = private.pytree.tree_leaves((node.args, node.kwargs))
        numbers = [leaf for leaf in leaves if type(leaf) in kinds]
        if node.name in _MEANS | _STATISTICS - {"native_layer_norm", "_fused_rms_norm"}:
            # dimensions, from the last one
            lists = (arg for arg in node.args if isinstance(arg, list))
            numbers += [dim % rank - rank for dims in lists for dim in dims]
        ops.append((node.name, numbers))
    return ops


def _normalizes(recording: Recording) -> bool:
    """Whether a forward divides by a root of a mean, and leaves the shape."""
    ops = _ops(recording)
    is_scaled = bool(ops & _STATISTICS or (ops & _MEANS and ops & _ROOTS))
    return is_scaled and recording.shapes[0] == recording.shapes[1]


def _candidates(
    module: nn.Module,
    recordings: list[Recording],
    names: list[str],
    eps: str | None,
    width: int,
) -> list[NormMatch]:
    """Return the rules that a module of one input may compute by."""
    layers = {_layer_norm_match(recording, width) for recording in recordings}
    if None not in layers:
        return [*layers] if len(layers) == 1 else []  # type: ignore[list-item]  # none of them None
    matches = []
    if eps is not None and _ops(recordings[0]) & _CENTRES:
        places = permutations(names) if len(names) == 2 else [(*names, None, None)]
        matches = [
            NormMatch(weight, eps, offset, "torch", kind="layer", bias=bias)
            for weight, bias, *_ in places
            for offset in (0.0, 1.0)
            if weight is not None or not offset
        ]
    if len(names) > 1:
        return matches
    name = names[0] if names else None
    code = getattr(type(module).forward, "__code__", None)
    calls_torch = code is not None and "rms_norm" in code.co_names
    rules = ((0.0, "torch"), *_RULES) if calls_torch else _RULES
    # without an epsilon the root is clamped, as F.normalize does
    eps_or_value = eps or _LEAST_NORM**2 / width
    matches += [NormMatch(name, eps_or_value, offset, cast) for offset, cast in rules]
    return [match for match in matches if name is not None or not match.offset]


def _layer_norm_match(recording: Recording, width: int) -> NormMatch | None:
    """Return the match of a forward that is one layer_norm of its input, None for any other."""
    y = recording.y
    if y is None or y.kind != "other" or y.name != "native_layer_norm":
        return None
    x, shape, weight, bias, eps = y.args
    parameters = (weight, bias)
    are_own = all(parameter is None or parameter.kind == "weight" for parameter in parameters)
    if x.kind != "x" or list(shape) != [width] or not are_own:
        return None
    names = [None if parameter is None else parameter.path[0] for parameter in parameters]
    return NormMatch(names[0], eps, 0.0, "torch", kind="layer", bias=names[1])


def _proven_rule(
    module: nn.Module, names: list[str], width: int, candidates: list[NormMatch]
) -> NormMatch | None:
    """Return the rule that gives a module's bits in most dtypes, with these dtypes."""
    draw = Draw(module, (width,), rows=_rows(width))
    x = _with_extremes(draw.x)
    x[1] *= 100.0
    pairs = product(CHECKED_DTYPES, CHECKED_DTYPES)
    dtypes = [*pairs] if names else [(d, d) for d in CHECKED_DTYPES]
    trial = RuleTrial(module, [x], draw.values, dtypes)
    best = best_rule(trial, candidates)
    if best is not None:
        best = best._replace(keeps_strides=_keeps_strides(module, x, draw))
    if best is not None and best.kind == "layer":
        return best._replace(casts_back=_casts_back(trial))
    return best


def _keeps_strides(module: nn.Module, x: Tensor, draw: Draw) -> bool:
    """Whether a module's result has the strides of its input, in whatever order its axes lie."""
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    y = RuleTrial(module, [turned], draw.values, ()).result((torch.float32, torch.float32))
    return y is not None and y.stride() == turned.stride()


def _proven_gated_rule(
    module: nn.Module, names: list[str], eps: str, width: int
) -> NormMatch | None:
    """Return the rule that a module with a gate computes by, with the dtypes of the proof."""
    draw = Draw(module, (2 * width,), rows=_rows(width))
    x, gate = draw.x.chunk(2, -1)
    triples = product(CHECKED_DTYPES, CHECKED_DTYPES, CHECKED_DTYPES)
    # without a weight its dtype is x's
    dtypes = [triple for triple in triples if names or triple[2] == triple[0]]
    trial = RuleTrial(module, [_with_extremes(x), gate], draw.values, dtypes)
    truth = trial.result(trial.all_of(torch.float64))
    if truth is None or truth.shape != x.shape:
        return None
    candidates = _gated_candidates(module, names[0] if names else None, eps, width)
    # which function it is shows in float32; not in float64, which a module may compute in float32
    rule = next((rule for rule in candidates if trial.is_close(rule)), None)
    if rule is None:
        return None
    best = best_rule(trial, [rule._replace(cast=cast) for cast in ("torch", "llama")])
    flat = RuleTrial(module, [x.flatten(0, 1) for x in trial.inputs], draw.values, dtypes)
    return best if best is not None and flat.is_close(best) else None


def _gated_candidates(
    module: nn.Module, weight: str | None, eps: str, width: int
) -> Iterator[NormMatch]:
    """Yield the rules that a module with a gate may compute by, up to rounding."""
    sizes = {v for v in vars(module).values() if type(v) is int and v > 0 and width % v == 0}
    # an attribute may be the number of groups, or the size of a group
    groups = sorted({1, *sizes, *(width // size for size in sizes)})
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    for activation, offset in product(_GATES, offsets):
        for count, gates_first in product(groups, (False, True)):
            gate = Gate(activation, count, gates_first)
            yield NormMatch(weight, eps, offset, "torch", gate=gate)


def _rows(width: int) -> int:
    return max(6, _ELEMENTS // width // 2 * 2)


def _with_extremes(x: Tensor) -> Tensor:
    """Scale an input so that it has rows so small that epsilon counts, and large ones."""
    x[:, 0] *= 1e-3
    x[:, -1] *= 30.0
    return x


def _casts_back(trial: RuleTrial) -> bool:
    """Whether a layer_norm that widens, as under autocast, leaves the result in x's dtype."""
    with _WideningLayerNorm():
        y = trial.result(trial.all_of(torch.float32))
    return y is None or y.dtype == torch.float32


class _WideningLayerNorm(TorchFunctionMode):
    """Lets layer_norm return float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y.double() if func in (F.layer_norm, torch.layer_norm) else y
