"""The save level of a layer, which a caller around it may override."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fusedckpt.autograd import arguments

# from the fewest saved bytes to the most
LEVELS = ("inputs", "gate", "preact")
# of each kind of layer
LEVELS_OF = {
    "linear_act": ("inputs", "preact"),
    "mlp": ("inputs", "preact"),
    "gated_mlp": LEVELS,
    "norm_linear": ("inputs",),
    "head": ("inputs", "preact"),
    "experts": LEVELS,
}


# a thread-local, because Dynamo traces through it where a ContextVar would break the graph
class _Override(threading.local):
    def __init__(self) -> None:
        self.level: str | None = None


override = _Override()


@contextmanager
def saving(level: str) -> Iterator[None]:
    """Override the save level of every fused layer called inside.

    Args:
        level: "inputs" (only the inputs; activations and GEMMs are recomputed), "gate" (gated MLP:
            the gate's GEMM output too; other layers take it as "inputs"), or "preact" (GEMM outputs
            too; only elementwise work is recomputed).

    A level passed to a call wins over this one, and this one over a module's own. It affects
    forward passes of the current thread only: backward uses the saved tensors.

    Raises:
        ValueError: `level` is another string.
        TypeError: `level` is not a string.
    """
    arguments.choice("saving", "level", level, LEVELS)
    before = override.level
    if before == level:
        # no change, which a compiled checkpoint around could not hold
        yield
        return
    override.level = level
    try:
        yield
    finally:
        override.level = before


def resolve(name: str, save: str | None, default: str, levels: tuple[str, ...]) -> str:
    """Return the level of a call: its argument, else `saving`'s, else the default."""
    return level_of(name, save, override.level, default, levels)


def level_of(
    name: str, save: str | None, override: str | None, default: str, levels: tuple[str, ...]
) -> str:
    """Return the level of a call: its argument, else the override, else the default.

    name: the function or class, for errors; override: the level of `saving`; levels: those that the
    layer has; it takes any other override as "inputs".
    """
    if save is not None:
        check(name, save, levels)
        return save
    check(name, default, levels)
    if override is None:
        return default
    return override if override in levels else "inputs"


def check(name: str, save: Any, levels: Sequence[str]) -> None:
    """Refuse a save level that the layer does not have."""
    arguments.choice(name, "save", save, levels)
