"""Which modules a call of fuse means, by name and kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

Names = str | Sequence[str] | None


@dataclass(frozen=True)
class Wanted:
    """The modules that a call of fuse is to swap, by name and kind."""

    only: Sequence[str] | None
    skip: Sequence[str] | None
    # whether each kind is swapped
    kinds: Mapping[str, bool]

    def has(self, name: str, kind: str) -> bool:
        """Whether a module of this name and kind is meant."""
        if self.only is not None and not any(fnmatchcase(name, p) for p in self.only):
            return False
        return self.kinds[kind] and not any(fnmatchcase(name, p) for p in self.skip or ())

    def may_share(self, name: str) -> bool:
        """Whether a layer of this name may save a recipe of its input."""
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(1, len(parts))]
        is_inside = any(fnmatchcase(one, p) for one in above for p in self.skip or ())
        return self.has(name, "linear") and not is_inside

    def check(self, modules: Mapping[str, nn.Module], named: Iterable[str]) -> None:
        """Refuse a pattern of `only` that matches no module that the report has named."""
        # a kind that is not swapped is not named
        if not all(on for kind, on in self.kinds.items() if kind != "head"):
            return
        for pattern in self.only or ():
            if any(fnmatchcase(name, pattern) for name in named):
                continue
            found = [name for name in modules if fnmatchcase(name, pattern)]
            left = [
                name for name in found if not any(fnmatchcase(name, p) for p in self.skip or ())
            ]
            if found and not left:
                continue
            raise ValueError(f"fuse: only={pattern!r} matches {_what(pattern, left, modules)}")


def _what(pattern: str, found: list[str], modules: Mapping[str, nn.Module]) -> str:
    if not found:
        near = get_close_matches(pattern, [name for name in modules if name], 1, 0.0)
        names = f": names are those of named_modules(), such as {near[0]!r}" if near else ""
        return f"no module{names}"
    name = found[0]
    inside = f"; {name + '.*'!r} means what is in it" if any(modules[name].children()) else ""
    return (
        f"{name or 'the model'}, a {type(modules[name]).__name__}, and no norm, MLP, attention, "
        f"experts or linear with an activation{inside}"
    )


def patterns(name: str, given: Any) -> Sequence[str] | None:
    """Return names or patterns as a sequence, None for none given."""
    found = [given] if isinstance(given, str) else given
    if found is None:
        return None
    found = list(found) if isinstance(found, (list, tuple, set)) else [found]
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"fuse: {name} must be names or patterns, got {type(pattern).__name__}")
    return found
