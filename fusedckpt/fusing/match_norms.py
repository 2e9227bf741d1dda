"""Recognize norms of any class, and the rule by which they compute.

torch's own norms, and subclasses that inherit their forward, are known. Any other module with at
most two vectors of weights is recorded: it may be a LayerNorm if its forward is one layer_norm of
its input or subtracts a mean, an RMSNorm if it has at most one vector. It is one if a rule of
`functional` gives the same bits on random numbers, in the dtypes where it does.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fusedckpt.autograd.dispatch import own_forward
from fusedckpt.blocks.eager import forcing
from fusedckpt.fusing.code_names import defining_class
from fusedckpt.fusing.fused_norms import FusedNorm, NormMatch, normalized
from fusedckpt.fusing.reasons import looks_like
from fusedckpt.fusing.recording import BUFFER_OP, FOREIGN_OP, Recording, guards_of, record
from fusedckpt.fusing.replica import Draw, replica, takes_one, undisturbed
from fusedckpt.fusing.swap import Swap, run_forward, subclass
from fusedckpt.kernels.runtime import HALF
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.norm import LayerNorm, RMSNorm

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
CHECKED_DTYPES = (*HALF, torch.float32, torch.float64)
# offsets and casts of RMSNorms. Llama's and Gemma's first: torch's differs from the third only
# under autocast on a GPU
_RULES = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"), (1.0, "llama"))
# of elements that may differ by a rounding: a rule that rounds elsewhere differs in a tenth of them
_STRAYS = 1 / 50
ELEMENTS = 4096
# ops by which a norm shows: of a LayerNorm, of all, means and roots
_CENTRES = frozenset(("native_layer_norm", "std", "std_mean", "sub", "var", "var_mean"))
_STATISTICS = frozenset(("_fused_rms_norm", "linalg_vector_norm", "norm")) | _CENTRES - {"sub"}
_MEANS = frozenset(("mean", "sum"))
_ROOTS = frozenset(("rsqrt", "sqrt"))
# the least norm of a row by which F.normalize divides
_LEAST_NORM = 1e-12
# of x and of the weight
DtypePair = tuple[torch.dtype, torch.dtype]


def norm_swap(module: nn.Module) -> Swap | NotFused | None:
    """Return how a norm is swapped, the reason why it cannot be, or None for other modules."""
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
    names = [*dict(module.named_parameters(recurse=False, remove_duplicate=False))]
    if module._modules or len(names) > 2 or not has_own_forward(type(module)):
        return None
    if any(w.dim() > 1 or w.numel() == 0 for w in weights) or not takes_one(module):
        return None
    eps = epsilon_of(module)
    width = _width(module, weights)
    recordings = [record(module, (2, 3, width), training=training) for training in (False, True)]
    stop = next((r.log.stop for r in recordings if r.log.stop is not None), None)
    if stop is not None:
        return stop if eps is not None or looks_like(module) == "norm" else None
    is_norm = _normalizes(recordings[0]) or bool(weights and eps is not None)
    if any(map(reads_unknown_tensors, recordings)):
        return NotFused("foreign") if is_norm else None
    match = None
    if (is_norm or weights or eps is not None) and all(w.numel() > 1 for w in weights):
        candidates = _candidates(module, recordings, names, eps, width=width)
        match = _proven_rule(_NormDraws(module, names, width), candidates)
    if match is not None and not weights and not _normalized_shape(module):
        # a rule that holds for the width of its code alone is none
        match = _proven_rule(_NormDraws(module, [], width // 2), [match])
    dtype = weights[0].dtype if weights else torch.float32
    if match is None or (dtype, dtype) not in match.dtypes:
        return NotFused("rule", dtype) if is_norm or match is not None else None
    return _swap(module, match, recordings, width)


def _swap(
    module: nn.Module, match: NormMatch, recordings: list[Recording], width: int
) -> Swap | NotFused:
    # an epsilon is read in every call
    guards = guards_of([r.log for r in recordings], [((), str(match.eps))])
    if isinstance(guards, NotFused):
        return guards
    under_autocast = record(module, (2, 3, width), training=True, autocast=True)
    match = match._replace(guards=guards, autocasts=under_autocast.log.stop is None)
    if match.kind == "rms":
        offset = f", offset {match.offset:g}" if match.offset else ""
        change = f"rms_norm ({match.cast} cast{offset})"
    else:
        change = "layer_norm" + (f" (offset {match.offset:g})" if match.offset else "")
    return Swap(
        "norm",
        f"{type(module).__name__} -> {change}",
        subclass(FusedNorm, type(module)),
        notes={"match": match},
        features=(width,),
    )


def epsilon_of(module: nn.Module) -> str | None:
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


def has_own_forward(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class is not torch's."""
    return not defining_class(kind, "forward").__module__.startswith("torch.")


