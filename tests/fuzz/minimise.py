"""Make a failing configuration plain, choice by choice, as long as it still fails the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from .config import Config
from .judge import Failure

PLAIN = Config()
# kept: a failure of another function is another failure, and seed draws the values
KEPT = ("function", "seed")
SIZES = ("d", "f", "out")


def minimise(
    config: Config, failure: Failure, judge: Callable[[Config], Failure | None], seconds: float = 30
) -> tuple[Config, Failure]:
    """Return a plainer configuration that fails as `config` does, and its failure."""
    end = time.monotonic() + seconds
    is_plainer = True
    while is_plainer:
        is_plainer = False
        for simpler in simplified(config):
            if time.monotonic() > end:
                return config, failure
            found = judge(simpler)
            if found is not None and found.kind == failure.kind:
                config, failure, is_plainer = simpler, found, True
                break
    return config, failure


def simplified(c: Config) -> Iterator[Config]:
    """Yield configurations that are plainer than c in one choice, the largest steps first."""
    for field in fields(Config):
        value, plain = getattr(c, field.name), getattr(PLAIN, field.name)
        if field.name in KEPT or value == plain:
            continue
        yield c.but(**{field.name: plain})
        for part in parts(field.name, value):
            if part != value:
                yield c.but(**{field.name: part})


def parts(name: str, value: Any) -> Iterator[Any]:
    """Yield what is plainer than a value, but not the plainest."""
    if name in SIZES:
        yield from (size for size in (1, 2, 3, 4, value // 2, value - 1) if 0 < size < value)
    elif name == "rows":
        yield from ((), (1,), (3,))
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
        yield from ((*value[:i], n // 2, *value[i + 1 :]) for i, n in enumerate(value) if n > 1)
        yield from ((*value[:i], n - 1, *value[i + 1 :]) for i, n in enumerate(value) if n > 1)
    elif name in ("stack", "readers", "douts"):
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)) if len(value) > 1)
        if name == "douts":
            yield from ((*value[:i], "plain", *value[i + 1 :]) for i in range(len(value)))
    elif isinstance(value, tuple):
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
