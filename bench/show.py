"""Print the tables of a results file, or the changes between two, or draw the figures of one.

Files are of any command. Times are relative to the first implementation's within a round, where
load that comes and goes cancels.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bench import changes, contexts, rounding
from bench.options import FRACTION, Options
from bench.results import (
    Row,
    Rows,
    append,
    groups,
    is_timed,
    key_of,
    least_ms,
    ms_of,
    read,
    slowdown,
    title,
)
from bench.tables import Columns, difference, mib, show, significant, source

# of float32: the divisor of an error where the first row's own is nothing
EPS = 2**-23
# kernels of a table, those that take longest; the file has all
LONGEST = 12
KERNELS: Columns = {
    "kernel": lambda kernel: kernel[0],
    "launches": lambda kernel: f"{kernel[1]}",
    "us": lambda kernel: significant(kernel[2]),
}
# below tables that have no notes on their columns
LEGEND = 'columns: bench/README.md, "How to read a table" and "Ways of training"'
# a failure that is no fault of ours begins so
BENIGN = ("not installed", "not even", "no plan")


def options(add: Options) -> None:
    """Add the options."""
    text = "results; of two files what changed from the first to the second"
    add.add_argument("files", help=text, type=Path, metavar="FILE", nargs="+")
    add.flag("markdown", "print Markdown")
    add.flag("plot", "draw figures instead")
    text = "ignore changed times that differ by less than this fraction"
    add.one("threshold", text, 0.05, type=FRACTION, metavar="X")
    add.one("out", "folder for figures; default: the file's", type=Path, metavar="DIR")


def prepare(chosen: Namespace) -> Namespace:
    """Read the files.

    Raises ValueError where one has no result, or two have none in common; OSError as reading does.
    """
    if len(chosen.files) > 2 or (chosen.plot and len(chosen.files) > 1):
        raise ValueError("expected one file, or two to compare")
    chosen.cases = []
    for file in chosen.files:
        if not (rows := read(file)):
            raise ValueError(f"{file}: nothing was measured")
        chosen.cases.append(groups(rows))
    if len(chosen.cases) == 2:
        keys = [{key_of(rows[0]) for rows in cases} for cases in chosen.cases]
        if not keys[0] & keys[1]:
            first, second = chosen.files
            text = "have no case in common on the same device"
            raise ValueError(f"{first} and {second} {text}")
    if chosen.plot and not any(is_drawn(row) for rows in chosen.cases[0] for row in rows):
        raise ValueError(f"{chosen.files[0]}: no row has times to draw")
    return chosen


def is_drawn(row: Row) -> bool:
    """Whether a figure shows a row."""
    return is_timed(row) or row["command"] == "contexts"


def run(chosen: Namespace) -> int:
    """Print every table, and where it comes from when that changes; or draw every figure."""
    if len(chosen.cases) == 2:
        changes.print_changes(*chosen.cases, threshold=chosen.threshold)
        return 0
    (cases,) = chosen.cases
    if chosen.plot:
        # here: tables need no matplotlib
        from bench import drawings

        file = chosen.files[0]
        drawings.draw_all(cases, chosen.out or file.parent, file.stem)
        return 0
    before = None
    for rows in cases:
        if (here := source(rows)) != before:
            print(f"{here}\n")
            before = here
        show_rows(rows, markdown=chosen.markdown)
    if not chosen.markdown:
        print(LEGEND)
    return 0


def files_of(chosen: Namespace) -> str:
    """Return the names of the files that a command which trains writes, in words."""
    return f"{chosen.command}.jsonl and {chosen.command}.png to {chosen.out}"


def publish(chosen: Namespace, cases: Sequence[Rows]) -> int:
    """Write the rows and the figure of a command that trains; return its exit status.

    It is 1 where a way failed, its gradients were wrong or a loss is not finite, else 0.
    """
    from bench import drawings

    path = chosen.out / f"{chosen.command}.jsonl"
    path.unlink(missing_ok=True)
    rows = [row for rows in cases for row in rows]
    append(rows, path)
    drawings.draw_training(cases, path.with_suffix(".png"))
    broken = [row["name"] for row in rows if not np.isfinite(row.get("losses", 0.0)).all()]
    if broken:
        print(f"loss not finite: {', '.join(broken)}")
    failed = [r for r in rows if r["failure"] and not r["failure"].startswith(BENIGN)]
    return int(bool(broken or failed))


def _number(name: str) -> Callable[[Row], str]:
    return lambda row: significant(row.get(name))


def _mib(name: str) -> Callable[[Row], str]:
    return lambda row: mib(row.get(name))


def _of_first(row: Row, first: Row) -> str:
    return f"{slowdown(row, first):.2f}x" if is_timed(row) and is_timed(first) else "-"


def _per_block(row: Row, first: Row) -> str:
    if not (is_timed(row) and is_timed(first)):
        return "-"
    return f"{slowdown(row, first) * first['depth'] / row['depth']:.2f}x"


def _ms(row: Row, first: Row, what: str = "both_ms") -> float | None:
    return ms_of(row, first, what) if row.get(what) else None


def _error(row: Row, first: Row) -> str:
    """Write the error of the result that is worst relative to the first row's of the same."""
    pairs = zip(row.get("errors", ()), first.get("errors", ()), strict=False)
    worst = max((mine / (eagers or EPS) for mine, eagers in pairs), default=None)
    return "-" if worst is None else f"{worst:.{0 if worst >= 10 else 2}f}x"


