"""What one run of the fuzz tries: every choice a field, drawn apart from all others.

A field that a function has no use for is ignored by it (activation by norms, chunks by linears), so
that any combination is a valid configuration, and a failing one can be made plain field by field.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

# operand -> what it is drawn with, as pairs: a frozen dictionary
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Config:
    """One configuration; the defaults are the plainest choices."""

    function: str = "linear_act"
    seed: int = 0
    dtype: str = "float32"
    # sizes: x is [*rows, d] or, for norms over two dimensions, [*rows, group, d]
    rows: tuple[int, ...] = (2,)
    group: int | None = None
    d: int = 3
    f: int = 2
    out: int = 4
    # what optional operands are there, and how operands are laid out and valued
    present: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    layouts: Pairs = ()
    values: Pairs = ()
    tied: bool = False
    # operands are views of the leaves instead of leaves
    views: bool = False
    # of experts: how many there are, and for each token; how their weights lie; ranks of adapters
    experts: int = 2
    top_k: int = 1
    is_transposed: bool = False
    gate_rank: int = 0
    down_rank: int = 0
    # options
    activation: str | None = "silu"
    norm: str | None = None
    eps: float | None = None
    offset: float = 0.0
    cast: str = "torch"
    residual: bool = False
    save: str | None = None
    saving: str | None = None
    chunks: int | None = None
    # "fused" stands for "hybrid" where that is the layer's
    kernel: str | None = None
    # what a Sequential holds; who reads a norm
    stack: str = "lal"
    readers: tuple[str, ...] = ("Linear",)
    # how it is run
    mode: str = "grad"
    autocast: str | None = None
    hooks: str | None = None
    around: str | None = None
    backward: str = "grad"
    # of the incoming gradients, in turns; "none": an output that nobody uses
    douts: tuple[str, ...] = ("plain",)

    def has(self, name: str) -> bool:
        """Whether an optional operand is there."""
        return name in self.present

    def but(self, **changes: Any) -> Config:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        """Write what differs from the plainest configuration, as JSON."""
        plain = asdict(Config())
        chosen = {key: value for key, value in asdict(self).items() if value != plain[key]}
        return json.dumps(chosen)


def parse(text: str) -> Config:
    """Read what `str` of a configuration wrote."""

    def tuples(value: Any) -> Any:
        return tuple(tuples(item) for item in value) if isinstance(value, list) else value

    given = {key: tuples(value) for key, value in json.loads(text).items()}
    unknown = given.keys() - {field.name for field in fields(Config)}
    if unknown:
        raise ValueError(f"no such fields: {', '.join(sorted(unknown))}")
    return Config(**given)
