"""`python -m bench compare A B`: what changed from one results file to another.

Times are compared as ratios to eager's within a round, where load that comes and goes cancels.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.results import Row, groups, is_capacity, key_of, quantiles, ratios, read, title
from bench.table import source
from bench.tables import Columns, show, significant

# rounds on either side; p20 and p80 of fewer say nothing of noise
LEAST = 5
TIMES = ("forward", "backward", "both")
# counted, not sampled: any change is one
SIZES = ("saved", "peak", "backward_peak")

Rows = Sequence[Row]


class Change(NamedTuple):
    """One number of one implementation, before and after; None: not there."""

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

    @property
    def step(self) -> tuple[str, str]:
        """Both numbers in words."""
        before, after = (
            significant(x) if isinstance(x, float) else str(x or "-")
            for x in (self.before, self.after)
        )
        return before, after


COLUMNS: Columns = {
    "implementation": lambda change: change.name,
    "what": lambda change: change.what,
    "before": lambda change: change.step[0],
    "after": lambda change: change.step[1],
    "change": lambda change: change.share,
    "": lambda change: "worse" if change.is_worse else "",
}


class Compared(NamedTuple):
    """Two files' cases, and by what share medians must differ."""

    before: list[list[Row]]
    after: list[list[Row]]
    threshold: float

    @property
    def pairs(self) -> list[tuple[Rows, Rows]]:
        """What is in both files: same case, sizes, dtype and device."""
        earlier = {key_of(rows[0]): rows for rows in self.before}
        shared = (rows for rows in self.after if key_of(rows[0]) in earlier)
        return [(earlier[key_of(rows[0])], rows) for rows in shared]


def prepare(chosen: Namespace) -> Compared:
    """Read both. Raises as `read` does, and ValueError if they have no case in common."""
    before, after = (
        groups(row for row in read(path) if not is_capacity(row))
        for path in (chosen.before, chosen.after)
    )
    found = Compared(before, after, chosen.threshold)
    if not found.pairs:
        text = "have no case in common on the same device"
        raise ValueError(f"{chosen.before} and {chosen.after} {text}")
    return found


def _of_eager(rows: Rows, row: Row, what: str) -> list[float]:
    mine, eagers = row[f"{what}_ms"], rows[0][f"{what}_ms"]
    return ratios(mine, eagers) if mine and eagers else []


def _moved(a: Sequence[float], b: Sequence[float], threshold: float) -> tuple[float, ...] | None:
    """Return both medians if they differ by more than the threshold, and more than their noise."""
    if min(len(a), len(b)) < LEAST:
        return None
    (low, one, high), (other_low, other, other_high) = quantiles(a), quantiles(b)
    overlap = low <= other_high and other_low <= high
    return None if overlap or abs(other / one - 1) <= threshold else (one, other)


def _row_changes(before: Rows, after: Rows, a: Row, b: Row, threshold: float) -> Iterator[Change]:
    if a["failure"] or b["failure"]:
        if a["failure"] != b["failure"]:
            yield Change(b["name"], "failure", a["failure"], b["failure"])
        return
    # eager's are all 1
    for what in TIMES:
        pair = _of_eager(before, a, what), _of_eager(after, b, what)
        if medians := _moved(*pair, threshold):
            yield Change(b["name"], f"{what} of eager", *medians)
    for what in SIZES:
        one, other = a[f"{what}_bytes"], b[f"{what}_bytes"]
        if one != other and one is not None and other is not None:
            words = f"{what.removesuffix('_peak')} bytes"
            yield Change(b["name"], words, float(one), float(other))


def changes(before: Rows, after: Rows, threshold: float) -> Iterator[Change]:
    """Yield what differs between the rows of a case, but for the times of eager."""
    earlier = {row["name"]: row for row in before}
    for row in after:
        if row["name"] in earlier:
            yield from _row_changes(before, after, earlier.pop(row["name"]), row, threshold)
        else:
            yield Change(row["name"], "implementation", None, "new")
    for name in earlier:
        yield Change(name, "implementation", "there", None)


def eager_changes(before: Rows, after: Rows, threshold: float) -> Iterator[Change]:
    """Yield which times of eager differ, in ms."""
    for what in TIMES:
        pair = before[0][f"{what}_ms"], after[0][f"{what}_ms"]
        if all(pair) and (medians := _moved(*pair, threshold)):
            yield Change(before[0]["name"], f"{what} ms", *medians)


def _label(rows: Rows) -> str:
    return f"{title(rows[0])}, on {rows[0]['device']}"


def is_short(rows: Rows) -> bool:
    """Whether a case has too few rounds for its times to be compared."""
    return any(len(row["both_ms"]) < LEAST for row in rows if row["both_ms"])


def _notes(chosen: Compared) -> Iterator[str]:
    """Yield what the tables do not hold: too few rounds, eager's own times, cases of one file."""
    short = [b[0] for a, b in chosen.pairs if is_short([*a, *b])]
    if short:
        names = ", ".join(f"{row['case']} {row['size']} {row['tokens']}" for row in short)
        yield f"times of fewer than {LEAST} rounds are not compared: {names}"
    for before, after in chosen.pairs:
        for change in eager_changes(before, after, chosen.threshold):
            moved = f"{change.what} {' -> '.join(change.step)} ({change.share})"
            yield f"eager itself moved, {moved}: {_label(after)}"
    sides = ("before", chosen.before, chosen.after), ("after", chosen.after, chosen.before)
    for name, found, others in sides:
        there = {key_of(rows[0]) for rows in others}
        for rows in found:
            if key_of(rows[0]) not in there:
                yield f"only {name}: {_label(rows)}"


def run(chosen: Compared) -> int:
    """Print what changed, and where both come from."""
    for name, found in (("before", chosen.before), ("after", chosen.after)):
        for line in dict.fromkeys(map(source, found)):
            print(f"{name}: {line}")
    has_changed = False
    for before, after in chosen.pairs:
        if found := list(changes(before, after, chosen.threshold)):
            has_changed = True
            show(_label(after), COLUMNS, found, words=2)
    if not has_changed:
        print(f"no change in {len(chosen.pairs)} cases")
    for line in _notes(chosen):
        print(line)
    return 0
