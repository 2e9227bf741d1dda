"""One call of `fuse`: the modules that it asks for, and the swaps that it has found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fusedckpt.fusing.fuse_report import FuseReport
from fusedckpt.fusing.swap import Swap

Names = str | Sequence[str] | None


@dataclass
class Search:
    """The modules that a call of `fuse` asks for, and the swaps found so far."""

    # all modules of the model, by name
    modules: Mapping[str, nn.Module]
    # the level of blocks with an activation
    save: str
    # patterns of the names that are asked for, None for all
    only: Sequence[str] | None
    # patterns of the names that are left, None for none
    skip: Sequence[str] | None
    # whether modules of each kind are swapped
    kinds: Mapping[str, bool]
    # how inputs are kept, None for as they are
    store: str | None = None
    # the result of the call
    report: FuseReport = field(default_factory=FuseReport)
    # the changes to make, in the order in which they were found
    swaps: list[tuple[nn.Module, Swap]] = field(default_factory=list)
    # modules that a swapped module computes itself
    inside: set[nn.Module] = field(default_factory=set)

    def has(self, name: str, kind: str) -> bool:
        """Whether a module of this name and kind is asked for."""
        is_named = self.only is None or _matches(name, self.only)
        return is_named and self.kinds[kind] and not _matches(name, self.skip)

    def may_share(self, name: str) -> bool:
        """Whether a layer of this name may save a recipe of its input."""
        parts = name.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        return self.has(name, "linear") and not any(_matches(outer, self.skip) for outer in above)

    def check(self) -> None:
        """Refuse a pattern of `only` that matches no module that was found or skipped."""
        # modules of a kind that is not swapped are not looked for
        if not all(on for kind, on in self.kinds.items() if kind != "head"):
            return
        known = {*self.report.kinds, *(name for name in self.modules if _matches(name, self.skip))}
        for pattern in self.only or ():
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ValueError(
                    f"fuse: only={pattern!r} matches no norm, MLP, attention, experts or linear "
                    "with an activation, by the names of named_modules()"
                )


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns or ())


def patterns(name: str, value: Any) -> Sequence[str] | None:
    """Return names or patterns as a sequence, None for none given."""
    if value is None:
        return None
    names_or_patterns = list(value) if isinstance(value, (list, tuple, set)) else [value]
    for pattern in names_or_patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"fuse: {name} must be names or patterns, got {type(pattern).__name__}")
    return names_or_patterns
