"""The search: draw, judge, and on a failure minimise and say how to see it again."""

from __future__ import annotations

import itertools
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fusedckpt.autograd.dispatch import forced_path

from .config import Config, parse
from .draw import draw
from .judge import judge
from .minimise import minimise


@contextmanager
def surroundings(path: str) -> Iterator[None]:
    """Run on one path, one thread, and with uninitialised memory full of NaN."""
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


def command(path: str, config: Config) -> str:
    """Return the command that runs one configuration."""
    return f"python -m tests.fuzz --path {path} --config {shlex.quote(str(config))}"


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
            spent = time.monotonic() - start
            if (seconds is not None and spent > seconds) or len(failures) >= max_failures:
                break
            if count is not None and index >= first + count:
                break
            config = draw(seed, index, path)
            failure = judge(config)
            done[config.function] += 1
            if failure is not None:
                least, failure = minimise(config, failure, judge)
                known = str(least.but(seed=0))
                failures[known] += 1
                if failures[known] == 1:
                    print(f"FAILS seed {seed} index {index}: {failure}")
                    print(f"  {command(path, least)}", flush=True)
    spent = time.monotonic() - start
    counts = ", ".join(f"{name} {number}" for name, number in sorted(done.items()))
    print(
        f"{path}: {done.total()} configurations ({counts}), {failures.total()} failures, "
        f"{done.total() / max(spent, 1e-9):.0f} per second, seed {seed}"
    )
    return failures.total() > 0
