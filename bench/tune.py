"""Measure tiles and plans on this machine, and keep the fastest in the user's cache.

A candidate is a contender like any other: its numbers are checked against float64 first, compiled
kernels that spill registers are out, and candidates take turns. The cache is replaced after every
key, so that an interrupt keeps what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import Progress

from bench.candidates import PLAN_CASES, TILE_CASES, candidates
from bench.cases import CASES, Function
from bench.contender import Contender
from bench.defaults import TUNE_DEFAULTS
from bench.env import choose_device
from bench.jobs import INTERRUPTED, Job
from bench.measure import OTHER_STEPS, measure
from bench.sizes import SIZES, Size
from bench.table import significant
from bench.ways import Way
from fusedckpt._dispatch import path_of
from fusedckpt.kernels import gemm, tuned
from fusedckpt.kernels.runtime import arch
from fusedckpt.kernels.tiles import SHORT_K, Tile, family, tile_for
from fusedckpt.kernels.tuned import PlanKey, TileKey, Tuned

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

    Raises ValueError for a device that is not there or has no kernels to tune, or without a cache.
    """
    place = choose_device(device)
    given = {name: value for name, value in options.items() if value is not None}
    chosen = TUNE_DEFAULTS | given
    if path_of(place, getattr(torch, chosen["dtype"])) == "aten":
        raise ValueError(f"{place} with {chosen['dtype']} runs on ATen, which has nothing to tune")
    path = cache or tuned.cache_path()
    if path is None:
        raise ValueError("FUSEDCKPT_CACHE is empty: name a file by --cache")
    sizes = dict.fromkeys(size or chosen.pop("size"))
    chosen["size"], chosen["tokens"] = tuple(sizes), tuple(tokens or chosen["tokens"])
    return Settings(**chosen, device=str(place), tiles=tiles, cache=path)


class Recorder:
    """Stands for the GEMM kernel, and notes what its launches compiled to."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.compiled.append(self.kernel[grid](*args, **kwargs))

        return launch


class Guarded:
    """A function under choices of its own; raises where they compile to kernels that spill."""

    def __init__(self, fn: Function, choices: Tuned):
        self.fn, self.choices = fn, choices

    def __call__(self, *inputs: Any) -> Any:
        """Run forward under the choices, and the backward too."""
        return _Under.apply(self, *inputs)

    def check(self, work: Any) -> None:
        """Run once, and look at what was compiled. Raises ValueError for a spill."""
        recorder = Recorder(gemm.gemm_kernel)
        with patch.object(gemm, "gemm_kernel", recorder):
            work.results(self)
        spills = [getattr(kernel, "n_spills", 0) or 0 for kernel in recorder.compiled]
        if any(spills):
            raise ValueError(f"spills {max(spills)} registers")


class _Under(torch.autograd.Function):
    """Calls a Guarded's function and its backward, both under its choices."""

    @staticmethod
    def forward(ctx: Any, guarded: Guarded, *inputs: Any) -> Any:
        with tuned.using(guarded.choices), torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            # the cases that are tuned have one output
            output: Any = guarded.fn(*ctx.inputs)
        ctx.output, ctx.choices = output, guarded.choices
        return output.detach()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:  # type: ignore[override]
        with tuned.using(ctx.choices):
            grads = torch.autograd.grad(ctx.output, ctx.inputs, dy)
        ctx.output = ctx.inputs = None
        return None, *grads


class Tuner:
    """What has been chosen so far, and the file that keeps it."""

    def __init__(self, chosen: Settings, console: Console):
        self.chosen, self.console = chosen, console
        self.device, self.dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
        self.arch, self.itemsize = arch(), self.dtype.itemsize
        self.choices = tuned.load(chosen.cache)
        self.deadline = time.monotonic() + 60 * chosen.minutes

    def keep(self, tiles: dict[TileKey, Any], plans: dict[PlanKey, str]) -> None:
        """Add choices and replace the file."""
        self.choices = Tuned(self.choices.tiles | tiles, self.choices.plans | plans)
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


def rows_of(choices: Tuned, name: str) -> Iterator[str]:
    """Yield the lines to paste into kernels/tiles.py for an architecture."""
    for (_, itemsize, slot), tile in choices.tiles.items():
        if _ == name:
            yield f"TILES[{family(name)!r}, {itemsize}]: {slot}={Tile(*tile)}"
    for (op, where, itemsize, n, k, power), plan in choices.plans.items():
        if where == name:
            yield f"# {op}, {itemsize} bytes, [{2**power}, {n}, {k}]: {plan}"


def run(chosen: Settings) -> int:
    """Measure until all is, or time is up; print what to paste into the shipped tables."""
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
    console.print(f"\n{tuner.arch}, kept in {chosen.cache}:", markup=False, highlight=False)
    for line in rows_of(tuner.choices, tuner.arch):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return status
