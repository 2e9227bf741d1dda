"""Show the changes between two results files of `bench run`.

Times are compared as ratios to eager's within a round, where load that comes and goes cancels.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median

from bench.options import FRACTION, Options
from bench.results import Row, groups, is_capacity, key_of, quantiles, ratios, read, title
from bench.table import source
from bench.tables import Columns, show, significant

# rounds on either side; p20 and p80 of fewer say nothing of noise
LEAST = 5
TIMES = ("forward_ms", "backward_ms", "both_ms")
# counted, not sampled: any change is one
SIZES = ("saved_bytes", "peak_bytes", "backward_peak_bytes")
Rows = Sequence[Row]
COLUMNS: Columns = {"implementation": itemgetter("name")}
COLUMNS |= {name: itemgetter(name) for name in ("what", "before", "after", "change", "")}


def options(add: Options) -> None:
    """Add the options."""
    for name, text in (("before", "results of bench run"), ("after", "later ones")):
        add.add_argument(name, help=text, type=Path, metavar="AB"[name == "after"])
    text = "ignore times that differ by less than this fraction"
    add.one("threshold", text, 0.05, type=FRACTION, metavar="X")


def prepare(chosen: Namespace) -> Namespace:
    """Read both. Raises as `read` does, and ValueError if they have no case in common."""
    chosen.earlier, chosen.later = (
        {key_of(rows[0]): rows for rows in groups(r for r in read(path) if not is_capacity(r))}
        for path in (chosen.before, chosen.after)
    )
    if not chosen.earlier.keys() & chosen.later.keys():
        text = "have no case in common on the same device"
        raise ValueError(f"{chosen.before} and {chosen.after} {text}")
    return chosen


def _change(name: str, what: str, before: float, after: float) -> Row:
    values = {"before": significant(before), "after": significant(after)}
    share = f"{after / before - 1:+.1%}" if before else ""
    worse = "worse" if after > before else ""
    return {"name": name, "what": what, **values, "change": share, "": worse}


def _words(name: str, what: str, before: object, after: object) -> Row:
    is_worse = what == "failure" and after is not None
    values = {"before": str(before or "-"), "after": str(after or "-"), "change": ""}
    return {"name": name, "what": what, **values, "": "worse" if is_worse else ""}


def _moved(a: Sequence[float], b: Sequence[float], threshold: float) -> bool:
    """Whether the medians differ by more than the threshold, and more than their noise."""
    if min(len(a), len(b)) < LEAST:
        return False
    (low, one, high), (other_low, other, other_high) = quantiles(a), quantiles(b)
    overlap = low <= other_high and other_low <= high
    return not overlap and abs(other / one - 1) > threshold


def changes(before: Rows, after: Rows, threshold: float) -> Iterator[Row]:
    """Yield the differences between the rows of a case, except the times of eager."""
    earlier, later = ({row["name"]: row for row in rows} for rows in (before, after))
    for name in [*later, *(name for name in earlier if name not in later)]:
        a, b = earlier.get(name), later.get(name)
        if a is None or b is None:
            yield _words(name, "implementation", a and "present", b and "new")
        elif a["failure"] or b["failure"]:
            if a["failure"] != b["failure"]:
                yield _words(name, "failure", a["failure"], b["failure"])
        else:
            for what in TIMES:
                eagers = before[0][what], after[0][what]
                # eager's are all 1
                one, other = ratios(a[what], eagers[0] or ()), ratios(b[what], eagers[1] or ())
                if _moved(one, other, threshold):
                    words = f"{what.removesuffix('_ms')} of eager"
                    yield _change(name, words, median(one), median(other))
            for what in SIZES:
                if None not in (a[what], b[what]) and a[what] != b[what]:
                    words = what.replace("_", " ").replace("backward peak", "backward")
                    yield _change(name, words, a[what], b[what])


def notes(chosen: Namespace, pairs: Sequence[tuple[Rows, Rows]]) -> Iterator[str]:
    """Yield notes beside the tables: too few rounds, eager's own times, cases of one file."""

    def is_short(rows: Rows) -> bool:
        return any(len(row["both_ms"]) < LEAST for row in rows if row["both_ms"])

    if short := [b[0] for a, b in pairs if is_short([*a, *b])]:
        names = ", ".join(f"{row['case']} {row['size']} {row['tokens']}" for row in short)
        yield f"times of fewer than {LEAST} rounds are not compared: {names}"
    for before, after in pairs:
        for what in TIMES:
            a, b = before[0][what] or (), after[0][what] or ()
            if _moved(a, b, chosen.threshold):
                one = _change("eager", what, median(a), median(b))
                step = f"{one['before']} -> {one['after']} ({one['change']})"
                yield f"eager itself moved, {what.replace('_', ' ')} {step}: {_label(after)}"
    for name, mine, other in (
        ("before", chosen.earlier, chosen.later),
        ("after", chosen.later, chosen.earlier),
    ):
        yield from (f"only {name}: {_label(mine[key])}" for key in mine if key not in other)


def _label(rows: Rows) -> str:
    return f"{title(rows[0])}, on {rows[0]['device']}"


def run(chosen: Namespace) -> int:
    """Print the changes, and the sources of both files."""
    for name, found in (("before", chosen.earlier), ("after", chosen.later)):
        for line in dict.fromkeys(map(source, found.values())):
            print(f"{name}: {line}")
    has_changed = False
    pairs = [(chosen.earlier[k], rows) for k, rows in chosen.later.items() if k in chosen.earlier]
    for before, after in pairs:
        if found := list(changes(before, after, chosen.threshold)):
            has_changed = True
            show(_label(after), COLUMNS, found, words=2)
    if not has_changed:
        print(f"no change in {len(pairs)} cases")
    for line in notes(chosen, pairs):
        print(line)
    return 0
