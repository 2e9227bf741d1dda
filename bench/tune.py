"""`python -m bench tune`: measure tiles and variants here, and store the fastest in a cache.

A candidate is an implementation like any other: its numbers are checked against float64 first, one
whose compiled kernels spill registers is out, and candidates take turns. The cache is replaced
after every key, so that an interrupt keeps what was measured.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

import torch

import fusedckpt
from bench.cases import CASES, Function
from bench.jobs import Job
from bench.measure import OTHER_STEPS, Implementation, Work, measure
from bench.results import median
from bench.settings import SIZES, Size
from bench.tables import progress, significant
from fusedckpt.kernels import gemm, tuned
from fusedckpt.kernels.runtime import arch
from fusedckpt.kernels.tiles import SHORT_K, TILES, Tile, family, tile_for
from fusedckpt.kernels.tuned import Tuned

# slot of the tile tables -> the case whose second variant launches it
TILE_CASES = {
    "long": "linear_act",
    "short": "linear_act",
    "hybrid_long": "gated_mlp",
    "hybrid_short": "gated_mlp",
}
VARIANT_CASES = ("linear_act", "mlp", "gated_mlp")

# block_m, block_n, block_k, num_warps
HALF = (
    (128, 256, 64, 8),
    (256, 128, 64, 8),
    (128, 128, 64, 8),
    (128, 128, 32, 8),
    (128, 64, 64, 4),
    (64, 128, 64, 4),
)
SINGLE = ((128, 128, 32, 8), (128, 64, 32, 8), (64, 64, 32, 8), (64, 64, 32, 4))


def candidates(arch: str, itemsize: int) -> Iterator[Tile]:
    """Yield tiles; which of them compile without spills on this chip is found by trying."""
    if arch == "interpreter":
        yield Tile(32, 32, 16, 4, 1, 1)
        return
    for shape, stages in product(HALF if itemsize == 2 else SINGLE, (3, 4)):
        # wide tiles spill without slices
        for slices in (2, 4) if shape[1] >= 128 else (1, 2):
            yield Tile(*shape, stages, slices)


class _Recorder:
    """Stands for the GEMM kernel, and notes what its launches compiled to."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.compiled.append(self.kernel[grid](*args, **kwargs))


def check_spills(one: Implementation, work: Work) -> None:
    """Run once, and look at what was compiled. Raises ValueError for a spill."""
    recorder = _Recorder(gemm.gemm_kernel)
    with patch.object(gemm, "gemm_kernel", recorder):
        work.results(one.fn)
    spills = [getattr(kernel, "n_spills", 0) or 0 for kernel in recorder.compiled]
    if any(spills):
        raise ValueError(f"spills {max(spills)} registers")


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done.

    Raises ValueError for a device that has no kernels to tune, without a cache or with another
    program's file in its place; OSError where none can be written.
    """
    path = fusedckpt.paths(chosen.device, getattr(torch, chosen.dtype))["mlp"]
    if path == "aten":
        text = "runs on ATen, which has nothing to tune"
        raise ValueError(f"{chosen.device} with {chosen.dtype} {text}")
    cache = chosen.cache or tuned.cache_path()
    if cache is None:
        raise ValueError("FUSEDCKPT_CACHE is empty: name a file by --cache")
    check_place(cache)
    chosen.cache = cache
    return chosen


def check_place(cache: Path) -> None:
    """Raise what stands against a cache there, before hours go into it."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if not tuned.is_ours(cache.read_text(encoding="utf-8", errors="replace")):
            raise ValueError(f"{cache} is no cache that bench tune wrote: name another by --cache")
    # whether the folder takes files is found by making one
    TemporaryFile(dir=cache.parent).close()


