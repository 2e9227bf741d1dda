"""Records of `python -m bench run`: JSON lines, one per implementation, each complete in itself.

A line names all that its numbers depend on, so that files can be joined, cut and searched by lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["MIB", "Ceilings", "Group", "Load", "Row", "Timing", "append", "read"]

MIB = 2**20
SIGNIFICANT = 5


class Load(NamedTuple):
    """What any way of computing a case must do: FLOPs, and bytes read or written once."""

    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int

    @property
    def flops(self) -> int:
        """Of forward and backward together."""
        return self.forward_flops + self.backward_flops

    @property
    def nbytes(self) -> int:
        """Of forward and backward together."""
        return self.forward_bytes + self.backward_bytes


NO_LOAD = Load(0, 0, 0, 0)


class Ceilings(NamedTuple):
    """What the device did in the same run: a large matmul in TFLOP/s, a copy in GB/s."""

    tflops: float
    gbytes: float

    def least_ms(self, load: Load) -> float:
        """Return how long forward and backward must take at either ceiling."""
        return 1e3 * max(load.flops / self.tflops / 1e12, load.nbytes / self.gbytes / 1e9)


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and what a fifth of the samples lies below or above."""

    median: float
    p20: float
    p80: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Sum samples up."""
        p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
        return cls(_rounded(p50), _rounded(p20), _rounded(p80), tuple(map(_rounded, samples)))


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT}g}")


@dataclass(frozen=True)
class Row:
    """What one implementation cost.

    failure: why there is no speed; is_wrong: that its numbers are; peaks: above the start, of
    forward with backward and of backward alone; errors: RMS against float64 of outputs, then
    gradients; is_graph: timed by replaying CUDA graphs.
    """

    name: str
    failure: str | None
    is_wrong: bool
    forward_ms: Timing | None
    backward_ms: Timing | None
    both_ms: Timing | None
    saved_bytes: int | None
    peak_bytes: int | None
    backward_peak_bytes: int | None
    errors: tuple[float, ...]
    is_graph: bool = False


@dataclass(frozen=True)
class Group:
    """All implementations of one case at one size; ratios refer to the first.

    checked_tokens: at how many the numbers were compared; fewer where float64 did not fit; seq: how
    many attend to one another, in cases with attention.
    """

    case: str
    size: str
    tokens: int
    dim: int
    hidden: int
    kv: int
    rows: tuple[Row, ...]
    dtype: str = "float32"
    checked_tokens: int = 0
    load: Load = NO_LOAD
    ceilings: Ceilings | None = None
    environment: dict[str, Any] | None = None
    seq: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What two results must have in common to be compared."""
        return self.case, self.size, self.tokens, self.dim, self.hidden, self.dtype

    @property
    def title(self) -> str:
        """The case and its sizes, in a line."""
        sizes = f"{self.tokens} tokens, D = {self.dim}, F = {self.hidden}"
        return f"{self.case}, {self.size}: {sizes}, {self.dtype}"


def append(group: Group, path: Path) -> None:
    """Add a line for each row to a file; a number that is not finite stays NaN or Infinity."""
    shared = {name: value for name, value in _plain(group).items() if name != "rows"}
    lines = [json.dumps(shared | {"row": asdict(row)}) + "\n" for row in group.rows]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def _plain(group: Group) -> dict[str, Any]:
    found = {field.name: getattr(group, field.name) for field in fields(group)}
    for name in ("load", "ceilings"):
        found[name] = found[name] and found[name]._asdict()
    return found


def read(path: Path) -> list[Group]:
    """Read what `append` wrote, in order; of a case measured twice on one device the last counts.

    Raises ValueError, naming file and line, for anything else; OSError where there is no file.
    """
    found: dict[str, list[tuple[dict[str, Any], Row]]] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            row = _row(line.pop("row"))
            shared = json.dumps(line, sort_keys=True)
            found.setdefault(shared, []).append((line, row))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a result of bench run ({error})") from error
    groups: dict[Any, Group] = {}
    for pairs in found.values():
        group = _group(pairs[0][0], [row for _, row in pairs])
        groups[(*group.key, (group.environment or {}).get("device"))] = group
    return list(groups.values())


def _row(record: dict[str, Any]) -> Row:
    for name in ("forward_ms", "backward_ms", "both_ms"):
        if record[name] is not None:
            samples = tuple(record[name].pop("samples"))
            record[name] = Timing(**record[name], samples=samples)
    record["errors"] = tuple(record["errors"])
    return Row(**record)


def _group(record: dict[str, Any], rows: Iterable[Row]) -> Group:
    ceilings = record["ceilings"] and Ceilings(**record["ceilings"])
    load = Load(**record["load"])
    return Group(**record | {"rows": tuple(rows), "load": load, "ceilings": ceilings})
