"""What fuse did, as a record and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["FuseReport"]

_KINDS = ("norm", "mlp", "linear")


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` did.

    swapped: a module's name -> its change; left: its name -> the reason why it stays; kinds: the
    name of either -> "norm", "mlp" or "linear"; saved: the name of a swapped module -> the bytes
    that one token of training kept before and keeps now, its input among them, measured on meta
    tensors at the module's own widths and dtype; not there for a module that cannot run on those.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    saved: dict[str, tuple[float, float]] = field(default_factory=dict)

    def swap(
        self, name: str, kind: str, change: str, saved: tuple[float, float] | None = None
    ) -> None:
        """Add a module that is swapped."""
        self.swapped[name], self.kinds[name] = change, kind
        if saved is not None:
            self.saved[name] = saved

    def leave(self, name: str, kind: str, reason: str) -> None:
        """Add a module that stays, and say why."""
        self.swapped.pop(name, None)
        self.saved.pop(name, None)
        self.left[name], self.kinds[name] = reason, kind

    def __str__(self) -> str:
        lines = [f"fused {len(self.swapped)} modules, left {len(self.left)}"]
        if self.kinds:
            lines.append("  kind    matched  swapped  left  bytes kept per token")
            lines += [self._row(kind) for kind in _KINDS if kind in self.kinds.values()]
        by_kind = sorted(self.swapped, key=lambda name: _KINDS.index(self.kinds[name]))
        changes = Counter(self.swapped[name] for name in by_kind)
        lines += [f"  {count:4d} x {change}" for change, count in changes.items()]
        reasons = Counter(self.left.values())
        first = {reason: name or "(root)" for name, reason in reversed(self.left.items())}
        for reason, count in reasons.most_common():
            others = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"  left {first[reason]}{others}: {reason}")
        return "\n".join(lines)

    def _row(self, kind: str) -> str:
        names = [name for name, one in self.kinds.items() if one == kind]
        swapped = sum(name in self.swapped for name in names)
        pairs = [self.saved[name] for name in names if name in self.saved]
        before, after = (round(sum(pair[i] for pair in pairs)) for i in (0, 1))
        kept = f"{before:,} -> {after:,}" if pairs else "-"
        counts = f"{len(names):7d}  {swapped:7d}  {len(names) - swapped:4d}"
        return f"  {kind:6s}  {counts}  {kept}"
