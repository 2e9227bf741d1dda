"""The save level of a layer, which a caller around it may override."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fusedckpt.autograd import arguments

# how inputs are kept, beside as they are: in nine bits a value, see `autograd.rounded`
STORES = ("int8",)
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
        self.store: str | None = None
        # whether layers that share recipes save the tensors that torch does
        self.is_plain = False


override = _Override()


@contextmanager
def saving(level: str | None = None, *, store: str | None = None) -> Iterator[None]:
    """Override the save level of every fused layer called inside, and how their inputs are kept.

    Args:
        level: "inputs" (only the inputs; activations and GEMMs are recomputed), "gate" (gated MLP:
            the gate's GEMM output too; other layers take it as "inputs"), or "preact" (GEMM outputs
            too; only elementwise work is recomputed). With a store, None is each layer's level.
        store: "int8" keeps the inputs of norms, linears and MLPs in nine bits a value, see `fuse`;
            None as each layer does.

    A level passed to a call wins over this one, and this one over a module's own. It affects
    forward passes of the current thread only: backward uses the saved tensors.

    Raises:
        ValueError: `level` or `store` is another string.
        TypeError: `level` or `store` is not a string.
    """
    if level is not None or store is None:
        arguments.choice("saving", "level", level, LEVELS)
    check_store("saving", store)
    before = override.level, override.store
    now = level or before[0], store or before[1]
    if now == before:
        # no change, which a compiled checkpoint around could not hold
        yield
        return
    override.level, override.store = now
    try:
        yield
    finally:
        override.level, override.store = before


@contextmanager
def plain_layers() -> Iterator[None]:
    """Let layers that share recipes save torch's tensors, as a module around finds the recipes."""
    before = override.is_plain
    override.is_plain = True
    try:
        yield
    finally:
        override.is_plain = before


def check_store(name: str, store: Any) -> None:
    """Refuse a way to keep inputs that does not exist; None keeps them as they are."""
    if store is not None:
        arguments.choice(name, "store", store, STORES)


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