class Tuner:
    """What has been chosen so far, and the file that keeps it."""

    def __init__(self, chosen: Namespace):
        self.chosen = chosen
        self.device, self.dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
        self.arch, self.itemsize = arch(), self.dtype.itemsize
        self.choices = tuned.load(chosen.cache)

    def store(self, tiles: dict[Any, Any], variants: dict[Any, str]) -> None:
        """Add choices and replace the file."""
        self.choices = Tuned(self.choices.tiles | tiles, self.choices.variants | variants)
        tuned.store(self.choices, self.chosen.cache)

    def race(
        self, case: str, size: Size, tokens: int, rivals: dict[str, tuple[Function, Tuned]]
    ) -> str | None:
        """Measure functions, each under choices of its own, print them; returns the fastest."""
        racing = [Implementation(name, fn) for name, (fn, _) in rivals.items()]
        repeat, eager = self.chosen.repeat, CASES[case].eager(size)
        try:
            work = Job(case, "", size, tokens, device=self.device, dtype=self.dtype).work(tokens)
        except Exception as error:
            print(f"  {type(error).__name__}: {error}")
            return None
        with ExitStack() as stack, progress(case, len(racing) * (OTHER_STEPS + repeat)) as tick:

            def begin(one: Implementation) -> None:
                stack.close()
                stack.enter_context(tuned.using(rivals[one.name][1]))
                tick(one.name, says=False)

            for one in racing:
                begin(one)
                one.attempt(partial(check_spills, work=work))
            measure(work, racing, eager, repeat, begin=begin, graphs=True)
        rows = [one.row() for one in racing]
        times = {row["name"]: median(row["both_ms"]) for row in rows if row["both_ms"]}
        for row in rows:
            name = row["name"]
            cost = f"{significant(times[name])} ms" if name in times else row["failure"]
            print(f"  {name}: {cost}", flush=True)
        return min(times, key=lambda name: times[name], default=None)

    def tile(self, slot: str, case: str, size: Size, tokens: int) -> None:
        """Choose the tile of a slot, by the case that launches it."""
        key = (self.arch, self.itemsize, slot)
        shipped = tile_for(self.arch, self.itemsize, size.dim, slot.startswith("hybrid"))
        tiles = (shipped, *candidates(self.arch, self.itemsize))
        found = {str(tuple(tile)): tuple(tile) for tile in tiles}
        fn = partial(CASES[case].fused(size), save="inputs", kernel=CASES[case].variants[1])
        chosen = self.choices.tiles
        rivals = {name: (fn, Tuned(chosen | {key: tile}, {})) for name, tile in found.items()}
        print(f"tile {slot}, {case}, D = {size.dim}, F = {size.hidden}", flush=True)
        best = self.race(case, size, tokens, rivals)
        if best is not None:
            self.store({key: found[best]}, {})

    def variant(self, case: str, size: Size, tokens: int) -> None:
        """Choose the variant of a layer at a size."""
        fn = partial(CASES[case].fused(size), save="inputs")
        rivals = {
            variant: (partial(fn, kernel=variant), self.choices) for variant in CASES[case].variants
        }
        print(f"variant of {case}, D = {size.dim}, F = {size.hidden}, {tokens} tokens", flush=True)
        best = self.race(case, size, tokens, rivals)
        if best is not None:
            # the GEMM of an MLP's variant contracts over its output features, as wide as its input
            sizes = (size.hidden, size.dim, tuned.power_below(tokens))
            self.store({}, {(case, self.arch, self.itemsize, *sizes): best})

    def steps(self) -> Iterator[Callable[[], None]]:
        """Yield what is to be measured, tiles before the variants that they serve."""
        sizes = [size for name in self.chosen.size for size in SIZES[name]]
        for slot, case in () if self.chosen.variants else TILE_CASES.items():
            fits = [s for s in sizes if (s.dim <= SHORT_K) == slot.endswith("short")]
            if fits:
                yield partial(self.tile, slot, case, fits[-1], self.chosen.tokens[-1])
        for size in sizes:
            for tokens, case in product(self.chosen.tokens, VARIANT_CASES):
                yield partial(self.variant, case, size, tokens)


def rows_of(choices: Tuned, arch: str) -> Iterator[str]:
    """Yield entries for TILES in kernels/tiles.py: measured tiles, and the shipped ones beside."""
    for itemsize in sorted({size for where, size, _ in choices.tiles if where == arch}):
        row = TILES[family(arch), itemsize]
        yield f'    ("{family(arch)}", {itemsize}): Tiles('
        for slot, shipped in row._asdict().items():
            yield f"        {slot}=Tile{choices.tile(arch, itemsize, slot) or tuple(shipped)},"
        yield "    ),"


def variants_of(choices: Tuned, arch: str) -> Iterator[str]:
    """Yield a line for each variant that was measured."""
    for (op, where, itemsize, n, k, power), variant in choices.variants.items():
        if where == arch:
            yield f"    {op}, {itemsize} bytes, [{2**power}, {n}, {k}]: {variant}"


def report(choices: Tuned, arch: str, cache: Path) -> Iterator[str]:
    """Yield what the file holds for an architecture, and what of it can be shipped."""
    yield f"\n{arch}, stored in {cache}"
    if rows := list(rows_of(choices, arch)):
        yield from ("rows for TILES in kernels/tiles.py:", *rows)
    if variants := list(variants_of(choices, arch)):
        # tables have none: split is shipped
        yield from ("variants, which this file alone holds:", *variants)


def run(chosen: Namespace) -> int:
    """Measure until all is, or time is up; print what is stored, as rows of the shipped table."""
    tuner, status = Tuner(chosen), 0
    deadline = time.monotonic() + 60 * chosen.minutes
    try:
        for step in tuner.steps():
            if time.monotonic() > deadline:
                print(f"time is up after {chosen.minutes:g} minutes")
                break
            step()
    except KeyboardInterrupt:
        status = 130
    for line in report(tuner.choices, tuner.arch, chosen.cache):
        print(line)
    return status
