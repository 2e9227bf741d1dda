"""Which modules a call of fuse means, by name and kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Names = str | Sequence[str] | None


@dataclass(frozen=True)
class Wanted:
    """What a call of fuse is to swap."""

    only: Sequence[str] | None
    skip: Sequence[str] | None
    norm: bool
    mlp: bool
    linear: bool

    def has(self, name: str, kind: str) -> bool:
        """Whether a module of this name and kind is meant."""
        if self.only is not None and not any(fnmatchcase(name, p) for p in self.only):
            return False
        return getattr(self, kind) and not any(fnmatchcase(name, p) for p in self.skip or ())


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
