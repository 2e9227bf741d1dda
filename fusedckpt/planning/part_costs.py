"""What it costs to run parts of a unit again, each on its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.planning import roles
from fusedckpt.planning.calls import Bytes, Call, NoGraph, Run
from fusedckpt.planning.ways import Times, timed

__all__ = ["BUT", "Parts"]

# between the name of a level and those of parts that run again
BUT = " but "
# what running a part again saves at least of what the unit keeps
_WORTH = 0.02
_PLAIN, _AGAIN = "plain", "again"


class Parts:
    """Levels at which parts of a unit run again, each on its own, the rest as at another level."""

    def __init__(self, module: nn.Module, call: Call, level: str, run: Run, kind: Any):
        self._module, self._call, self._level, self._run = module, call, level, run
        self._kind = kind

    def levels(self, parts: Sequence[str], kept: int) -> dict[str, tuple[Bytes, float]]:
        """Return the bytes and ms of these levels, with one part more each.

        What costs least for what it saves comes first. kept: bytes that the unit keeps otherwise.
        """
        costs = self._costs(parts, kept)
        found: dict[str, tuple[Bytes, float]] = {}
        ms, chosen = 0.0, ()
        for part in sorted(costs, key=lambda part: costs[part][1] / costs[part][0]):
            chosen, ms = (*chosen, part), ms + costs[part][1]
            taken = self._call.bytes(partial(self._with, chosen))
            if taken.kept < kept:
                found[f"{self._level}{BUT}{', '.join(chosen)}"], kept = (taken, ms), taken.kept
        return found

    def _costs(self, parts: Sequence[str], kept: int) -> dict[str, tuple[int, float]]:
        """Return what running each part again saves in bytes and takes in ms, if it is worth it."""
        calls: dict[str, list[Any]] = {part: [] for part in parts}
        modules = {part: self._module.get_submodule(part) for part in parts}
        with roles.assigned({m: roles.Noting(calls[part]) for part, m in modules.items()}):
            self._call.run(self._run)
        found = {}
        for part, seen in calls.items():
            if len(seen) != 1:
                continue
            try:
                saved = kept - self._call.bytes(partial(self._with, (part,))).kept
                if saved > _WORTH * kept:
                    found[part] = saved, self._ms(part, modules[part], *seen[0])
            except (NoGraph, RuntimeError):
                # it has no graph of its own; what it is given or returns is written into
                continue
        return found

    def _ms(self, name: str, part: nn.Module, forward: Any, args: Any, kwargs: Any) -> float:
        """Return the ms by which one part is slower."""
        call = Call(part, args, kwargs, None)
        level = roles.Keeping(self._level if self._level in LEVELS else None)

        def again(args: Any, kwargs: Any) -> Any:
            return level.call(partial(roles.again().call, forward), (args, kwargs), {})

        runs = {_PLAIN: partial(level.call, forward), _AGAIN: again}
        return Times(timed((self._kind, name), call, runs), {}).slower(_AGAIN, _PLAIN)

    def _with(self, parts: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        given = {self._module.get_submodule(part): roles.again() for part in parts}
        with roles.assigned(given):
            return self._run(args, kwargs)
