"""Whether a configuration holds: the project's error rule, and what autograd lets a caller expect.

Errors are root mean squares over a result's elements, truth is eager in float64, and eps that of
float32 for half precision too: err(ours) <= 2 err(eager) + 8 eps max(1, rms(truth)). One unlucky
rounding is no failure: where the rule is broken, more draws of the configuration are stacked, all
but the worst eighth. Nor is it one where eager was lucky: where a norm divides what rounding left
by next to nothing, eager's error is the larger of torch's norms' and of norms written out in
float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedckpt.fusing.accuracy import FLOOR, SLACK

from .config import Config
from .kept import kept_bytes, saved_bytes
from .trial import Trial, attempt, settle

# how many draws an apparent excess is judged by, one stage after the other
DRAWS = (16, 112)
# where the first stage leaves no doubt
CLEAR = 10.0
HALF = (torch.bfloat16, torch.float16)
# what ours says where double backward needs what a level did not keep
KEPT_TOO_LITTLE = "use save='inputs'"


@dataclass(frozen=True)
class Failure:
    """What does not hold: `kind` in one word, which result, and how."""

    kind: str
    what: str
    detail: str

    def __str__(self) -> str:
        """Write it in one line."""
        return f"{self.kind}: {self.what}: {self.detail}"


@dataclass
class Sums:
    """Squared errors of one result, summed over draws."""

    ours: float = 0.0
    eager: float = 0.0
    written: float = 0.0
    truth: float = 0.0
    count: int = 0
    eps: float = 0.0

    def add(self, other: Sums) -> None:
        """Stack another draw on top."""
        for field in ("ours", "eager", "written", "truth", "count"):
            setattr(self, field, getattr(self, field) + getattr(other, field))
        self.eps = other.eps

    def means(self) -> tuple[float, float, float]:
        """Return root mean squares: ours, eager's either way, and the floor."""
        ours, eager, written, truth = (
            math.sqrt(s / max(1, self.count))
            for s in (self.ours, self.eager, self.written, self.truth)
        )
        return ours, max(eager, written), FLOOR * self.eps * max(1.0, truth)

    def excess(self) -> float:
        """Return ours by what is allowed: more than one breaks the rule."""
        ours, eager, floor = self.means()
        return ours / (SLACK * eager + floor)

    def __str__(self) -> str:
        """Write the figures of the rule."""
        ours, eager, floor = self.means()
        return f"error {ours:.3g}, eager's {eager:.3g}, floor {floor:.3g}"


def judge(config: Config) -> Failure | None:
    """Run a configuration and return the first thing that does not hold."""
    c = settle(config)
    trial = attempt(c)
    failure = structure(c, trial)
    if failure is not None and failure.kind == "finite" and not recurs(c, failure):
        # an intermediate at the limit of its dtype, which one rounding turns into infinity
        return None
    if failure is not None or trial.eager.error is not None:
        return failure
    expected = kept_bytes(c) if c.weighs else None
    if expected is not None and (found := saved_bytes(c)) != expected:
        return Failure("bytes", "saved", f"{found}, expected {expected}")
    if worst(errors(c, trial)) is None:
        return None
    return excess(c)


def recurs(c: Config, failure: Failure) -> bool:
    """Whether other draws of a configuration fail the same way."""
    others = (structure(c, attempt(c, number)) for number in range(1, DRAWS[0]))
    return any(found is not None and found.kind == failure.kind for found in others)


def excess(c: Config) -> Failure | None:
    """Stack draws until they tell whether errors break the rule."""
    draws: dict[str, list[Sums]] = {}
    for number in range(max(DRAWS)):
        for name, sums in errors(c, attempt(c, number, writes=True)).items():
            draws.setdefault(name, []).append(sums)
        if number + 1 in DRAWS:
            stacked = {name: stack(sums) for name, sums in draws.items()}
            name = worst(stacked)
            if name is None:
                return None
            if number + 1 == max(DRAWS) or stacked[name].excess() > CLEAR:
                return Failure("error", name, str(stacked[name]))
    raise AssertionError("the last stage decides")


def stack(draws: list[Sums]) -> Sums:
    """Add draws up but for the worst eighth: one number next to a kink or a pole may decide."""
    total = Sums()
    for sums in sorted(draws, key=lambda sums: sums.ours)[: len(draws) - len(draws) // 8]:
        total.add(sums)
    return total


def worst(stacked: dict[str, Sums]) -> str | None:
    """Return the result that breaks the rule most; None where it holds."""
    name = max(stacked, key=lambda name: stacked[name].excess(), default=None)
    return name if name is not None and stacked[name].excess() > 1 else None


def structure(c: Config, trial: Trial) -> Failure | None:
    """Return what is wrong but for the size of errors."""
    ours, eager = trial.ours, trial.eager
    if eager.error is not None:
        # backward fails for reasons of torch's own, such as LayerNorm's second one without a weight
        if ours.error is None and not eager.outputs:
            return Failure("accepts", "eager", f"{type(eager.error).__name__}: {eager.error}")
        return None
    if ours.error is not None:
        if KEPT_TOO_LITTLE in str(ours.error) or refuses_mixed(c, ours.error):
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


def refuses_mixed(c: Config, error: Exception) -> bool:
    """Whether GEMMs of several dtypes were refused, which torch takes by accident of strides."""
    in_gemms = {name for name, _ in c.dtypes} - {"norm_weight", "norm_bias", "residual"}
    return isinstance(error, TypeError) and len(in_gemms) > 0


def likeness(
    c: Config, name: str, mine: Tensor | None, theirs: Tensor | None, truth: Tensor | None
) -> Failure | None:
    """Compare what one result is, but for its finite values."""
    if mine is None or theirs is None:
        if mine is theirs:
            return None
        shown = ("None" if t is None else "a tensor" for t in (mine, theirs))
        return Failure("none", name, "{}, eager's {}".format(*shown))
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


def errors(c: Config, trial: Trial) -> dict[str, Sums]:
    """Return the squared errors of every result, over what is finite in all."""
    # of the narrowest operand, which a wider one does not make more exact
    dtypes = [getattr(torch, name) for name in (c.dtype, *dict(c.dtypes).values())]
    eps = max(torch.finfo(torch.promote_types(dtype, torch.float32)).eps for dtype in dtypes)
    found = {}
    for name, theirs in trial.eager.found.items():
        mine, truth = trial.ours.found.get(name), trial.truth.found.get(name)
        if mine is None or theirs is None or truth is None:
            continue
        written = None if trial.written is None else trial.written.found.get(name)
        found[name] = _sums(eps, mine, theirs, truth, written)
    return found


def _sums(eps: float, mine: Tensor, theirs: Tensor, truth: Tensor, written: Tensor | None) -> Sums:
    finite = mine.isfinite() & theirs.isfinite() & truth.isfinite()
    exact = truth[finite]

    def squared(other: Tensor) -> float:
        return (other[finite].double() - exact).nan_to_num(0, 0, 0).square().sum().item()

    scale = (eps / torch.finfo(torch.float32).eps) ** 2
    return Sums(
        squared(mine),
        squared(theirs),
        0.0 if written is None else scale * squared(written),
        exact.square().sum().item(),
        int(finite.sum()),
        eps,
    )
