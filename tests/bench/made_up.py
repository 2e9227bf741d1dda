"""Rows of results that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.results import Row, append

FACTS = {
    **{"device": "a device", "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef"},
    **{"torch": "2.13", "triton": "3.7", "fusedckpt": "0.1"},
}


def row(name: str, ms: float = 3.0, peak: int = 1000, **changes: Any) -> Row:
    times = {
        f"{what}_ms": [scale * ms, 0.9 * scale * ms] * 3
        for what, scale in (("forward", 0.4), ("backward", 0.6), ("both", 1.0))
    }
    if "failure" in changes:
        times = dict.fromkeys(times)
    return {
        **{"name": name, "failure": None, "is_wrong": False, **times, "saved_bytes": 500},
        **{"peak_bytes": peak, "backward_peak_bytes": 800, "errors": [1e-7], "is_graph": False},
        **changes,
    }


def group(*rows: Row, case: str = "mlp", **changes: Any) -> list[Row]:
    shared = {
        **{
            "command": "run",
            "case": case,
            "size": "tiny",
            "tokens": 48,
            "dim": 32,
            "hidden": 80,
            "kv": 16,
        },
        **{"dtype": "float32", "seq": None, "flops": 3 * 10**9, "bytes": 3 * 10**6},
        **{"matmul_tflops": 1.5, "copy_gbytes": 10.0, **FACTS, **changes},
    }
    return [shared | one for one in rows]


def write(path: Path, *found: list[Row]) -> Path:
    path.unlink(missing_ok=True)
    for rows in found:
        append(rows, path)
    return path


def ways(*rows: Row, command: str = "ways", **changes: Any) -> list[Row]:
    """Return rows of a command that trains."""
    shared = {"command": command, "case": "own", "title": "a model", "dtype": "float32", **FACTS}
    return [shared | row | changes for row in rows]


def way(name: str, ms: float = 3.0, peak: int = 2**20, **changes: Any) -> Row:
    return {
        **{"name": name, "failure": None, "is_wrong": False, "both_ms": [ms, 0.9 * ms] * 3},
        **{"saved_bytes": 2**19, "peak_bytes": peak, "peak_above": "parameters and gradients"},
        **{"losses": [2.0, 1.5], "loss_difference": 0.0, "errors": [1e-7], **changes},
    }
