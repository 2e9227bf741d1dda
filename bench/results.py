"""Results of `run` and `capacity`: JSON lines, a flat row per implementation, complete in itself.

A row names everything that its numbers depend on, so that files can be joined, cut and searched by
lines, and read by `pandas.read_json(path, lines=True)`. Times are samples in ms, a round each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
MIB = 2**20
_SHARED = ("case", "size", "dim", "hidden", "dtype", "device", "tokens", "name", "failure")
_SHARED += ("is_wrong", "both_ms", "peak_bytes", "date", "commit", "torch")
_RUN = ("seq", "kv", "flops", "bytes", "forward_ms", "backward_ms", "saved_bytes", "errors")
_RUN += ("backward_peak_bytes", "is_graph", "matmul_tflops", "copy_gbytes")


def is_capacity(row: Row) -> bool:
    """Whether a row is of `bench capacity`, else of `bench run`."""
    return "memory" in row


def _row(text: bytes) -> Row:
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    for name in _SHARED if is_capacity(row) else _SHARED + _RUN:
        if name not in row:
            raise ValueError(f"it names no {name}")
        kind = list if name.endswith("_ms") or name == "errors" else None
        if kind and row[name] is not None and not isinstance(row[name], kind):
            raise ValueError(f"{name} is not a list of numbers")
    return row


def read(path: Path) -> list[Row]:
    """Read a file, leaving out a last line that a crash cut off, with a warning.

    Raises ValueError, naming file and line, for a line that is no row; OSError without a file.
    """
    data, found = path.read_bytes(), []
    for number, text in enumerate(lines := data.splitlines(), 1):
        try:
            found.append(_row(text))
        except (ValueError, RecursionError) as error:
            where = f"{path}:{number}"
            if number < len(lines) or data.endswith(b"\n"):
                message = f"{where}: not a result of bench run or capacity ({error})"
                raise ValueError(message) from error
            print(f"{where}: left out, the line is unfinished", file=sys.stderr)
    return found


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
    """Return the values that the rows of one case have in common, by which results are compared."""
    own = ("memory",) if is_capacity(row) else ("tokens", "seq", "kv")
    names = ("case", "size", "dim", "hidden", "dtype", "device", *own)
    return tuple(row[name] for name in names)


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each case at a size, in order; of one measured twice those of the last.

    A line that is there twice, as in a file joined to itself, is one.
    """
    found: dict[Any, dict[Any, dict[str, Row]]] = {}
    for row in rows:
        runs = found.setdefault(key_of(row), {})
        runs.setdefault((row["date"], row["commit"]), {})[row["name"]] = row
    return [list([*runs.values()][-1].values()) for runs in found.values()]


def heading(row: Row) -> str:
    """Return the case, and how long its sequences are."""
    return row["case"] + (f", sequences of {row['seq']}" if row.get("seq") else "")


def title(row: Row) -> str:
    """Return the case and its sizes, in a line."""
    sizes = f"D = {row['dim']}, F = {row['hidden']}, {row['dtype']}"
    if is_capacity(row):
        return f"{row['case']}, {row['size']}: {sizes}, in {row['memory']:,} MiB"
    sequences = heading(row).removeprefix(row["case"])
    return f"{row['case']}, {row['size']}: {row['tokens']} tokens, {sizes}{sequences}"


def least_ms(row: Row) -> tuple[float, float] | None:
    """Return how long the matmul's and the copy's ceiling let a case take; None without them.

    A ceiling is the device's rate in the same run: of a large matmul, or of a copy.
    """
    if row["matmul_tflops"] is None or row["copy_gbytes"] is None:
        return None
    return row["flops"] / row["matmul_tflops"] / 1e9, row["bytes"] / row["copy_gbytes"] / 1e6


def rounded(samples: Iterable[float]) -> list[float]:
    """Return samples as they are written: with five significant digits."""
    return [float(f"{value:.5g}") for value in samples]


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th percentile of the samples, the median, and the 80th percentile."""
    p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return p20, p50, p80


def ratios(samples: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the ratios within each round, where load that comes and goes cancels."""
    return [mine / theirs for mine, theirs in zip(samples, reference, strict=False)]
