"""`python -m bench compare A B`: what changed from one results file to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from bench.results import Group, Row, Timing, read
from bench.table import source
from bench.text import console, significant

__all__ = ["Change", "Settings", "changes", "run", "settings"]


@dataclass(frozen=True)
class Settings:
    """Two files' groups, and which changes are worth a line."""

    before: tuple[Group, ...]
    after: tuple[Group, ...]
    threshold: float


@dataclass(frozen=True)
class Change:
    """One number of one implementation, before and after; None: not there."""

    case: str
    name: str
    what: str
    before: float | str | None
    after: float | str | None

    @property
    def is_worse(self) -> bool:
        """More time, more memory, or a failure."""
        if isinstance(self.before, float) and isinstance(self.after, float):
            return self.after > self.before
        return self.what == "failure" and self.after is not None


def settings(before: Path, after: Path, threshold: float) -> Settings:
    """Read both. Raises as `read` does, and ValueError if they have no case in common."""
    first, second = read(before), read(after)
    if not {group.key for group in first} & {group.key for group in second}:
        raise ValueError(f"{before} and {after} have no case in common")
    return Settings(tuple(first), tuple(second), threshold)


def _apart(a: Timing, b: Timing, threshold: float) -> bool:
    """Whether two times differ by more than the threshold, and by more than their noise."""
    overlap = a.p20 <= b.p80 and b.p20 <= a.p80
    return not overlap and abs(b.median / a.median - 1) > threshold


def _row_changes(case: str, a: Row, b: Row, threshold: float) -> Iterator[Change]:
    if a.failure or b.failure:
        if a.failure != b.failure:
            yield Change(case, a.name, "failure", a.failure, b.failure)
        return
    for what, one, other in (
        ("forward ms", a.forward_ms, b.forward_ms),
        ("backward ms", a.backward_ms, b.backward_ms),
        ("both ms", a.both_ms, b.both_ms),
    ):
        if one and other and _apart(one, other, threshold):
            yield Change(case, a.name, what, one.median, other.median)
    for what, one, other in (
        ("saved bytes", a.saved_bytes, b.saved_bytes),
        ("peak bytes", a.peak_bytes, b.peak_bytes),
        ("backward bytes", a.backward_peak_bytes, b.backward_peak_bytes),
    ):
        # counted, not sampled: any change is one
        if one != other and one is not None and other is not None:
            yield Change(case, a.name, what, float(one), float(other))


def changes(
    before: tuple[Group, ...], after: tuple[Group, ...], threshold: float
) -> Iterator[Change]:
    """Yield what differs between groups of the same case, size, tokens and dtype."""
    earlier = {group.key: group for group in before}
    for group in after:
        if group.key not in earlier:
            continue
        case = f"{group.case} {group.size} {group.tokens}"
        rows = {row.name: row for row in earlier[group.key].rows}
        for row in group.rows:
            if row.name in rows:
                yield from _row_changes(case, rows.pop(row.name), row, threshold)
            else:
                yield Change(case, row.name, "implementation", None, "new")
        for name in rows:
            yield Change(case, name, "implementation", "there", None)


def _text(value: float | str | None) -> str:
    return significant(value) if isinstance(value, float) else str(value or "-")


def run(chosen: Settings) -> int:
    """Print what changed, and where both come from."""
    out = console()
    for name, groups in (("before", chosen.before), ("after", chosen.after)):
        for line in dict.fromkeys(map(source, groups)):
            out.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)
    devices = {(group.environment or {}).get("device") for group in chosen.before + chosen.after}
    if len(devices) > 1:
        out.print("these are different devices: times say nothing of the code")
    found = list(changes(chosen.before, chosen.after, chosen.threshold))
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("case", "implementation", "what", "before", "after", "change"):
        table.add_column(head, justify="right" if head in ("before", "after", "change") else "left")
    for change in found:
        ratio = ""
        if isinstance(change.before, float) and isinstance(change.after, float) and change.before:
            ratio = f"{change.after / change.before - 1:+.1%}"
        style = "red" if change.is_worse else "green"
        values = (_text(change.before), _text(change.after), ratio)
        table.add_row(change.case, change.name, change.what, *values, style=style)
    common = len({g.key for g in chosen.before} & {g.key for g in chosen.after})
    out.print(table if found else f"no change in {common} cases")
    return 0
