"""Measure tiles and plans on this machine, and keep the fastest in the user's cache.

A candidate is a contender like any other: its numbers are checked against float64 first, compiled
kernels that spill registers are out, and candidates take turns. The cache is replaced after every
key, so that an interrupt keeps what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench.candidates import PLAN_CASES, TILE_CASES, Guarded, candidates
from bench.cases import CASES, Function, Way
from bench.contender import Contender
from bench.defaults import TUNE_DEFAULTS
from bench.env import choose_device
from bench.jobs import Job
from bench.measure import OTHER_STEPS, measure
from bench.sizes import SIZES, Size
from bench.supervisor import INTERRUPTED
from bench.text import significant
from fusedckpt.autograd.dispatch import path_of
from fusedckpt.kernels import tuned
from fusedckpt.kernels.runtime import arch
from fusedckpt.kernels.tiles import SHORT_K, TILES, family, tile_for
from fusedckpt.kernels.tuned import TileKey, Tuned, VariantKey

__all__ = ["Settings", "run", "settings"]


@dataclass(frozen=True)
class Settings:
    """Every choice that a result depends on; cache: the file that is written."""

    size: tuple[str, ...]
    tokens: tuple[int, ...]
    dtype: str
    device: str
    repeat: int
    minutes: float
    tiles: bool
    cache: Path


def settings(
    device: str | None,
    size: Sequence[str] | None,
    tokens: Sequence[int] | None,
    cache: Path | None,
    tiles: bool,
    **options: Any,
) -> Settings:
    """Fill in the device's defaults and check everything, before any work is done.

    Raises ValueError for a device that is not there or has no kernels to tune, without a cache or
    with another program's file in its place; OSError where none can be written.
    """
    place = choose_device(device)
    given = {name: value for name, value in options.items() if value is not None}
    chosen = TUNE_DEFAULTS | given
    if path_of(place, getattr(torch, chosen["dtype"])) == "aten":
        raise ValueError(f"{place} with {chosen['dtype']} runs on ATen, which has nothing to tune")
    path = cache or tuned.cache_path()
    if path is None:
        raise ValueError("FUSEDCKPT_CACHE is empty: name a file by --cache")
    _check_place(path)
    sizes = dict.fromkeys(size or chosen.pop("size"))
    chosen["size"], chosen["tokens"] = tuple(sizes), tuple(tokens or chosen["tokens"])
    return Settings(**chosen, device=str(place), tiles=tiles, cache=path)


def _check_place(cache: Path) -> None:
    """Raise what stands against a cache there, before hours go into it."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if not tuned.is_ours(cache.read_text(encoding="utf-8", errors="replace")):
            raise ValueError(f"{cache} is no cache that bench tune wrote: name another by --cache")
    # whether the folder takes files is found by making one
    TemporaryFile(dir=cache.parent).close()


