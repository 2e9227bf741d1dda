"""`python -m bench compare A B`: what changed from one results file to another.

Times are compared as ratios to eager's within a round, where load that comes and goes cancels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from bench.results import Group, Row, Timing, read
from bench.table import source
from bench.text import console, significant

__all__ = ["Change", "Settings", "changes", "eager_changes", "is_short", "run", "settings"]

# rounds on either side; p20 and p80 of fewer say nothing of noise
LEAST = 5

Pair = tuple[Group, Group]


@dataclass(frozen=True)
class Settings:
    """Two files' groups, and by what share medians must differ."""

    before: tuple[Group, ...]
    after: tuple[Group, ...]
    threshold: float

    @property
    def pairs(self) -> list[Pair]:
        """What is in both files: same case, sizes, dtype and device."""
        earlier = {group.key: group for group in self.before}
        return [(earlier[group.key], group) for group in self.after if group.key in earlier]


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

    @property
    def share(self) -> str:
        """By how much a number grew."""
        if isinstance(self.before, float) and isinstance(self.after, float) and self.before:
            return f"{self.after / self.before - 1:+.1%}"
        return ""


def settings(before: Path, after: Path, threshold: float) -> Settings:
    """Read both. Raises as `read` does, and ValueError if they have no case in common."""
    chosen = Settings(tuple(read(before)), tuple(read(after)), threshold)
    if not chosen.pairs:
        raise ValueError(f"{before} and {after} have no case in common on the same device")
    return chosen


def _label(group: Group) -> str:
    return f"{group.title}, on {group.device}"


def _times(row: Row) -> list[tuple[str, Timing | None]]:
    return [("forward", row.forward_ms), ("backward", row.backward_ms), ("both", row.both_ms)]


def _of_eager(row: Row, group: Group) -> list[tuple[str, Timing | None]]:
    pairs = zip(_times(row), _times(group.rows[0]), strict=True)
    return [
        (f"{what} of eager", mine.over(eagers) if mine and eagers else None)
        for (what, mine), (_, eagers) in pairs
    ]


def _is_apart(a: Timing, b: Timing, threshold: float) -> bool:
    """Whether two times differ by more than the threshold, and by more than their noise."""
    overlap = a.p20 <= b.p80 and b.p20 <= a.p80
    enough = min(len(a.samples), len(b.samples)) >= LEAST
    return enough and not overlap and abs(b.median / a.median - 1) > threshold


def _row_changes(pair: Pair, a: Row, b: Row, threshold: float) -> Iterator[Change]:
    case = _label(pair[1])
    if a.failure or b.failure:
        if a.failure != b.failure:
            yield Change(case, a.name, "failure", a.failure, b.failure)
        return
    # eager's are all 1
    for (what, one), (_, other) in zip(_of_eager(a, pair[0]), _of_eager(b, pair[1]), strict=True):
        if one and other and _is_apart(one, other, threshold):
            yield Change(case, a.name, what, one.median, other.median)
    for what, one, other in (
        ("saved bytes", a.saved_bytes, b.saved_bytes),
        ("peak bytes", a.peak_bytes, b.peak_bytes),
        ("backward bytes", a.backward_peak_bytes, b.backward_peak_bytes),
    ):
        # counted, not sampled: any change is one
        if one != other and one is not None and other is not None:
            yield Change(case, a.name, what, float(one), float(other))


def changes(pair: Pair, threshold: float) -> Iterator[Change]:
    """Yield what differs between two groups, but for the times of eager."""
    rows = {row.name: row for row in pair[0].rows}
    for row in pair[1].rows:
        if row.name in rows:
            yield from _row_changes(pair, rows.pop(row.name), row, threshold)
        else:
            yield Change(_label(pair[1]), row.name, "implementation", None, "new")
    for name in rows:
        yield Change(_label(pair[1]), name, "implementation", "there", None)


def eager_changes(pair: Pair, threshold: float) -> Iterator[Change]:
    """Yield which times of eager differ, in ms."""
    a, b = (group.rows[0] for group in pair)
    for (what, one), (_, other) in zip(_times(a), _times(b), strict=True):
        if one and other and _is_apart(one, other, threshold):
            yield Change(_label(pair[1]), a.name, f"{what} ms", one.median, other.median)


def is_short(pair: Pair) -> bool:
    """Whether a group has too few rounds for its times to be compared."""
    times = [row.both_ms for group in pair for row in group.rows if row.both_ms]
    return any(len(time.samples) < LEAST for time in times)


def _text(value: float | str | None) -> str:
    return significant(value) if isinstance(value, float) else str(value or "-")


def _table(found: list[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=found[0].case)
    table.title_style, table.title_justify = "bold", "left"
    for head in ("implementation", "what", "before", "after", "change"):
        table.add_column(head, justify="right" if head in ("before", "after", "change") else "left")
    for change in found:
        values = (_text(change.before), _text(change.after), change.share)
        style = "red" if change.is_worse else "green"
        table.add_row(change.name, change.what, *values, style=style)
    return table


def _notes(chosen: Settings) -> Iterator[str]:
    """Yield what the tables do not hold: too few rounds, eager's own times, cases of one file."""
    if short := [f"{b.case} {b.size} {b.tokens}" for a, b in chosen.pairs if is_short((a, b))]:
        yield f"times of fewer than {LEAST} rounds are not compared: {', '.join(short)}"
    for pair in chosen.pairs:
        for change in eager_changes(pair, chosen.threshold):
            step = f"{change.what} {_text(change.before)} -> {_text(change.after)}"
            yield f"eager itself moved, {step} ({change.share}): {change.case}"
    sides = ("before", chosen.before, chosen.after), ("after", chosen.after, chosen.before)
    for name, groups, others in sides:
        there = {group.key for group in others}
        yield from (f"only {name}: {_label(one)}" for one in groups if one.key not in there)


def run(chosen: Settings) -> int:
    """Print what changed, and where both come from."""
    out = console()
    for name, groups in (("before", chosen.before), ("after", chosen.after)):
        for line in dict.fromkeys(map(source, groups)):
            out.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)
    found = [list(changes(pair, chosen.threshold)) for pair in chosen.pairs]
    for some in filter(None, found):
        out.print(_table(some))
    notes = list(_notes(chosen))
    if not any(found):
        notes.insert(0, f"no change in {len(found)} cases")
    for line in notes:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
