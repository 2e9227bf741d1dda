"""The search: draw, judge, and on a failure make it plain and say how to see it again."""

from __future__ import annotations

import itertools
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch

from fusedckpt.autograd.dispatch import forced_path

from .config import Config, parse
from .draw import draw
from .judge import Failure, judge

PLAIN = Config()


@contextmanager
def surroundings(path: str) -> Iterator[None]:
    """Run on one path, one thread, and with uninitialized memory full of NaN."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings(), forced_path("aten" if path == "aten" else None):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_num_threads(threads)


def reproduce(text: str, path: str) -> int:
    """Run one configuration and say what fails."""
    with surroundings(path):
        failure = judge(parse(text))
    print(failure or "holds")
    return failure is not None


def search(
    seed: int, first: int, seconds: float | None, count: int | None, path: str, max_failures: int
) -> int:
    """Run configurations until time, count or failures are used up; return the exit status."""
    start = time.monotonic()
    done: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    with surroundings(path):
        for index in itertools.count(first):
            is_late = seconds is not None and time.monotonic() - start > seconds
            if is_late or len(failures) >= max_failures or index - first == count:
                break
            config = draw(seed, index, path)
            failure = judge(config)
            done[config.function] += 1
            if failure is not None:
                least, failure = minimize(config, failure)
                known = str(least.but(seed=0))
                failures[known] += 1
                if failures[known] == 1:
                    print(f"FAILS seed {seed} index {index}: {failure}")
                    command = f"python -m tests.fuzz --path {path} --config"
                    print(f"  {command} {shlex.quote(str(least))}", flush=True)
    counts = ", ".join(f"{name} {number}" for name, number in sorted(done.items()))
    rate = done.total() / max(time.monotonic() - start, 1e-9)
    print(
        f"{path}: {done.total()} configurations ({counts}), {failures.total()} failures, "
        f"{rate:.0f} per second, seed {seed}"
    )
    return failures.total() > 0


def minimize(
    config: Config,
    failure: Failure,
    judge: Callable[[Config], Failure | None] = judge,
    seconds: float = 30,
) -> tuple[Config, Failure]:
    """Return a plainer configuration that fails as `config` does, and its failure."""
    end, tries = time.monotonic() + seconds, simplified(config)
    while time.monotonic() < end:
        simpler = next(tries, None)
        if simpler is None:
            break
        found = judge(simpler)
        if found is not None and found.kind == failure.kind:
            config, failure, tries = simpler, found, simplified(simpler)
    return config, failure


def simplified(c: Config) -> Iterator[Config]:
    """Yield configurations that are plainer than c in one choice, the largest steps first."""
    for field in fields(Config):
        value, plain = getattr(c, field.name), getattr(PLAIN, field.name)
        # a failure of another function is another failure, and seed draws the values
        if field.name not in ("function", "seed") and value != plain:
            others = [plain, *parts(field.name, value)]
            yield from (c.but(**{field.name: other}) for other in others if other != value)


def parts(name: str, value: Any) -> Iterator[Any]:
    """Yield what is plainer than a value, but not the plainest."""
    if name in ("d", "f", "out"):
        yield from (size for size in (1, 2, 3, 4, value // 2, value - 1) if 0 < size < value)
    elif isinstance(value, (tuple, str)) and name in ("stack", "readers", "douts"):
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)) if len(value) > 1)
    elif isinstance(value, tuple):
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
    if name == "rows":
        yield from ((1,), (3,))
        yield from ((*value[:i], n // 2, *value[i + 1 :]) for i, n in enumerate(value) if n > 1)
        yield from ((*value[:i], n - 1, *value[i + 1 :]) for i, n in enumerate(value) if n > 1)
    elif name == "douts":
        yield from ((*value[:i], "plain", *value[i + 1 :]) for i in range(len(value)))
