"""Results of all commands: JSON lines, a flat row per implementation, complete in itself.

A row names everything that its numbers depend on, so that files can be joined, cut and searched by
lines, and read by `pandas.read_json(path, lines=True)`. Times are samples in ms, a round each.
Columns that a command does not measure are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

Row = dict[str, Any]
Rows = Sequence[Row]
MIB = 2**20
# in every row: the case and the machine, how it ended, and the numbers of all commands
_SHARED = ("command", "case", "name", "failure", "is_wrong", "dtype", "device", "date", "commit")
_SHARED += ("torch", "both_ms", "saved_bytes", "peak_bytes")
# fields that only rows of `bench run` at a number of tokens have, for its tables
_RUN = ("size", "dim", "hidden", "kv", "seq", "tokens", "flops", "bytes", "errors", "is_graph")
_RUN += ("forward_ms", "backward_ms", "backward_peak_bytes", "matmul_tflops", "copy_gbytes")
# settings that the rows of a case have in common, by which results are compared
_KEYS = ("command", "case", "size", "layers", "dim", "hidden", "kv", "batch", "seq", "tokens")
_KEYS += ("memory", "base", "lora", "dtype", "device")
_LISTS = ("losses", "errors", "kernels")


def _row(text: bytes) -> Row:
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    is_run = row.get("command") == "run" and "memory" not in row
    for name in _SHARED + _RUN if is_run else _SHARED:
        if name not in row:
            raise ValueError(f"it names no {name}")
    for name, value in row.items():
        is_list = name.endswith("_ms") or name in _LISTS
        if is_list and value is not None and not isinstance(value, list):
            raise ValueError(f"{name} is not a list of numbers")
    return row


def read(path: Path) -> list[Row]:
    """Read a file, leaving out a last line that a crash cut off, with a warning.

    Raises ValueError, naming file and line, for a line that is no row; OSError without a file.
    """
    data = path.read_bytes()
    rows: list[Row] = []
    for number, text in enumerate(lines := data.splitlines(), 1):
        try:
            rows.append(_row(text))
        except (ValueError, RecursionError) as error:
            where = f"{path}:{number}"
            if number < len(lines) or data.endswith(b"\n"):
                raise ValueError(f"{where}: not a result of the bench ({error})") from error
            print(f"{where}: left out, the line is unfinished", file=sys.stderr)
    return rows


def append(rows: Iterable[Row], path: Path) -> None:
    """Add a line each; a last line that a crash cut off goes.

    A number that is not finite stays NaN or Infinity.
    """
    before = path.read_bytes() if path.exists() else b""
    kept = before[: before.rfind(b"\n") + 1]
    texts = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("r+b" if before else "wb") as file:
        file.truncate(len(kept))
        file.seek(len(kept))
        file.write(texts.encode())


def key_of(row: Row) -> tuple[Any, ...]:
    """Return the settings that the rows of one case have in common."""
    return tuple(row.get(name) for name in _KEYS)


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each case at a size, in order; of one measured twice those of the last.

    A line that occurs twice, as in a file joined to itself, counts once. Estimates of `contexts` do
    not depend on the run: each way takes its last one.
    """
    cases: dict[Any, dict[Any, dict[str, Row]]] = {}
    for row in rows:
        runs = cases.setdefault(key_of(row), {})
        run = None if row["command"] == "contexts" else (row["date"], row["commit"])
        runs.setdefault(run, {})[row["name"]] = row
    return [list([*runs.values()][-1].values()) for runs in cases.values()]


def heading(row: Row) -> str:
    """Return the case, and how long its sequences are."""
    return row["case"] + (f", sequences of {row['seq']}" if row.get("seq") else "")


def title(row: Row) -> str:
    """Return the case and its sizes, in a line."""
    if "title" in row:
        return row["title"]
    sizes = f"D = {row['dim']}, F = {row['hidden']}, {row['dtype']}"
    if "memory" in row:
        return f"{row['case']}, {row['size']}: {sizes}, in {row['memory']:,} MiB"
    sequences = heading(row).removeprefix(row["case"])
    return f"{row['case']}, {row['size']}: {row['tokens']} tokens, {sizes}{sequences}"


def is_timed(row: Row) -> bool:
    """Whether a row has times."""
    return bool(row["both_ms"])


def ratios(samples: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the ratios within each round, where load that comes and goes cancels."""
    return [mine / theirs for mine, theirs in zip(samples, reference, strict=False)]


def slowdown(row: Row, reference: Row, what: str = "both_ms") -> float:
    """Return a row's time relative to the reference's: the median of the ratios within rounds."""
    return median(ratios(row[what], reference[what]))


def ms_of(row: Row, reference: Row, what: str = "both_ms") -> float:
    """Return a row's time: the reference's median times `slowdown`.

    So that a table's times and its ratios are one measurement. A median of the row's own samples
    would contain load that came while other rows rested. Where the reference has no times, it is
    the row's own median.
    """
    if not reference[what]:
        return median(row[what])
    return median(reference[what]) * slowdown(row, reference, what)


def least_ms(row: Row) -> tuple[float, float] | None:
    """Return how long the matmul's and the copy's ceiling let a case take; None without them.

    A ceiling is the device's rate in the same run: of a large matmul, or of a copy.
    """
    if row.get("matmul_tflops") is None or row.get("copy_gbytes") is None:
        return None
    return row["flops"] / row["matmul_tflops"] / 1e9, row["bytes"] / row["copy_gbytes"] / 1e6


def rounded(samples: Iterable[float]) -> list[float]:
    """Return samples as they are written: with five significant digits."""
    return [float(f"{value:.5g}") for value in samples]


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th percentile of the samples, the median, and the 80th percentile."""
    p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return p20, p50, p80
