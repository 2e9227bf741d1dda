"""The changes between the results of two files, case by case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from bench.env import origin
from bench.results import Row, Rows, is_timed, key_of, quantiles, ratios, title
from bench.tables import Columns, show, significant

# rounds on either side; p20 and p80 of fewer say nothing of noise
FEWEST_ROUNDS = 5
TIMES = ("forward_ms", "backward_ms", "both_ms")
# counted, not sampled: any change is one
SIZES = ("saved_bytes", "peak_bytes", "backward_peak_bytes", "fits", "depth")
COLUMNS: Columns = {"implementation": itemgetter("name")}
COLUMNS |= {name: itemgetter(name) for name in ("what", "before", "after", "change", "")}


def _change(name: str, what: str, before: float, after: float) -> Row:
    values = {"before": significant(before), "after": significant(after)}
    share = f"{after / before - 1:+.1%}" if before else ""
    # more tokens or layers that fit are better
    is_worse = (after > before) != (what in ("fits", "depth"))
    return {"name": name, "what": what, **values, "change": share, "": "worse" if is_worse else ""}


def _words(name: str, what: str, before: object, after: object) -> Row:
    is_worse = what == "failure" and after is not None
    values = {"before": str(before or "-"), "after": str(after or "-"), "change": ""}
    return {"name": name, "what": what, **values, "": "worse" if is_worse else ""}


def _moved(a: Sequence[float], b: Sequence[float], threshold: float) -> bool:
    """Whether the medians differ by more than the threshold, and more than their noise."""
    if min(len(a), len(b)) < FEWEST_ROUNDS:
        return False
    low, middle, high = quantiles(a)
    other_low, other_middle, other_high = quantiles(b)
    overlap = low <= other_high and other_low <= high
    return not overlap and abs(other_middle / middle - 1) > threshold


def changes(before: Rows, after: Rows, threshold: float) -> Iterator[Row]:
    """Yield the differences between the rows of a case, except the times of the first row."""
    earlier, later = ({row["name"]: row for row in rows} for rows in (before, after))
    for name in [*later, *(name for name in earlier if name not in later)]:
        old = earlier.get(name)
        new = later.get(name)
        if old is None or new is None:
            yield _words(name, "implementation", old and "present", new and "new")
        elif old["failure"] or new["failure"]:
            if old["failure"] != new["failure"]:
                yield _words(name, "failure", old["failure"], new["failure"])
        else:
            yield from _numbers(name, (old, new), (before[0], after[0]), threshold)


def _numbers(
    name: str, pair: Sequence[Row], firsts: Sequence[Row], threshold: float
) -> Iterator[Row]:
    """Yield the differences between two rows that were measured."""
    for what in TIMES:
        # those of the first row are all 1
        before, after = (
            ratios(row.get(what) or (), first.get(what) or ())
            for row, first in zip(pair, firsts, strict=True)
        )
        if _moved(before, after, threshold):
            words = f"{what.removesuffix('_ms')} of {firsts[0]['name']}"
            yield _change(name, words, median(before), median(after))
    for what in SIZES:
        first, second = (row.get(what) for row in pair)
        if first is not None and second is not None and first != second:
            words = what.replace("_", " ").replace("backward peak", "backward")
            yield _change(name, words, first, second)


def _notes(earlier: dict[Any, Rows], later: dict[Any, Rows], threshold: float) -> Iterator[str]:
    """Yield notes beside the tables: too few rounds, the first row's own times, other cases."""
    pairs = [(earlier[key], rows) for key, rows in later.items() if key in earlier]

    def is_short(rows: Rows) -> bool:
        return any(len(row["both_ms"]) < FEWEST_ROUNDS for row in rows if is_timed(row))

    if short := [after[0] for before, after in pairs if is_short([*before, *after])]:
        names = ", ".join(map(title, short))
        yield f"times of fewer than {FEWEST_ROUNDS} rounds are not compared: {names}"
    for before, after in pairs:
        for what in TIMES:
            old = before[0].get(what) or ()
            new = after[0].get(what) or ()
            if _moved(old, new, threshold):
                change = _change("", what, median(old), median(new))
                step = f"{change['before']} -> {change['after']} ({change['change']})"
                name = before[0]["name"]
                yield f"{name} itself moved, {what.replace('_', ' ')} {step}: {_label(after)}"
    for name, mine, others in (("before", earlier, later), ("after", later, earlier)):
        yield from (f"only {name}: {_label(mine[key])}" for key in mine if key not in others)


def _label(rows: Rows) -> str:
    return f"{title(rows[0])}, on {rows[0]['device']}"


def print_changes(before: Sequence[Rows], after: Sequence[Rows], threshold: float) -> None:
    """Print the changes, and the sources of both."""
    earlier, later = ({key_of(rows[0]): rows for rows in cases} for cases in (before, after))
    for name, cases in (("before", before), ("after", after)):
        for line in dict.fromkeys(origin(rows[0]) for rows in cases):
            print(f"{name}: {line}")
    count = 0
    has_changed = False
    for key, rows in later.items():
        if key in earlier:
            count += 1
            if differences := list(changes(earlier[key], rows, threshold)):
                has_changed = True
                show(_label(rows), COLUMNS, differences, words=2)
    if not has_changed:
        print(f"no change in {count} cases")
    for line in _notes(earlier, later, threshold):
        print(line)
