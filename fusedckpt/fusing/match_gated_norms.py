"""Recognise norms with a gate, norm(x) * act(gate) or norm(x * act(gate)), of any class.

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
from fusedckpt.fusing.fused_gated_norms import Dtypes, FusedGatedNorm, GatedNormMatch, gated_by
from fusedckpt.fusing.match_norms import DTYPES, ELEMENTS, EPSILONS, has_own_forward
from fusedckpt.fusing.recording import BUFFER_OP, FOREIGN_OP, record
from fusedckpt.fusing.replica import Draw, replica, undisturbed
from fusedckpt.fusing.spies import held_by
from fusedckpt.fusing.subclass import subclass
from fusedckpt.fusing.swap import Swap
from fusedckpt.kernels.activations import ACTIVATIONS

# these first: all known models have one of them; an identity gates nothing
_ACTIVATIONS = dict.fromkeys(("silu", "sigmoid", *ACTIVATIONS))
del _ACTIVATIONS["identity"]


def gated_norm_swap(module: nn.Module) -> Swap | None:
    """Return how a norm with a gate is swapped, None for other modules."""
    weights = [*module.parameters(recurse=False)]
    names = [*dict(module.named_parameters(recurse=False, remove_duplicate=False))]
    eps = next((n for n in EPSILONS if type(getattr(module, n, None)) in (int, float)), None)
    if eps is None or len(names) > 1 or len([*module.parameters()]) > len(weights):
        return None
    if any(w.dim() != 1 or w.numel() < 2 for w in weights) or not has_own_forward(type(module)):
        return None
    if not _takes_two(module):
        return None
    width = weights[0].shape[0] if weights else getattr(module, "hidden_size", 64)
    modes = [(training, autocast) for training in (False, True) for autocast in (False, True)]
    recordings = {
        (training, autocast): record(
            module, (2, 3, width), training=training, autocast=autocast, inputs=2
        )
        for training, autocast in modes
    }
    plain = [recordings[training, False] for training in (False, True)]
    unknown = (BUFFER_OP, FOREIGN_OP)
    if any(r.log.stop is not None or any(n.op in unknown for n in r.nodes) for r in plain):
        return None
    match = _found(module, names, eps, width)
    if match is None:
        return None
    held = held_by([recording.log for recording in plain], [((), eps)])
    autocasts = all(recordings[training, True].log.stop is None for training in (False, True))
    match = match._replace(held=held, autocasts=autocasts)
    return Swap(
        "norm",
        f"{type(module).__name__} -> {match.words}",
        subclass(FusedGatedNorm, type(module)),
        {"_fusedckpt_match": match},
        features=(2 * width,),
        run=_run_halves,
    )


def _run_halves(module: Any, x: Tensor) -> Any:
    """Run a module on x and a gate, the halves of a tensor."""
    return type(module).forward(module, *x.chunk(2, -1))


def _takes_two(module: nn.Module) -> bool:
    try:
        inspect.signature(type(module).forward).bind(module, None, None)
    except (TypeError, ValueError):
        return False
    return True


def _found(module: nn.Module, names: list[str], eps: str, width: int) -> GatedNormMatch | None:
    """Return the rule that a module computes by, with the dtypes in which it was verified."""
    draws = _GatedDraws(module, names, width)
    wide = torch.float64, torch.float64, torch.float64
    single = torch.float32, torch.float32, torch.float32
    name = names[0] if names else None
    truth, result = draws.run(wide), draws.run(single)
    if truth is None or result is None or truth.shape != draws.x.shape:
        return None
    for match in _candidates(module, name, eps, width):
        # float64 may be computed in float32
        if _are_close(draws.twin(match, single), result):
            break
    else:
        return None
    best = match
    triples = product(DTYPES, DTYPES, DTYPES)
    dtypes = [triple for triple in triples if names or triple[2] == triple[0]]
    results = {triple: draws.run(triple) for triple in dtypes}
    for cast in ("torch", "llama"):
        rule = match._replace(cast=cast)
        proven = [d for d in dtypes if _is_as_near(draws.twin(rule, d), results[d], truth)]
        if len(proven) > len(best.dtypes):
            best = rule._replace(dtypes=tuple(proven))
    return best if single in best.dtypes and _is_flat(draws, best, single) else None


def _is_flat(draws: _GatedDraws, match: GatedNormMatch, dtypes: Dtypes) -> bool:
    """Whether the rule holds for rows of two dimensions, too."""
    draws.x, draws.gate = draws.x.flatten(0, 1), draws.gate.flatten(0, 1)
    return _are_close(draws.twin(match, dtypes), draws.run(dtypes))


def _candidates(
    module: nn.Module, weight: str | None, eps: str, width: int
) -> Iterator[GatedNormMatch]:
    """Yield the rules that a module may compute by."""
    sizes = {v for v in vars(module).values() if type(v) is int and v > 0 and width % v == 0}
    groups = sorted({1, *sizes, *(width // size for size in sizes)})
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    for activation, offset in product(_ACTIVATIONS, offsets):
        for count, gates_first in product(groups, (False, True)):
            yield GatedNormMatch(
                weight, eps, activation, count, gates_first, offset=offset, cast="torch"
            )


class _GatedDraws:
    """A gated norm's inputs and weight, and its results for them in any dtypes."""

    def __init__(self, module: nn.Module, names: list[str], width: int):
        rows = max(6, ELEMENTS // width // 2 * 2)
        draw = Draw(module, (2 * width,), rows=rows)
        self.module, self.names, self.values = module, names, draw.values
        self.x, self.gate = draw.x.chunk(2, -1)
        # rows so small that epsilon counts, and large ones
        self.x[:, 0] *= 1e-3
        self.x[:, -1] *= 30.0

    def run(self, dtypes: Dtypes) -> Tensor | None:
        """Return the module's result, None where it raises."""
        clone = replica(self.module, lambda p, _: self.values[id(p)].to(dtypes[2]))
        with undisturbed("cpu"), torch.no_grad():
            try:
                return type(clone).forward(clone, self.x.to(dtypes[0]), self.gate.to(dtypes[1]))
            except Exception:  # arbitrary code of others, in dtypes that it may not take
                return None

    def twin(self, match: GatedNormMatch, dtypes: Dtypes) -> Tensor:
        """Return a rule's result."""
        weight = None
        if match.weight is not None:
            weight = self.values[id(self.module._parameters[match.weight])].to(dtypes[2])
        x, gate = self.x.to(dtypes[0]), self.gate.to(dtypes[1])
        with undisturbed("cpu"), torch.no_grad():
            return gated_by(self.module, match, x, gate, weight)


def _are_close(result: Tensor, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or expected.dtype != result.dtype:
        return False
    tolerance = 8 * torch.finfo(result.dtype).eps
    return torch.allclose(result, expected, rtol=tolerance, atol=tolerance)


def _is_as_near(result: Tensor, expected: Any, truth: Tensor) -> bool:
    """Whether a result has the dtype of a module's, and obeys the error rule."""
    if not isinstance(expected, Tensor) or expected.dtype != result.dtype:
        return False
    errors = Errors(result.dtype)
    errors.add(result, expected, truth)
    return errors.problem() is None
