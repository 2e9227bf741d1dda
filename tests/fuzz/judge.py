"""Whether a configuration holds: the project's error rule, and what autograd lets a caller expect.

Errors are root mean squares over a result's elements, truth is eager in float64. One unlucky
rounding is no failure: where the rule is broken, more draws of the configuration are stacked, all
but the worst eighth. Nor is it one where eager was lucky: where a norm divides what rounding left
by next to nothing, eager's error is the larger of torch's norms' and of norms written out in
float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedckpt.fusing.accuracy import FEWEST, allowed

from .config import Config
from .trial import Trial, attempt, settle

# how many draws an apparent excess is judged by, one stage after the other: without the worst
# eighth there are FEWEST elements, of a single number too
DRAWS = (20, 112)
# where the first stage leaves no doubt
CLEAR = 10.0
HALF = (torch.bfloat16, torch.float16)
# what ours says where double backward needs what a level did not keep
KEPT_TOO_LITTLE = "use save='inputs'"


class Failure(NamedTuple):
    """What does not hold: `kind` in one word, which result, and how."""

    kind: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}: {self.detail}"


class Sums(NamedTuple):
    """Squares of one result, summed: errors of ours, eager's, eager's written out, the truth."""

    ours: float
    eager: float
    written: float
    truth: float
    count: int

    def excess(self, dtype: torch.dtype) -> float:
        """Return the error by what is allowed: more than one breaks the rule."""
        means = (math.sqrt(total / max(1, self.count)) for total in self[:4])
        ours, eager, written, truth = means
        return ours / allowed(max(eager, written), truth, dtype)


def judge(config: Config) -> Failure | None:
    """Run a configuration and return the first thing that does not hold."""
    c = settle(config)
    trial = attempt(c)
    failure = structure(c, trial)
    if failure is not None and failure.kind == "finite":
        # an intermediate at the limit of its dtype, which one rounding turns into infinity?
        others = (structure(c, attempt(c, number)) for number in range(1, DRAWS[0]))
        recurs = any(other is not None and other.kind == "finite" for other in others)
        return failure if recurs else None
    if failure is not None or trial.eager.error is not None:
        return failure
    return None if worst(c, sums_of(c, trial))[0] <= 1 else excess(c)


def excess(c: Config) -> Failure | None:
    """Stack draws until they tell whether errors break the rule."""
    draws: dict[str, list[Sums]] = {}
    for number in range(max(DRAWS)):
        for name, sums in sums_of(c, attempt(c, number, writes=True)).items():
            draws.setdefault(name, []).append(sums)
        if number + 1 in DRAWS:
            stacked = {name: stack(sums) for name, sums in draws.items()}
            ratio, name = worst(c, stacked)
            if ratio <= 1:
                return None
            if ratio > CLEAR or number + 1 == max(DRAWS):
                return Failure("error", name, f"{ratio:.3g} of what is allowed, {stacked[name]}")
    raise AssertionError("the last stage decides")


def stack(draws: list[Sums]) -> Sums:
    """Add draws up but for the worst eighth: one number next to a kink or a pole may decide."""
    kept = sorted(draws, key=lambda sums: sums.ours)[: len(draws) - len(draws) // 8]
    assert len(kept) >= FEWEST
    return Sums(*map(sum, zip(*kept, strict=True)))


def worst(c: Config, stacked: dict[str, Sums]) -> tuple[float, str]:
    """Return the result that breaks the rule most, with its excess."""
    dtype = getattr(torch, c.dtype)
    return max(((s.excess(dtype), name) for name, s in stacked.items()), default=(0.0, ""))


def structure(c: Config, trial: Trial) -> Failure | None:
    """Return what is wrong but for the size of errors."""
    ours, eager = trial.ours, trial.eager
    if eager.error is not None:
        # backward fails for reasons of torch's own, such as LayerNorm's second one without a weight
        if ours.error is None and not eager.outputs:
            return Failure("accepts", "eager", f"{type(eager.error).__name__}: {eager.error}")
        return None
    if ours.error is not None:
        if KEPT_TOO_LITTLE in str(ours.error):
            return None
        return Failure("raises", type(ours.error).__name__, str(ours.error))
    if trial.changes:
        return Failure("changes", "operands", "or incoming gradients were written")
    if ours.requires != eager.requires:
        detail = f"requires grad {ours.requires}, eager's {eager.requires}"
        return Failure("requires", "outputs", detail)
    if ours.found.keys() != eager.found.keys():
        return Failure("results", "names", f"{list(ours.found)}, eager's {list(eager.found)}")
    for name, theirs in eager.found.items():
        failure = likeness(c, name, ours.found[name], theirs, trial.truth.found[name])
        if failure is not None:
            return failure
    return None


def likeness(
    c: Config, name: str, mine: Tensor | None, theirs: Tensor | None, truth: Tensor | None
) -> Failure | None:
    """Compare what one result is, but for its finite values."""
    if mine is None or theirs is None:
        if mine is theirs:
            return None
        return Failure("none", name, f"{type(mine).__name__}, eager's {type(theirs).__name__}")
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        detail = f"{mine.dtype} {list(mine.shape)}, eager's {theirs.dtype} {list(theirs.shape)}"
        return Failure("type", name, detail)
    wrong = mine.isfinite() != theirs.isfinite()
    narrow = theirs.dtype if c.autocast is None else getattr(torch, c.autocast)
    if narrow in HALF and truth is not None:
        # eager overflows where ours keeps float32; at the limit, either does
        largest = torch.finfo(narrow).max
        wrong &= ~(mine.isfinite() & truth.isfinite())
        wrong &= ~((truth.abs() > 0.9 * largest) & (truth.abs() < 1.1 * largest))
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        detail = f"{mine[tuple(where)]} at {where}, eager's {theirs[tuple(where)]}"
        return Failure("finite", name, detail)
    return None


def sums_of(c: Config, trial: Trial) -> dict[str, Sums]:
    """Return the squared errors of every result, over what is finite in all."""
    # float32's errors on float64's scale
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    found = {}
    for name, theirs in trial.eager.found.items():
        mine, truth = trial.ours.found.get(name), trial.truth.found.get(name)
        if mine is None or theirs is None or truth is None:
            continue
        written = None if trial.written is None else trial.written.found.get(name)
        finite = mine.isfinite() & theirs.isfinite() & truth.isfinite()

        def squared(x: Tensor, finite: Tensor = finite) -> float:
            return x.double()[finite].nan_to_num(0, 0, 0).square().sum().item()

        own = 0.0 if written is None else squared(written - truth)
        own *= scale**2 if c.dtype == "float64" else 1.0
        errors = squared(mine - truth), squared(theirs - truth), own, squared(truth)
        found[name] = Sums(*errors, int(finite.sum()))
    return found
