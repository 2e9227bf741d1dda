"""Print the tables of a results file, for a terminal or in Markdown."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.env import origin
from bench.options import Options
from bench.results import Row, groups, is_capacity, least_ms, ratios, read, title
from bench.tables import Columns, mib, show, significant

# of float32: the divisor of an error where eager's own is nothing
EPS = 2**-23


def options(add: Options) -> None:
    """Add the options."""
    add.add_argument("file", help="results of bench run or capacity", type=Path, metavar="FILE")
    add.flag("markdown", "print Markdown")


def prepare(chosen: Namespace) -> Namespace:
    """Read the file. Raises ValueError where there is nothing of ours, OSError as reading does."""
    rows = read(chosen.file)
    if not rows:
        raise ValueError(f"{chosen.file}: nothing was measured")
    # those of `capacity` last
    chosen.found = sorted(groups(rows), key=lambda group: is_capacity(group[0]))
    return chosen


def _ms(row: Row, what: str = "both_ms") -> float | None:
    return None if row[what] is None else median(row[what])


def _of_eager(row: Row, eager: Row) -> str:
    if row["both_ms"] is None or eager["both_ms"] is None:
        return "-"
    return f"{median(ratios(row['both_ms'], eager['both_ms'])):.2f}x"


def _error(row: Row, eager: Row) -> str:
    """Write the error of the result that is worst beside eager's of the same result."""
    pairs = zip(row["errors"], eager["errors"], strict=False)
    worst = max((mine / (eagers or EPS) for mine, eagers in pairs), default=None)
    return "-" if worst is None else f"{worst:.{0 if worst >= 10 else 2}f}x"


def _saved(row: Row) -> str:
    return "-" if row["saved_bytes"] is None else f"{row['saved_bytes'] / row['tokens']:,.0f}"


def _rate(row: Row, what: str, unit: float) -> str:
    """Write the least FLOPs or bytes, or the tokens, over the time: no recomputed FLOPs."""
    ms = _ms(row)
    return "-" if ms is None or not row[what] else significant(row[what] / ms / unit)


def _of_limit(row: Row) -> str:
    ms, least = _ms(row), least_ms(row)
    return "-" if ms is None or least is None else f"{max(least) / ms:.0%}"


def columns(eager: Row) -> Columns:
    """Return the columns of a table of `run`; times and errors are beside those of eager."""
    found: Columns = {
        "implementation": lambda row: row["name"],
        "forward\nms": lambda row: significant(_ms(row, "forward_ms")),
        "backward\nms": lambda row: significant(_ms(row, "backward_ms")),
        "both\nms": lambda row: significant(_ms(row)),
        "of\neager": lambda row: _of_eager(row, eager),
        "error": lambda row: _error(row, eager),
        "saved\nB/token": _saved,
        "peak\nMiB": lambda row: mib(row["peak_bytes"]),
        "backward\nMiB": lambda row: mib(row["backward_peak_bytes"]),
        "TFLOP/s": lambda row: _rate(row, "flops", 1e9),
        "GB/s": lambda row: _rate(row, "bytes", 1e6),
        "of\nlimit": _of_limit,
    }
    if eager.get("attentions") is None:
        return found
    return found | {"attention\nforwards": lambda row: str(row["attentions"])}


CAPACITY: Columns = {
    "implementation": lambda row: row["name"],
    "tokens": lambda row: f"{row['tokens']:,}",
    "peak MiB": lambda row: mib(row["peak_bytes"]),
    "both ms": lambda row: significant(_ms(row)),
    "tokens/s": lambda row: _rate(row, "tokens", 1e-3),
}


def _notes(rows: Sequence[Row]) -> list[str]:
    """Say why rows are missing, and other facts that a reader of the numbers must know."""
    absent = [row["name"] for row in rows if row["failure"] == "not installed"]
    found = [
        f"{r['name']}: {r['failure']}" for r in rows if r["failure"] and r["name"] not in absent
    ]
    if absent:
        found.append(f"not installed: {', '.join(absent)}")
    timed = [row for row in rows if row["both_ms"] is not None]
    launched = [row["name"] for row in timed if not row.get("is_graph")]
    if launched and len(launched) < len(timed):
        found.append(f"launched, not replayed from a graph: {', '.join(launched)}")
    return found


def show_rows(rows: Sequence[Row], markdown: bool = False) -> None:
    """Print the rows of a case: a line for each that was measured, below why others were not."""
    measured = [row for row in rows if row["failure"] is None]
    heads = CAPACITY if is_capacity(rows[0]) else columns(rows[0])
    show(title(rows[0]), heads, measured, _notes(rows), markdown=markdown)


def source(rows: Sequence[Row]) -> str:
    """Say where the numbers of a case come from, in a line."""
    found = origin(rows[0])
    if any(row.get("is_graph") for row in rows):
        found += "; CUDA graphs"
    if not is_capacity(rows[0]) and least_ms(rows[0]) is not None:
        matmul, copy = map(significant, (rows[0]["matmul_tflops"], rows[0]["copy_gbytes"]))
        found += f"; a large matmul {matmul} TFLOP/s, a copy {copy} GB/s"
    return found


def sources(found: Sequence[Sequence[Row]]) -> list[str]:
    """Say where cases come from, a line each, with their names where the lines differ."""
    cases: dict[str, list[str]] = {}
    for rows in found:
        cases.setdefault(source(rows), []).append(rows[0]["case"])
    if len(cases) == 1:
        return list(cases)
    return [f"{', '.join(names)}: {where}" for where, names in cases.items()]


def run(chosen: Namespace) -> int:
    """Print every table, and where it comes from when that changes."""
    before = None
    for rows in chosen.found:
        if (here := source(rows)) != before:
            print(f"{here}\n")
            before = here
        show_rows(rows, chosen.markdown)
    return 0
