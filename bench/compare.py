"""`python -m bench compare A B`: changes from one results file to another.

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


def _written(value: float | str | None) -> str:
    return significant(value) if isinstance(value, float) else str(value or "-")


COLUMNS: Columns = {
    "implementation": lambda change: change.name,
    "what": lambda change: change.what,
    "before": lambda change: _written(change.before),
    "after": lambda change: _written(change.after),
    "change": lambda change: change.share,
    "": lambda change: "worse" if change.is_worse else "",
}


def prepare(chosen: Namespace) -> Namespace:
    """Read both. Raises as `read` does, and ValueError if they have no case in common."""
    earlier, later = (
        {key_of(rows[0]): rows for rows in groups(r for r in read(path) if not is_capacity(r))}
        for path in (chosen.before, chosen.after)
    )
    if not earlier.keys() & later.keys():
        text = "have no case in common on the same device"
        raise ValueError(f"{chosen.before} and {chosen.after} {text}")
    chosen.earlier, chosen.later = earlier, later
    return chosen


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
    """Yield the differences between the rows of a case, except the times of eager."""
    earlier = {row["name"]: row for row in before}
    for row in after:
        if row["name"] in earlier:
            yield from _row_changes(
                before, after, earlier.pop(row["name"]), row, threshold=threshold
            )
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


def is_short(rows: Rows) -> bool:
    """Whether a case has too few rounds for its times to be compared."""
    return any(len(row["both_ms"]) < LEAST for row in rows if row["both_ms"])


def _label(rows: Rows) -> str:
    return f"{title(rows[0])}, on {rows[0]['device']}"


def _notes(chosen: Namespace, pairs: Sequence[tuple[Rows, Rows]]) -> Iterator[str]:
    """Yield notes beside the tables: too few rounds, eager's own times, cases of one file."""
    short = [b[0] for a, b in pairs if is_short([*a, *b])]
    if short:
        names = ", ".join(f"{row['case']} {row['size']} {row['tokens']}" for row in short)
        yield f"times of fewer than {LEAST} rounds are not compared: {names}"
    for before, after in pairs:
        for change in eager_changes(before, after, chosen.threshold):
            step = f"{_written(change.before)} -> {_written(change.after)} ({change.share})"
            yield f"eager itself moved, {change.what} {step}: {_label(after)}"
    for key in [key for key in chosen.earlier if key not in chosen.later]:
        yield f"only before: {_label(chosen.earlier[key])}"
    for key in [key for key in chosen.later if key not in chosen.earlier]:
        yield f"only after: {_label(chosen.later[key])}"


def run(chosen: Namespace) -> int:
    """Print the changes, and the sources of both files."""
    for name, found in (("before", chosen.earlier), ("after", chosen.later)):
        for line in dict.fromkeys(map(source, found.values())):
            print(f"{name}: {line}")
    earlier, has_changed = chosen.earlier, False
    pairs = [(earlier[key], rows) for key, rows in chosen.later.items() if key in earlier]
    for before, after in pairs:
        if found := list(changes(before, after, chosen.threshold)):
            has_changed = True
            show(_label(after), COLUMNS, found, words=2)
    if not has_changed:
        print(f"no change in {len(pairs)} cases")
    for line in _notes(chosen, pairs):
        print(line)
    return 0