def _saved(row: Row) -> str:
    return "-" if row["saved_bytes"] is None else f"{row['saved_bytes'] / row['tokens']:,.0f}"


def _rate(row: Row, first: Row, what: str, unit: float) -> str:
    """Write the least FLOPs or bytes, or the tokens, over the time: no recomputed FLOPs."""
    ms = _ms(row, first)
    return "-" if ms is None or not row[what] else significant(row[what] / ms / unit)


def _of_limit(row: Row, first: Row) -> str:
    ms = _ms(row, first)
    least = least_ms(row)
    return "-" if ms is None or least is None else f"{max(least) / ms:.0%}"


def _trade(row: Row, first: Row) -> str:
    """Write the MiB that each added millisecond takes off the peak; "-" where none is added."""
    if not (is_timed(row) and is_timed(first)):
        return "-"
    added = ms_of(row, first) - ms_of(first, first)
    # less than a percent is noise
    if row is first or added < 0.01 * ms_of(first, first):
        return "-"
    # a zero loses its sign
    return f"{round((first['peak_bytes'] - row['peak_bytes']) / 2**20 / added, 2) + 0.0:.2f}"


def _relative(name: str, first: Row) -> Callable[[Row], str]:
    return lambda row: f"{row[name] / first[name]:.2f}x" if row.get(name) else "-"


def _recomputed(row: Row) -> str:
    return "-" if row.get("recomputed") is None else f"{100 * row['recomputed']:.0f}"


def _last_loss(row: Row) -> str:
    return f"{row['losses'][-1]:.4f}" if row.get("losses") else "-"


def _difference(row: Row) -> str:
    return difference(row["loss_difference"]) if "loss_difference" in row else "-"


def _range(name: str) -> Callable[[Row], str]:
    return lambda row: f"{min(row[name]):.3f} .. {max(row[name]):.3f}" if row.get(name) else "-"


def _us(what: str) -> Callable[[Row], str]:
    return lambda row: significant(1e3 * min(row[what])) if row[what] else "-"


