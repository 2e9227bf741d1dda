"""Steps that run every unit, of a model that skips units at random (LayerDrop).

A step that happens to skip units shows neither their bytes nor its own peak without them. So where
random states move between units, and a step calls fewer units than the model has, other steps are
drawn. If none of these runs all units that any of them ran, the draws themselves are made extreme:
a unit is skipped where a number is below a rate, or runs where it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedckpt.planning.roles import assigned, segmented
from fusedckpt.planning.trimming import trimmers_of
from fusedckpt.reporting.step import Step
from fusedckpt.state import rng

# the steps that are drawn
_DRAWS = 16
# the steps that tell whether units are skipped where no known generator moves between them
_LOOKS = 3
# the largest number below 1 in float32
_HIGHEST = 1 - 2**-24
# words of the state of a Mersenne Twister
_WORDS = 624


class _UnitCalls:
    """The units that a forward calls, and whether random states move between them."""

    def __init__(self) -> None:
        self.names = set[str]()
        self.draws_between = False
        self._states = rng.RandomStates(rng.everywhere())
        # see `trimmers_of`
        self._trimmers = list[Callable[[], None]]()

    def visit(self, name: str, role: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a unit in its role: a role."""
        if not torch.is_grad_enabled():
            return role(forward, args, kwargs)
        self.look()
        self.names.add(name)
        self._trimmers += trimmers_of(args, kwargs)
        output = role(forward, args, kwargs)
        self._states = rng.RandomStates(rng.everywhere())
        return output

    def trim(self) -> None:
        """Remove the items that units added to containers among their arguments."""
        for trim in self._trimmers:
            trim()

    def look(self) -> None:
        """Compare the random states with those behind the unit before."""
        self.draws_between |= self._states.have_moved()


class _Draw(NamedTuple):
    """A way to draw random numbers in all steps."""

    step: Step
    # surrounds the steps
    context: AbstractContextManager[Any]


@contextmanager
def running_all(step: Step, names: Sequence[str]) -> Iterator[Step]:
    """Yield a step that runs every unit which any step is seen to run; names: of the units.

    Raises:
        ValueError: the model skips units at random, and no step runs them all.
    """
    first = _calls_of(step, names)
    draw = _Draw(step, nullcontext())
    if len(first.names) < len(names):
        # a generator of the model's own is seen by its decisions
        others = (_calls_of(step, names).names != first.names for _ in range(_LOOKS))
        if first.draws_between or any(others):
            draw = _fullest(step, names, first.names)
    with draw.context:
        yield draw.step


def _calls_of(step: Step, names: Sequence[str]) -> _UnitCalls:
    """Run a forward with each unit in a checkpoint."""
    step, _ = step.fresh()
    calls = _UnitCalls()
    roles = {
        step.model.get_submodule(name): partial(calls.visit, name, *segmented()) for name in names
    }
    with assigned(roles):
        step.model(*step.args, **step.kwargs)
    calls.look()
    calls.trim()
    return calls


def _fullest(step: Step, names: Sequence[str], first: set[str]) -> _Draw:
    """Return the draw with a step that runs all units of the steps of all draws."""
    draws = [_Draw(step, nullcontext())]
    draws += [_Draw(step._replace(reseed=partial(_seed, i)), nullcontext()) for i in range(_DRAWS)]
    draws += [_extreme(step, number) for number in (_HIGHEST, 0.0)]
    called = [first]
    for draw in draws[1:]:
        with draw.context:
            called.append(_calls_of(draw.step, names).names)
    everything = set[str]().union(*called)
    for draw, units in zip(draws, called, strict=True):
        if units == everything and _runs_again(draw, names, everything):
            return draw
    some = sorted(everything - set[str]().intersection(*called))
    raise ValueError(
        f"plan: {type(step.model).__name__} skips units at random ({', '.join(some[:3])}, "
        f"{len(some)} in all), and none of {len(draws)} steps ran all of them: set the rate to "
        "0 for plan, and apply the plan to the model with its own rate"
    )


def _runs_again(draw: _Draw, names: Sequence[str], units: set[str]) -> bool:
    """Whether a step of a draw runs these units once more."""
    with draw.context:
        return _calls_of(draw.step, names).names == units


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _extreme(step: Step, number: float) -> _Draw:
    """Return a draw in which numbers between 0 and 1 that may decide are all this number."""
    word = 0 if number == 0.0 else _untempered(0xFFFFFFFF)

    def reseed(before: Callable[[], None]) -> None:
        before()
        random.setstate((3, (*[word] * _WORDS, 0), None))
        words = np.full(_WORDS, word, dtype=np.uint32)
        np.random.set_state(("MT19937", words, 0, 0, 0.0))

    before = step.reseed or rng.RandomStates(rng.everywhere()).restore
    return _Draw(step._replace(reseed=partial(reseed, before)), _Constant(number))


def _untempered(output: int) -> int:
    """Return the word of a Mersenne Twister's state that it puts out as `output`."""
    word = output ^ (output >> 18)
    word ^= (word << 15) & 0xEFC60000
    shifted = word
    for _ in range(4):
        shifted = word ^ ((shifted << 7) & 0x9D2C5680)
    word = shifted
    for _ in range(2):
        shifted = word ^ (shifted >> 11)
    return shifted & 0xFFFFFFFF


class _Constant(TorchFunctionMode):
    """While it is active, torch draws single numbers, and rows of them, that are all the same."""

    def __init__(self, number: float):
        super().__init__()
        self._number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; replace the numbers that it draws."""
        made = func(*args, **(kwargs or {}))
        is_row = isinstance(made, Tensor) and made.dim() < 2 and made.is_floating_point()
        if is_row and func in (torch.rand, torch.Tensor.uniform_):
            return made.fill_(self._number)
        if is_row and func in (torch.bernoulli, torch.Tensor.bernoulli_):
            # one where a number is below the rate
            return made.fill_(float(self._number == 0.0))
        return made
