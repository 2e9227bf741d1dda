"""Recognize norms with a gate, norm(x) * act(gate) or norm(x * act(gate)), of any class.

A module of at most one vector of weights whose forward takes two tensors is recorded. It is such a
norm if a rule of `functional.gated_rms_norm` gives its result on random numbers in float32, up to
rounding; in half precision, where classes round in several places, our error may be twice its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.fusing.accuracy import Errors
from fusedckpt.fusing.fused_gated_norms import (
    Dtypes,
    FusedGatedNorm,
    GatedNormMatch,
    matched_gated_norm,
)
from fusedckpt.fusing.match_norms import (
    CHECKED_DTYPES,
    ELEMENTS,
    are_close,
    epsilon_of,
    has_own_forward,
    reads_unknown_tensors,
)
from fusedckpt.fusing.recording import Recording, guards_of, record
from fusedckpt.fusing.replica import Draw, replica, undisturbed
from fusedckpt.fusing.swap import Swap, subclass
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.layers.fallbacks import NotFused

# these first: all known models have one of them; an identity gates nothing
_GATES = dict.fromkeys(("silu", "sigmoid", *ACTIVATIONS))
del _GATES["identity"]
# dtypes of x, the gate and the weight
_ALL_FLOAT64: Dtypes = torch.float64, torch.float64, torch.float64
_ALL_FLOAT32: Dtypes = torch.float32, torch.float32, torch.float32


def gated_norm_swap(module: nn.Module) -> Swap | NotFused | None:
    """Return how a norm with a gate is swapped, why it is not, or None for other modules."""
    weights = [*module.parameters(recurse=False)]
    names = [*dict(module.named_parameters(recurse=False, remove_duplicate=False))]
    eps = epsilon_of(module)
    if eps is None or len(names) > 1 or len([*module.parameters()]) > len(weights):
        return None
    if any(w.dim() != 1 or w.numel() < 2 for w in weights) or not has_own_forward(type(module)):
        return None
    if not _takes_two(module):
        return None
    width = weights[0].shape[0] if weights else getattr(module, "hidden_size", 64)

    def recorded(autocast: bool) -> list[Recording]:
        options: dict[str, Any] = {"autocast": autocast, "num_inputs": 2}
        return [record(module, (2, 3, width), training=mode, **options) for mode in (False, True)]

    recordings = recorded(autocast=False)
    if any(r.log.stop is not None or reads_unknown_tensors(r) for r in recordings):
        return None
    match = _proven_rule(module, names, eps, width)
    if match is None:
        return None
    guards = guards_of([recording.log for recording in recordings], [((), eps)])
    if isinstance(guards, NotFused):
        return guards
    match = match._replace(
        guards=guards,
        autocasts=all(recording.log.stop is None for recording in recorded(autocast=True)),
    )
    return Swap(
        "norm",
        f"{type(module).__name__} -> {match.words}",
        subclass(FusedGatedNorm, type(module)),
        notes={"match": match},
        features=(2 * width,),
        run=_run_on_halves,
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


def _proven_rule(
    module: nn.Module, names: list[str], eps: str, width: int
) -> GatedNormMatch | None:
    """Return the rule that a module computes by, with the dtypes in which it was verified."""
    draws = _GatedDraws(module, names, width)
    truth = draws.module_result(_ALL_FLOAT64)
    result = draws.module_result(_ALL_FLOAT32)
    if truth is None or result is None or truth.shape != draws.x.shape:
        return None
    candidates = _candidates(module, names[0] if names else None, eps, width)
    # not float64, which a module may compute in float32
    match = next(
        (rule for rule in candidates if _is_close(draws.rule_result(rule, _ALL_FLOAT32), result)),
        None,
    )
    if match is None:
        return None
    best = match
    triples = product(CHECKED_DTYPES, CHECKED_DTYPES, CHECKED_DTYPES)
    # without a weight its dtype is x's
    dtypes = [triple for triple in triples if names or triple[2] == triple[0]]
    results = {triple: draws.module_result(triple) for triple in dtypes}
    for cast in ("torch", "llama"):
        rule = match._replace(cast=cast)
        proven = [d for d in dtypes if _is_as_near(draws.rule_result(rule, d), results[d], truth)]
        if len(proven) > len(best.dtypes):
            best = rule._replace(dtypes=tuple(proven))
    is_proven = _ALL_FLOAT32 in best.dtypes and _holds_for_two_dimensions(draws, best)
    return best if is_proven else None


def _holds_for_two_dimensions(draws: _GatedDraws, match: GatedNormMatch) -> bool:
    draws.x = draws.x.flatten(0, 1)
    draws.gate = draws.gate.flatten(0, 1)
    return _is_close(draws.rule_result(match, _ALL_FLOAT32), draws.module_result(_ALL_FLOAT32))


def _candidates(
    module: nn.Module, weight: str | None, eps: str, width: int
) -> Iterator[GatedNormMatch]:
    """Yield the rules that a module may compute by."""
    sizes = {v for v in vars(module).values() if type(v) is int and v > 0 and width % v == 0}
    # an attribute may be the number of groups, or the size of a group
    groups = sorted({1, *sizes, *(width // size for size in sizes)})
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    for activation, offset in product(_GATES, offsets):
        for count, gates_first in product(groups, (False, True)):
            yield GatedNormMatch(
                weight, eps, activation, count, gates_first, offset=offset, cast="torch"
            )


class _GatedDraws:
    """A gated norm's inputs and weight, and its results for them in any dtypes."""

    def __init__(self, module: nn.Module, names: list[str], width: int):
        rows = max(6, ELEMENTS // width // 2 * 2)
        draw = Draw(module, (2 * width,), rows=rows)
        self.module = module
        self.values = draw.values
        self.x, self.gate = draw.x.chunk(2, -1)
        # rows so small that epsilon counts, and large ones
        self.x[:, 0] *= 1e-3
        self.x[:, -1] *= 30.0

    def module_result(self, dtypes: Dtypes) -> Tensor | None:
        """Return the module's result, None where it raises."""
        x_dtype, gate_dtype, weight_dtype = dtypes
        clone = replica(self.module, lambda p, _: self.values[id(p)].to(weight_dtype))
        with undisturbed("cpu"), torch.no_grad():
            try:
                return type(clone).forward(clone, self.x.to(x_dtype), self.gate.to(gate_dtype))
            except Exception:  # arbitrary code of others, in dtypes that it may not take
                return None

    def rule_result(self, match: GatedNormMatch, dtypes: Dtypes) -> Tensor:
        """Return a rule's result."""
        x_dtype, gate_dtype, weight_dtype = dtypes
        weight = None
        if match.weight is not None:
            weight = self.values[id(self.module._parameters[match.weight])].to(weight_dtype)
        with undisturbed("cpu"), torch.no_grad():
            x = self.x.to(x_dtype)
            return matched_gated_norm(self.module, match, x, self.gate.to(gate_dtype), weight)


def _is_close(result: Tensor, expected: Any) -> bool:
    is_like = isinstance(expected, Tensor) and expected.dtype == result.dtype
    return is_like and are_close(result, expected)


def _is_as_near(result: Tensor, expected: Any, truth: Tensor) -> bool:
    """Whether a result has the dtype of a module's, and obeys the error rule."""
    if not isinstance(expected, Tensor) or expected.dtype != result.dtype:
        return False
    errors = Errors(result.dtype)
    errors.add(result, expected, truth)
    return errors.problem() is None
