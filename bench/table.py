"""`python -m bench table FILE`: the tables of a results file, for a terminal or in Markdown."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from bench.env import origin
from bench.results import Row, groups, is_capacity, least_ms, median, ratios, read, title
from bench.tables import Columns, mib, show, significant

# of float32: the divisor of an error where eager's own is nothing
EPS = 2**-23


def prepare(chosen: Namespace) -> tuple[list[list[Row]], bool]:
    """Read the file. Raises ValueError where there is nothing of ours, OSError as reading does."""
    rows = read(chosen.file)
    if not rows:
        raise ValueError(f"{chosen.file}: nothing was measured")
    # those of `capacity` last
    found = sorted(groups(rows), key=lambda group: is_capacity(group[0]))
    return found, chosen.markdown


def _median(samples: Sequence[float] | None) -> float | None:
    return None if samples is None else median(samples)


def _of_eager(row: Row, eager: Row) -> str:
    if row["both_ms"] is None or eager["both_ms"] is None:
        return "-"
    return f"{median(ratios(row['both_ms'], eager['both_ms'])):.2f}x"


def _error(row: Row, eager: Row) -> str:
    """The error of the result that is worst beside eager's of the same result."""
    pairs = zip(row["errors"], eager["errors"], strict=False)
    worst = max((mine / (eagers or EPS) for mine, eagers in pairs), default=None)
    return "-" if worst is None else f"{worst:.{0 if worst >= 10 else 2}f}x"


def _saved(row: Row) -> str:
    return "-" if row["saved_bytes"] is None else f"{row['saved_bytes'] / row['tokens']:,.0f}"


def _rate(row: Row, what: str, unit: float) -> str:
    """The case's least FLOPs or bytes, or its tokens, over its time: no recomputed FLOPs."""
    ms = _median(row["both_ms"])
    return "-" if ms is None or not row[what] else significant(row[what] / ms / unit)


def _of_limit(row: Row) -> str:
    ms, least = _median(row["both_ms"]), least_ms(row)
    return "-" if ms is None or least is None else f"{max(least) / ms:.0%}"


def columns(eager: Row) -> Columns:
    """Return the columns of a table of `run`; times and errors are beside those of eager."""
    found: Columns = {
        "implementation": lambda row: row["name"],
        "forward\nms": lambda row: significant(_median(row["forward_ms"])),
        "backward\nms": lambda row: significant(_median(row["backward_ms"])),
        "both\nms": lambda row: significant(_median(row["both_ms"])),
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
    "both ms": lambda row: significant(_median(row["both_ms"])),
    "tokens/s": lambda row: _rate(row, "tokens", 1e-3),
}


def _notes(rows: Sequence[Row]) -> list[str]:
    """Why rows are missing, and other facts that a reader of the numbers must know."""
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
        show(title(rows[0]), CAPACITY, fits, _notes(rows), markdown=markdown)
    else:
        measured = [row for row in rows if row["failure"] is None]
        show(title(rows[0]), columns(rows[0]), measured, _notes(rows), markdown=markdown)


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