def reads_unknown_tensors(recording: Recording) -> bool:
    """Whether a result was made of buffers, or of tensors that are no parameters."""
    return any(node.op in (BUFFER_OP, FOREIGN_OP) for node in recording.nodes)


def _ops(recording: Recording) -> set[str]:
    """Return the names of the ops that make a forward's result, a root by pow as "rsqrt"."""
    return {
        "rsqrt" if node.name == "pow" and node.args[1] in (0.5, -0.5) else node.name
        for node in recording.nodes
        if node.kind in ("elementwise", "other")
    }


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
    """Return the rules that a module may compute by."""
    layers = {_layer_norm_match(recording, width) for recording in recordings}
    if None not in layers:
        return [*layers] if len(layers) == 1 else []  # type: ignore[list-item]  # none of them None
    matches = []
    if eps is not None and _ops(recordings[0]) & _CENTRES:
        places = permutations(names) if len(names) == 2 else [(*names, None, None)]
        matches = [
            NormMatch(weight, eps, offset, "torch", dtypes=(), kind="layer", bias=bias)
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
    matches += [NormMatch(name, eps_or_value, offset, cast, dtypes=()) for offset, cast in rules]
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
    return NormMatch(names[0], eps, 0.0, "torch", dtypes=(), kind="layer", bias=names[1])


def _proven_rule(draws: _NormDraws, candidates: list[NormMatch]) -> NormMatch | None:
    """Return the rule that gives a module's bits in most dtypes, and these, float32 among them."""
    expected = {pair: draws.module_result(pair) for pair in draws.pairs}
    best = None
    for match in candidates:
        proven = tuple(
            pair for pair, y in expected.items() if _are_same(draws.rule_result(match, pair), y)
        )
        # half precision alone proves little: it rounds away how a rule differs
        is_proven = (torch.float32, torch.float32) in proven
        if is_proven and (best is None or len(proven) > len(best.dtypes)):
            best = match._replace(dtypes=proven)
    if best is not None and best.kind == "layer":
        return best._replace(casts_back=draws.casts_back())
    return best


class _NormDraws:
    """A norm's input and weights, and its results for them in any pair of dtypes."""

    def __init__(self, module: nn.Module, names: list[str], width: int):
        draw = Draw(module, (width,), rows=max(6, ELEMENTS // width // 2 * 2))
        self.module = module
        self.x = draw.x
        # rows so small that epsilon counts, and large ones
        self.x[:, 0] *= 1e-3
        self.x[:, -1] *= 30.0
        self.x[1] *= 100.0
        self.values = draw.values
        pairs = [(x, w) for x in CHECKED_DTYPES for w in CHECKED_DTYPES]
        self.pairs: list[DtypePair] = pairs if names else [(d, d) for d in CHECKED_DTYPES]

    def module_result(self, pair: DtypePair) -> Tensor | None:
        """Return the module's result, None where it raises."""
        clone = replica(self.module, lambda p, _: self.values[id(p)].to(pair[1]))
        with undisturbed("cpu"), torch.no_grad():
            try:
                return run_forward(clone, self.x.to(pair[0]))
            except Exception:  # arbitrary code of others, in dtypes that it may not take
                return None

    def rule_result(self, match: NormMatch, pair: DtypePair) -> Tensor | None:
        """Return a rule's result, None where it raises."""
        parameters = self.module._parameters
        weight, bias = (
            None if name is None else self.values[id(parameters[name])].to(pair[1])
            for name in (match.weight, match.bias)
        )
        with undisturbed("cpu"), torch.no_grad(), forcing(None):
            try:
                return normalized(self.module, match, self.x.to(pair[0]), weight, bias)
            except RuntimeError:
                return None

    def casts_back(self) -> bool:
        """Whether a layer_norm that widens, as under autocast, leaves the result in x's dtype."""
        with _WideningLayerNorm():
            y = self.module_result((torch.float32, torch.float32))
        return y is None or y.dtype == torch.float32


class _WideningLayerNorm(TorchFunctionMode):
    """Lets layer_norm return float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y.double() if func in (F.layer_norm, torch.layer_norm) else y


def _are_same(result: Any, expected: Any) -> bool:
    """Whether two results are equal: in half precision but for stray roundings."""
    if not (isinstance(expected, Tensor) and isinstance(result, Tensor)):
        return False
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.dtype in HALF:
        return (result != expected).double().mean().item() <= _STRAYS
    return are_close(result, expected)


def are_close(result: Tensor, expected: Tensor) -> bool:
    """Whether results in float32 or float64 differ by 8 epsilons at most."""
    tolerance = 8 * torch.finfo(result.dtype).eps
    return torch.allclose(result, expected, rtol=tolerance, atol=tolerance)