def _count(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(name) is None else f"{row[name]:,}"


# of the host's time: the least, as other work of the machine only adds to it
HOST: Columns = {
    "implementation": lambda row: row["name"],
    "forward\nus": _us("forward_ms"),
    "backward\nus": _us("backward_ms"),
    "launches": _count("launches"),
    "waits": _count("waits"),
    "break-even\ntokens": _count("break_even"),
}


def columns_of(rows: Rows) -> Columns:
    """Return the columns of a table: those for which a row has a value."""
    first = rows[0]
    if first["command"] == "host":
        return HOST
    if first["command"] == "contexts":
        return contexts.COLUMNS
    known = {name for row in rows for name, value in row.items() if value is not None}
    is_run = first["command"] == "run"
    # a command that counts only bytes has no times
    has_times = any(is_timed(row) or row["failure"] for row in rows)

    def ms(what: str) -> Callable[[Row], str]:
        return lambda row: significant(_ms(row, first, what))

    heads: list[tuple[bool, str, Callable[[Row], str]]] = [
        (True, "implementation" if is_run else "way", lambda row: row["name"]),
        ("depth" in known, "blocks\nthat fit", lambda row: f"{row['depth']}"),
        ("fits" in known, "tokens\nthat fit", lambda row: f"{row['fits']:,}"),
        ("forward_ms" in known, "forward\nms", lambda r: significant(_ms(r, first, "forward_ms"))),
        (
            "backward_ms" in known,
            "backward\nms",
            lambda r: significant(_ms(r, first, "backward_ms")),
        ),
        (has_times, "both\nms" if is_run else "ms", lambda row: significant(_ms(row, first))),
        (
            has_times and not known & {"depth", "fits"},
            f"of\n{first['name']}",
            lambda row: _of_first(row, first),
        ),
        ("depth" in known, f"of {first['name']}\nper block", lambda row: _per_block(row, first)),
        ("errors" in known, "error", lambda row: _error(row, first)),
        ("tokens" in known, "saved\nB/token", _saved),
        ("saved_bytes" in known and "tokens" not in known, "saved\nMiB", _mib("saved_bytes")),
        ("budget_bytes" in known, "budget\nMiB", _mib("budget_bytes")),
        ("predicted_bytes" in known, "predicted\nMiB", _mib("predicted_bytes")),
        (True, "peak\nMiB", _mib("peak_bytes")),
        ("backward_peak_bytes" in known, "backward\nMiB", _mib("backward_peak_bytes")),
        ("recomputed" in known, "recomputed\n%", _recomputed),
        ("step_flops" in known, f"FLOPs of\n{first['name']}", _relative("step_flops", first)),
        (
            "written_elements" in known,
            f"written of\n{first['name']}",
            _relative("written_elements", first),
        ),
        ("curve" in known, "MiB\nper ms", lambda row: _trade(row, first)),
        ("tokens" in known, "TFLOP/s", lambda row: _rate(row, first, "flops", 1e9)),
        ("bytes" in known, "GB/s", lambda row: _rate(row, first, "bytes", 1e6)),
        ("fits" in known, "tokens/s", lambda row: _rate(row, first, "fits", 1e-3)),
        ("tokens" in known, "of\nlimit", lambda row: _of_limit(row, first)),
        ("attentions" in known, "attention\nforwards", lambda row: f"{row['attentions']}"),
        ("losses" in known, "last\nloss", _last_loss),
        ("losses" in known, "diff.", _difference),
        ("held_out_loss" in known, "held-out\nloss", _range("held_out_loss")),
        ("accuracy" in known, "accuracy", _range("accuracy")),
    ]
    return {head: write for is_shown, head, write in heads if is_shown}


def _notes(rows: Rows) -> Iterator[str]:
    """Say why rows are missing, and other facts that a reader of the numbers must know."""
    for row in rows:
        if row["failure"] and row["failure"] != "not installed":
            yield f"{row['name']}: {row['failure']}"
        elif row.get("note"):
            yield f"{row['name']}: {row['note']}"
    if absent := [row["name"] for row in rows if row["failure"] == "not installed"]:
        yield f"not installed: {', '.join(absent)}"
    timed = [row for row in rows if is_timed(row)]
    launched = [row["name"] for row in timed if not row.get("is_graph")]
    if launched and len(launched) < len(timed):
        yield f"launched, not replayed from a graph: {', '.join(launched)}"
    unjudged: dict[str, list[str]] = {}
    for row in rows:
        if row.get("unjudged"):
            unjudged.setdefault(row["unjudged"], []).append(row["name"])
    for why, names in unjudged.items():
        all_of_them = "all" if len(names) == len(rows) else ", ".join(names)
        yield f"gradients are not judged ({all_of_them}): {why}"
    above = {row["peak_above"] for row in rows if "peak_above" in row}
    yield from (f"peak: above {what}" for what in above)


def show_rows(rows: Rows, notes: Sequence[str] = (), markdown: bool = False) -> None:
    """Print the rows of a case: a line for each that was measured, below why others were not."""
    if rows[0]["command"] == "rounding":
        return show(rounding.title_of(rows[0]), rounding.COLUMNS, rows, notes, markdown=markdown)
    measured = [row for row in rows if row["failure"] is None]
    lines = [*_notes(rows), *notes]
    show(title(rows[0]), columns_of(rows), measured, lines, markdown=markdown)
    for row in measured:
        if row.get("kernels") and row["name"].startswith("fusedckpt"):
            show(f"kernels of {row['name']}", KERNELS, row["kernels"][:LONGEST], markdown=markdown)
