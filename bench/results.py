"""Records of `python -m bench run`: JSON lines, one per implementation, each complete in itself.

A line names all that its numbers depend on, so that files can be joined, cut and searched by lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import records
from bench.env import complete
from bench.records import Line, blamed, build, lines

__all__ = ["MIB", "Ceilings", "Group", "Load", "Row", "Timing", "append", "groups", "read"]

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
        return 1e3 * max(self._seconds(load))

    def is_matmul(self, load: Load) -> bool:
        """Whether that of the matmul is the one which takes longer."""
        flops, nbytes = self._seconds(load)
        return flops > nbytes

    def _seconds(self, load: Load) -> tuple[float, float]:
        return load.flops / self.tflops / 1e12, load.nbytes / self.gbytes / 1e9


@dataclass(frozen=True)
class Timing:
    """Milliseconds or ratios: the median, and what a fifth of the samples lies below or above."""

    median: float
    p20: float
    p80: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Sum samples up."""
        p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
        return cls(_rounded(p50), _rounded(p20), _rounded(p80), tuple(map(_rounded, samples)))

    def over(self, other: Timing) -> Timing:
        """The ratios within each round, where load that comes and goes cancels."""
        # an interrupt leaves some a round short
        rounds = zip(self.samples, other.samples, strict=False)
        return Timing.of([mine / theirs for mine, theirs in rounds])


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
    def device(self) -> str:
        """Where it was measured."""
        return self.environment["device"] if self.environment else "unknown device"

    @property
    def key(self) -> tuple[Any, ...]:
        """What two results must have in common to be compared."""
        sizes = self.tokens, self.seq, self.dim, self.hidden, self.kv
        return self.case, self.size, *sizes, self.dtype, self.device

    @property
    def heading(self) -> str:
        """The case, and how long its sequences are."""
        return self.case if self.seq is None else f"{self.case}, sequences of {self.seq}"

    @property
    def title(self) -> str:
        """The case and its sizes, in a line."""
        sizes = f"{self.tokens} tokens, D = {self.dim}, F = {self.hidden}, {self.dtype}"
        sequences = "" if self.seq is None else f", sequences of {self.seq}"
        return f"{self.case}, {self.size}: {sizes}{sequences}"


def append(group: Group, path: Path) -> None:
    """Add a line for each row to a file; a number that is not finite stays NaN or Infinity."""
    shared = {name: value for name, value in _plain(group).items() if name != "rows"}
    records.append((shared | {"row": asdict(row)} for row in group.rows), path)


def _plain(group: Group) -> dict[str, Any]:
    found = {field.name: getattr(group, field.name) for field in fields(group)}
    for name in ("load", "ceilings"):
        found[name] = found[name] and found[name]._asdict()
    return found


def read(path: Path) -> list[Group]:
    """Read what `append` wrote. Raises as `lines` and `groups` do."""
    return groups(lines(path))


def groups(found: Iterable[Line]) -> list[Group]:
    """Join rows to groups, in order; of a case measured twice on one device the last counts.

    Lines of `bench capacity` are left out. Raises ValueError, naming file and line, for any others.
    """
    # a line that is there twice, as in a file joined to itself, is one
    members: dict[str, tuple[Group, dict[str, Row]]] = {}
    for where, record in (line for line in found if not line.is_capacity):
        with blamed(where):
            row = build(Row, record.get("row"))
            shared = {name: value for name, value in record.items() if name != "row"}
            head = build(Group, shared | {"rows": []})
            if head.environment is not None:
                complete(head.environment)
        _, rows = members.setdefault(json.dumps(shared, sort_keys=True), (head, {}))
        rows[row.name] = row
    joined = (replace(head, rows=tuple(rows.values())) for head, rows in members.values())
    return list({group.key: group for group in joined}.values())