class Tuner:
    """What has been chosen so far, and the file that keeps it."""

    def __init__(self, chosen: Settings, console: Console):
        self.chosen, self.console = chosen, console
        self.device, self.dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
        self.arch, self.itemsize = arch(), self.dtype.itemsize
        self.choices = tuned.load(chosen.cache)
        self.deadline = time.monotonic() + 60 * chosen.minutes

    def keep(self, tiles: dict[TileKey, Any], variants: dict[VariantKey, str]) -> None:
        """Add choices and replace the file."""
        self.choices = Tuned(self.choices.tiles | tiles, self.choices.variants | variants)
        tuned.store(self.choices, self.chosen.cache)

    def race(self, case: str, size: Size, tokens: int, ways: dict[str, Function]) -> str | None:
        """Measure ways of running a case, print them, and return the fastest; None without any."""
        contenders = tuple(Contender(name, Way(fn)) for name, fn in ways.items())
        job = Job(case, CASES[case], "", size, tokens, self.device, self.dtype, contenders)
        try:
            work = job.work(tokens)
        except Exception as error:
            self.console.print(f"  {type(error).__name__}: {error}", markup=False)
            return None
        for contender in contenders:
            if isinstance(contender.fn, Guarded):
                contender.attempt(lambda _, fn=contender.fn: fn.check(work))
        with Progress(console=self.console, transient=True) as progress:
            total = len(contenders) * (OTHER_STEPS + self.chosen.repeat)
            task = progress.add_task(f"{case}, {tokens} tokens", total=total)
            eager = CASES[case].eager(size)
            repeat = self.chosen.repeat
            measure(work, contenders, eager, repeat, lambda _: progress.advance(task), graphs=True)
        rows = [contender.row() for contender in contenders]
        times = {row.name: row.both_ms.median for row in rows if row.both_ms is not None}
        for row in rows:
            cost = f"{significant(times[row.name])} ms" if row.name in times else row.failure
            self.console.print(f"  {row.name}: {cost}", markup=False, highlight=False)
        return min(times, key=lambda name: times[name], default=None)

    def tile(self, slot: str, case: str, size: Size, tokens: int) -> None:
        """Choose the tile of a slot, by the case that launches it."""
        key = (self.arch, self.itemsize, slot)
        found = {str(tuple(tile)): tuple(tile) for tile in candidates(self.arch, self.itemsize)}
        shipped = tile_for(self.arch, self.itemsize, size.dim, slot.startswith("hybrid"))
        found = {str(tuple(shipped)): tuple(shipped)} | found
        plan = CASES[case].plans[1]
        fn = partial(CASES[case].fused(size), save="inputs", kernel=plan)
        ways = {
            name: Guarded(fn, Tuned(self.choices.tiles | {key: tile}, {}))
            for name, tile in found.items()
        }
        self.console.print(f"tile {slot}, {case}, D = {size.dim}, F = {size.hidden}")
        best = self.race(case, size, tokens, ways)
        if best is not None:
            self.keep({key: found[best]}, {})

    def plan(self, case: str, size: Size, tokens: int) -> None:
        """Choose the plan of a layer at a size."""
        fn = CASES[case].fused(size)
        ways: dict[str, Function] = {
            plan: Guarded(partial(fn, save="inputs", kernel=plan), self.choices)
            for plan in CASES[case].plans
        }
        self.console.print(f"plan of {case}, D = {size.dim}, F = {size.hidden}, {tokens} tokens")
        best = self.race(case, size, tokens, ways)
        if best is not None:
            # the GEMM of an MLP's plan contracts over its output features, as wide as its input
            sizes = (size.hidden, size.dim, tuned.power_below(tokens))
            self.keep({}, {(case, self.arch, self.itemsize, *sizes): best})

    def steps(self) -> Iterator[Callable[[], None]]:
        """Yield what is to be measured, tiles before the plans that they serve."""
        sizes = [size for name in self.chosen.size for size in SIZES[name]]
        if self.chosen.tiles:
            for slot, case in TILE_CASES.items():
                fits = [s for s in sizes if (s.dim <= SHORT_K) == slot.endswith("short")]
                if fits:
                    yield partial(self.tile, slot, case, fits[-1], self.chosen.tokens[-1])
        for size in sizes:
            for tokens in self.chosen.tokens:
                for case in PLAN_CASES:
                    yield partial(self.plan, case, size, tokens)


def rows_of(choices: Tuned, arch: str) -> Iterator[str]:
    """Yield entries for TILES in kernels/tiles.py: measured tiles, and the shipped ones beside."""
    for itemsize in sorted({size for where, size, _ in choices.tiles if where == arch}):
        row = TILES[family(arch), itemsize]
        yield f'    ("{family(arch)}", {itemsize}): Tiles('
        for slot, shipped in row._asdict().items():
            yield f"        {slot}=Tile{choices.tile(arch, itemsize, slot) or tuple(shipped)},"
        yield "    ),"


def plans_of(choices: Tuned, arch: str) -> Iterator[str]:
    """Yield a line for each plan that was measured."""
    for (op, where, itemsize, n, k, power), plan in choices.variants.items():
        if where == arch:
            yield f"    {op}, {itemsize} bytes, [{2**power}, {n}, {k}]: {plan}"


def report(choices: Tuned, arch: str, cache: Path) -> Iterator[str]:
    """Yield what the file holds for an architecture, and what of it can be shipped."""
    yield f"\n{arch}, kept in {cache}"
    if rows := list(rows_of(choices, arch)):
        yield from ("rows for TILES in kernels/tiles.py:", *rows)
    if plans := list(plans_of(choices, arch)):
        # tables have no plans: gains_by_fusion is a rule
        yield from ("plans, which this file alone holds:", *plans)


def run(chosen: Settings) -> int:
    """Measure until all is, or time is up; print what is kept, as rows of the shipped table."""
    console = Console()
    tuner = Tuner(chosen, console)
    status = 0
    try:
        for step in tuner.steps():
            if time.monotonic() > tuner.deadline:
                console.print(f"time is up after {chosen.minutes:g} minutes")
                break
            torch.compiler.reset()
            step()
    except KeyboardInterrupt:
        status = INTERRUPTED
    for line in report(tuner.choices, tuner.arch, chosen.cache):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return status
