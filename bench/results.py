"""Results of `run` and `capacity`: JSON lines, a flat row per implementation, complete in itself.

A row names all that its numbers depend on, so that files can be joined, cut and searched by lines,
and read by `pandas.read_json(path, lines=True)`. Times are samples in ms, a round each.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
SIGNIFICANT = 5
# the types of a row's values, by name; "| None" where there may be no value
_SHARED = {
    **dict.fromkeys(("case", "size", "dtype", "name", "device", "date"), "str"),
    **dict.fromkeys(("torch", "triton", "fusedckpt"), "str"),
    **dict.fromkeys(("commit", "failure"), "str | None"),
    **dict.fromkeys(("tokens", "dim", "hidden"), "int"),
    "is_wrong": "bool",
    "both_ms": "list | None",
}
RUN = {
    **_SHARED,
    **dict.fromkeys(("kv", "checked_tokens", "flops", "bytes"), "int"),
    **dict.fromkeys(("seq", "saved_bytes", "peak_bytes", "backward_peak_bytes"), "int | None"),
    **dict.fromkeys(("forward_ms", "backward_ms"), "list | None"),
    **dict.fromkeys(("matmul_tflops", "copy_gbytes"), "float | None"),
    "errors": "list",
    "is_graph": "bool",
}
CAPACITY = _SHARED | {"memory": "int", "peak_bytes": "int"}
# JSON's words for the types
_WORDS = {"str": "a string", "bool": "true or false", "int": "a whole number"}
_WORDS |= {"float": "a number", "list": "a list of numbers", "dict": "an object"}


def _is(value: Any, kind: str) -> bool:
    # JSON writes 1.0 and 1 alike, and True is no number
    if kind == "list":
        return isinstance(value, list) and all(_is(item, "float") for item in value)
    return type(value).__name__ == kind or (kind == "float" and type(value) is int)


def checked(record: Any, kinds: Mapping[str, str]) -> Row:
    """Return a record that has these names, of these types. Raises ValueError naming another."""
    if not isinstance(record, dict):
        raise ValueError("it is not an object")
    for name, allowed in kinds.items():
        kind = allowed.removesuffix(" | None")
        if name not in record:
            raise ValueError(f"it names no {name}")
        if not _is(record[name], kind) and (kind == allowed or record[name] is not None):
            raise ValueError(f"{name} is not {_WORDS[kind]}")
    return record


def is_capacity(row: Row) -> bool:
    """Whether a row is of `bench capacity`, else of `bench run`."""
    return "memory" in row


def read(path: Path) -> list[Row]:
    """Read a file, leaving out a last line that a crash cut off, with a warning.

    Raises ValueError, naming file and line, for a line that is no row; OSError without a file.
    """
    data, found = path.read_bytes(), []
    for number, text in enumerate(lines := data.splitlines(), 1):
        where = f"{path}:{number}"
        if number == len(lines) and not data.endswith(b"\n") and not _is_json(text):
            print(f"{where}: left out, the line is unfinished", file=sys.stderr)
            break
        try:
            row = json.loads(text.decode())
            found.append(checked(row, CAPACITY if "memory" in row else RUN))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{where}: not a result of bench run or capacity ({error})") from error
    return found


def append(rows: Iterable[Row], path: Path) -> None:
    """Add a line each, in the place of a last one that was cut off.

    A number that is not finite stays NaN or Infinity.
    """
    texts = [json.dumps(row) + "\n" for row in rows]
    with path.open("a+b") as file:
        file.seek(0)
        before = file.read()
        end = before.rfind(b"\n") + 1
        if _is_json(before[end:]):
            file.write(b"\n")
        else:
            file.truncate(end)
        file.write("".join(texts).encode())


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text.decode())
    except (ValueError, RecursionError):
        return False
    return True


def save(record: Row, path: Path) -> None:
    """Write one record as JSON; a number that is not finite stays NaN or Infinity."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def chosen_of(chosen: Namespace) -> Row:
    """Return a command's options as a record has them: without those that no result depends on."""
    return {name: x for name, x in vars(chosen).items() if name not in ("out", "command")}


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
    return row["case"] + (f", sequences of {row['seq']}" if row["seq"] else "")


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
    """Return samples as they are written: with so many significant digits."""
    return [float(f"{value:.{SIGNIFICANT}g}") for value in samples]


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th percentile of the samples, the median, and the 80th percentile."""
    p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return p20, p50, p80


def median(samples: Sequence[float]) -> float:
    """Return the median."""
    return quantiles(samples)[1]


def ratios(samples: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the ratios within each round, where load that comes and goes cancels."""
    # an interrupt leaves some a round short
    return [mine / theirs for mine, theirs in zip(samples, reference, strict=False)]


def largest_difference(samples: Any, reference: Any) -> float:
    """Return the largest difference, NaN if there is one."""
    return float(np.abs(np.subtract(samples, reference)).max())
