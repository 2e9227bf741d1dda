"""`python -m bench table FILE`: the tables of a results file, for a terminal or in Markdown."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from bench.env import origin
from bench.results import Row, groups, is_capacity, least_ms, median, ratios, read, title
from bench.tables import show, significant

HEADS = (
    *("implementation", "forward\nms", "backward\nms", "both\nms", "of\neager", "error"),
    *("saved\nB/token", "peak\nMiB", "backward\nMiB", "TFLOP/s", "GB/s", "of\nlimit"),
)
CAPACITY_HEADS = ("implementation", "tokens", "peak MiB", "both ms", "tokens/s")
# of float32: what an error is divided by where eager's own is nothing
EPS = 2**-23


def prepare(chosen: Namespace) -> tuple[list[list[Row]], bool]:
    """Read the file. Raises ValueError where there is nothing of ours, OSError as reading does."""
    rows = read(chosen.file)
    if not rows:
        raise ValueError(f"{chosen.file}: nothing was measured")
    # those of `capacity` last
    found = sorted(groups(rows), key=lambda group: is_capacity(group[0]))
    return found, chosen.markdown


def _time(samples: Sequence[float] | None) -> str:
    return "-" if samples is None else significant(median(samples))


def _error(row: Row, eager: Row) -> str:
    """The error of the result that is worst beside eager's of the same result."""
    pairs = zip(row["errors"], eager["errors"], strict=False)
    worst = max((mine / (eagers or EPS) for mine, eagers in pairs), default=None)
    return "-" if worst is None else f"{worst:.{0 if worst >= 10 else 2}f}x"


def _rates(row: Row) -> list[str]:
    """What the case needs at least, over the time it took: recomputed FLOPs are not counted."""
    if row["both_ms"] is None:
        return ["-", "-", "-"]
    ms, least = median(row["both_ms"]), least_ms(row)
    flops = significant(row["flops"] / ms / 1e9) if row["flops"] else "-"
    share = "-" if least is None else f"{max(least) / ms:.0%}"
    return [flops, significant(row["bytes"] / ms / 1e6), share]


def cells(row: Row, eager: Row) -> list[str]:
    """Return a line's cells; times and errors are beside those of eager."""
    ratio = "-"
    if row["both_ms"] is not None and eager["both_ms"] is not None:
        ratio = f"{median(ratios(row['both_ms'], eager['both_ms'])):.2f}x"
    saved = row["saved_bytes"]
    return [
        row["name"],
        *(_time(row[name]) for name in ("forward_ms", "backward_ms", "both_ms")),
        ratio,
        _error(row, eager),
        "-" if saved is None else f"{saved / row['tokens']:,.0f}",
        *("-" if row[name] is None else significant(row[name] / 2**20) for name in
          ("peak_bytes", "backward_peak_bytes")),
        *_rates(row),
    ]  # fmt: skip


def _capacity_cells(row: Row) -> list[str]:
    fits = [row["name"], f"{row['tokens']:,}", significant(row["peak_bytes"] / 2**20)]
    if row["both_ms"] is None:
        return [*fits, "-", "-"]
    ms = median(row["both_ms"])
    return [*fits, significant(ms), significant(row["tokens"] / ms * 1e3)]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Why rows are missing, and what a reader of the numbers must know besides."""
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
    if 0 < rows[0].get("checked_tokens", 0) < rows[0]["tokens"]:
        found.append(f"numbers checked at {rows[0]['checked_tokens']} tokens")
    return found


def show_rows(rows: Sequence[Row], markdown: bool = False) -> None:
    """Print the rows of a case: a line for each that was measured, below why others were not."""
    if is_capacity(rows[0]):
        # timed, or interrupted before that
        fits = [r for r in rows if r["both_ms"] or (r["tokens"] and r["failure"] == "interrupted")]
        lines: Any = map(_capacity_cells, fits)
    else:
        lines = (cells(row, rows[0]) for row in rows if row["failure"] is None)
    heads = CAPACITY_HEADS if is_capacity(rows[0]) else HEADS
    show(title(rows[0]), heads, list(lines), _notes(rows), markdown)


def source(rows: Sequence[Row]) -> str:
    """Where the numbers of a case come from, in a line."""
    found = origin(rows[0])
    if any(row.get("is_graph") for row in rows):
        found += "; CUDA graphs"
    if not is_capacity(rows[0]) and least_ms(rows[0]) is not None:
        matmul, copy = map(significant, (rows[0]["matmul_tflops"], rows[0]["copy_gbytes"]))
        found += f"; a large matmul {matmul} TFLOP/s, a copy {copy} GB/s"
    return found


def sources(found: Sequence[Sequence[Row]]) -> list[str]:
    """Where cases come from, a line each, with the cases it is said of where they differ."""
    cases: dict[str, list[str]] = {}
    for rows in found:
        cases.setdefault(source(rows), []).append(rows[0]["case"])
    if len(cases) == 1:
        return list(cases)
    return [f"{', '.join(names)}: {where}" for where, names in cases.items()]


def run(prepared: tuple[list[list[Row]], bool]) -> int:
    """Print every table, and where it comes from when that changes."""
    found, markdown = prepared
    before = None
    for rows in found:
        if (here := source(rows)) != before:
            print(f"{here}\n")
            before = here
        show_rows(rows, markdown)
    return 0
