"""Predict the time of kernels from their bytes and instructions: predicted, not measured.

Kernels are compiled for an A100 and an H100 that are not there; two programs of each launch run in
the tests' PTX emulator, which counts bytes and instructions. A launch takes a fixed time, and then
the longer of moving its bytes and issuing its instructions. The fixed time and the bandwidth are
fitted on RMSNorm forward rows that Liger-Kernel has published; `--errors` prints how far the model
is from its other rows. Kernels that spill, or wait longer than they work, get no time.
"""

from __future__ import annotations

import csv
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bench.options import Options
from bench.tables import Columns, show, significant
from fusedckpt.kernels import cross_entropy, gated_norm, int8, linear, norm

if TYPE_CHECKING:
    from tests.kernels.emulated import Launch

MEASURED = Path(__file__).parent / "results" / "liger-measured.csv"
SOURCE = (
    "Measured: medians of benchmark/data/all_benchmark_data.csv of linkedin/Liger-Kernel at "
    "ead96b6 (BSD 2-Clause, Copyright 2024 LinkedIn Corporation)."
)
# the rows that the fixed time and the bandwidth are fitted on
FITTED = ("megatron_rms_norm", "rms_norm")
# assumed: us of a load under load, of a barrier, of starting a program, of a further launch
LATENCY, BARRIER, START, NEXT = 0.65, 0.05, 0.5, 3.0
# share of L2 whose data are read again: fitted on Liger's cross entropy on an A100
L2_SHARE = 0.4


class Card(NamedTuple):
    """A card on paper."""

    # as `bench predict --card` names it
    name: str
    arch: str
    # multiprocessors, their shared memory in bytes
    units: int
    shared: int
    # GHz under load
    clock: float
    # bytes of the L2 cache
    l2: float
    # float32 instructions of threads that a multiprocessor executes at a clock
    floats: int


CARDS = {
    "A100": Card("A100", "sm_80", 108, 164 << 10, 1.41, 40e6, 64),
    "H100": Card("H100", "sm_90", 132, 228 << 10, 1.755, 50e6, 128),
}


class Row(NamedTuple):
    """A published row, and what was counted of its kernel."""

    arch: str
    kernel: str
    mode: str
    dtype: str
    rows: int
    columns: int
    measured_us: float
    # bytes that memory moves
    moved: float
    issue_us: float
    spills: int


@cache
def published() -> tuple[Row, ...]:
    """Return the published rows."""
    with MEASURED.open() as file:
        return tuple(
            Row(
                row["arch"],
                row["kernel"],
                row["mode"],
                row["dtype"],
                int(row["rows"]),
                int(row["columns"]),
                float(row["measured_us"]),
                float(row["read"]) + float(row["written"]),
                float(row["issue_us"]),
                int(row["spills"]),
            )
            for row in csv.DictReader(file)
        )


@cache
def fit(arch: str) -> tuple[float, float]:
    """Return us of a launch and us of a byte, by least squares of relative errors."""
    rows = [r for r in published() if r.arch == arch and r.kernel in FITTED and not r.spills]
    us = torch.tensor([row.measured_us for row in rows], dtype=torch.float64)
    bytes_ = torch.tensor([row.moved for row in rows], dtype=torch.float64)
    terms = torch.stack((torch.ones_like(us), bytes_), 1) / us[:, None]
    start, per_byte = torch.linalg.lstsq(terms, torch.ones_like(us)[:, None]).solution[:, 0]
    return float(start), float(per_byte)


def error_of(row: Row) -> float | None:
    """Return the relative error of the model on a published row, None where it gives no time."""
    start, per_byte = fit(row.arch)
    if row.spills:
        return None
    return (start + max(row.moved * per_byte, row.issue_us)) / row.measured_us - 1


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


class Case(NamedTuple):
    """Launches of an operation: a function of rows and columns, and bytes that it must move."""

    launch: Callable[[int, int], Any]
    # for each element
    least: int
    sizes: Sequence[tuple[int, int]]


LLAMA = norm.NormRule("rms", 1e-6, 0.0, "llama")
LAYER = norm.NormRule("layer", 1e-6)
GATED = gated_norm.GatedNormRule(1e-5, gates_first=True, cast="llama")
# the last of few tokens, whose sums of dw are as large as the rows
NORMS = ((4096, 2048), (4096, 4096), (4096, 12288), (4096, 16384), (512, 4096))
# few tokens, and GPT-2's rows, which begin within a vector
LOGITS = ((1024, 128256), (512, 128256), (4096, 50257))
# 8192 tokens of models: GPT-2 small, Llama 3.2 1B, Llama 3 8B, Llama 3 70B
INPUTS = ((8192, 768), (8192, 2048), (8192, 4096), (8192, 8192))


def rms_backward(m: int, n: int) -> None:
    """Launch RMSNorm's gradient."""
    x = meta(m, n)
    norm.norm_grad(meta(m, n), None, x, meta(n), LLAMA, (True, True, False), x.dtype)


def layer_backward(m: int, n: int) -> None:
    """Launch LayerNorm's gradient."""
    x = meta(m, n)
    norm.norm_grad(meta(m, n), None, x, meta(n), LAYER, (True, True, True), x.dtype)


def swiglu_backward(m: int, n: int) -> None:
    """Launch the gradients of a gated hidden layer, which is made again."""
    dh, gate, up = meta(m, n), meta(m, n), meta(m, n)
    grads = linear.HiddenGrad(gate, up, dh, gate, up)
    linear.hidden_grad(dh, grads, "silu", (False, False), "split")


def gated_backward(m: int, n: int) -> None:
    """Launch the gradients of a norm with a gate."""
    dy, x, gate = meta(m, n), meta(m, n), meta(m, n)
    gated_norm.gated_norm_grad(dy, x, gate, meta(n), GATED, (True, True, True), x.dtype)


def logits_forward(m: int, n: int) -> None:
    """Launch the statistics of logits."""
    target = meta(m, 1, dtype=torch.int64)
    cross_entropy.statistics(meta(m, n), target, cross_entropy.LogitRule(), "triton")


def logits_backward(m: int, n: int) -> None:
    """Launch the gradient of logits, over them."""
    u, y = meta(m, n), meta(m, 4, dtype=torch.float32)
    target = meta(m, 1, dtype=torch.int64)
    dy = torch.empty_like(y)
    cross_entropy.statistics_grad(dy, u, target, y, cross_entropy.LogitRule(), "triton", dz=u)


def unpacked(m: int, n: int) -> None:
    """Launch the kernel that makes 16 bits a value of nine."""
    packed = meta(int8.packed_nbytes(m, n), dtype=torch.int8)
    int8.unpack_int8(packed, meta(m, n), "triton")


CASES: Mapping[str, Case] = {
    "rms_norm": Case(
        lambda m, n: norm.norm(meta(m, n), None, meta(n), None, LLAMA, torch.bfloat16), 4, NORMS
    ),
    "rms_norm backward": Case(rms_backward, 6, NORMS),
    "layer_norm backward": Case(layer_backward, 6, NORMS),
    "swiglu": Case(
        lambda m, n: linear.hidden(meta(m, n), meta(m, n), "silu", "split"), 6, ((4096, 14336),)
    ),
    "swiglu backward": Case(swiglu_backward, 12, ((4096, 14336),)),
    "gated_rms_norm": Case(
        lambda m, n: gated_norm.gated_norm(meta(m, n), meta(m, n), meta(n), GATED, torch.bfloat16),
        6,
        ((4096, 8192),),
    ),
    "gated_rms_norm backward": Case(gated_backward, 10, ((4096, 8192),)),
    "cross_entropy": Case(logits_forward, 2, LOGITS),
    "cross_entropy backward": Case(logits_backward, 4, LOGITS),
    "int8 pack": Case(lambda m, n: int8.pack_int8(meta(m, n), "triton"), 3, INPUTS),
    "int8 unpack": Case(unpacked, 3, INPUTS),
}


class Time(NamedTuple):
    """A launch's time by the model, in us; None where the model does not apply."""

    us: float | None
    # what takes longest
    bound: str


class Prediction(NamedTuple):
    """A row of the table: a launch of an operation on a card."""

    card: Card
    case: str
    size: tuple[int, int]
    launch: Launch
    time: Time
    # its part of the operation's time that no byte less could take, None beside the first launch
    share: float | None


def resident(launch: Launch, card: Card) -> int:
    """Return how many programs of a launch a multiprocessor holds."""
    threads = 32 * launch.num_warps
    registers = -(-launch.registers // 8) * 8 * threads
    fitting = 65536 // registers, card.shared // (launch.shared + 1024), 2048 // threads, 32
    return max(1, min(fitting))


def time_of(launch: Launch, card: Card) -> Time:
    """Return the time of a counted launch, or why there is none."""
    start, per_byte = fit(card.arch)
    together = resident(launch, card)
    waves = launch.programs / (together * card.units)
    footprint = min(together * card.units, launch.programs) * launch.distance
    missed = max(0.0, 1 - L2_SHARE * card.l2 / max(1.0, footprint))
    again = launch.again if launch.again > 0.2 * launch.read else 0.0
    memory = (launch.read + launch.written + missed * again) * per_byte
    load = launch.programs / card.units
    load = load if waves > 4 else math.ceil(load)
    kinds = launch.classes
    demands = {
        "issue": launch.instructions / 128,
        "float": (kinds["float"] + kinds["multiply"]) / card.floats,
        "integer": kinds["integer"] / 64,
        "special": kinds["special"] / 16,
        "loads": (kinds["load"] + kinds["store"] + kinds["shared"]) / 32,
    }
    pipe = max(demands, key=demands.__getitem__)
    issue = load * 32 * launch.num_warps * demands[pipe] / (card.clock * 1e3)
    wait = launch.waits * LATENCY + launch.barriers * BARRIER + START
    chain = max(1.0, waves if waves > 4 else math.ceil(waves)) * wait
    work = max(memory, issue)
    if launch.spills:
        return Time(None, "spills: no time")
    if not launch.is_prefetched and chain > 1.15 * work and chain > start:
        return Time(None, "latency: no time")
    return Time(start + work, "memory" if memory >= issue else pipe)


def predictions(card: Card, names: Sequence[str]) -> list[Prediction]:
    """Compile, count and predict the launches of operations."""
    from tests.kernels.emulated import count, recorded

    start, per_byte = fit(card.arch)
    rows = []
    for name in names:
        case = CASES[name]
        for m, n in case.sizes:
            with recorded(card.arch, card.units) as launches:
                case.launch(m, n)
            times = []
            for launch in launches:
                count(launch)
                times.append(time_of(launch, card))
            total: float | None = (NEXT - start) * (len(times) - 1)
            for time in times:
                total = None if total is None or time.us is None else total + time.us
            least = start + m * n * case.least * per_byte
            for index, (launch, time) in enumerate(zip(launches, times, strict=True)):
                share = least / total if total and not index else None
                rows.append(Prediction(card, name, (m, n), launch, time, share))
    return rows


COLUMNS: Columns = {
    "operation": lambda row: row.case,
    "size": lambda row: f"{row.size[0]} x {row.size[1]}",
    "kernel": lambda row: row.launch.name.removesuffix("_kernel"),
    "counted\nread MB": lambda row: significant(row.launch.read / 1e6),
    "counted\nwritten MB": lambda row: significant(row.launch.written / 1e6),
    "registers": lambda row: str(row.launch.registers),
    "programs a\nmultiprocessor": lambda row: str(resident(row.launch, row.card)),
    "instructions\nan element": lambda row: f"{per_element(row):.1f}",
    "float / integer /\nspecial / loads": lambda row: by_class(row),
    "predicted\nbound": lambda row: row.time.bound,
    "predicted\nus": lambda row: "no time" if row.time.us is None else f"{row.time.us:.0f}",
    "predicted share\nof the roofline": lambda row: "" if row.share is None else f"{row.share:.0%}",
}
ERRORS: Columns = {
    "Liger's kernel": lambda row: f"{row.kernel} {row.mode}",
    "dtype": lambda row: row.dtype,
    "size": lambda row: f"{row.rows} x {row.columns}",
    "measured\nus": lambda row: f"{row.measured_us:.1f}",
    "predicted\nus": lambda row: predicted_us(row),
    "error": lambda row: "" if error_of(row) is None else f"{error_of(row):+.1%}",
}


def per_element(row: Prediction, kind: str | None = None) -> float:
    """Return the instructions of a launch, of one class or all, for each element."""
    launch = row.launch
    number = launch.instructions if kind is None else launch.classes[kind]
    return number * launch.num_warps * 32 * launch.programs / math.prod(row.size)


def by_class(row: Prediction) -> str:
    """Write the instructions of an element by class."""
    kinds = ("float", "integer", "special", "load")
    return " / ".join(f"{per_element(row, kind):.1f}" for kind in kinds)


def predicted_us(row: Row) -> str:
    """Write the model's time of a published row."""
    error = error_of(row)
    return "no time" if error is None else f"{row.measured_us * (1 + error):.1f}"


def options(add: Options) -> None:
    """Add the options."""
    add.add_argument("--card", help="the card", choices=CARDS, default=None)
    add.add_argument("--case", help="one operation", choices=CASES, default=None)
    add.flag("errors", "print published rows beside the model instead; nothing is compiled")


def run(chosen: Namespace) -> int:
    """Print the table of each card, or the model's errors."""
    for card in [CARDS[chosen.card]] if chosen.card else CARDS.values():
        start, per_byte = fit(card.arch)
        note = f"{start:.2f} us and {1e-6 / per_byte:.3f} TB/s, fitted on RMSNorm forward. {SOURCE}"
        if chosen.errors:
            rows = [row for row in published() if row.arch == card.arch]
            show(f"{card.name}: published rows beside the model", ERRORS, rows, [note], words=3)
            continue
        rows = predictions(card, [chosen.case] if chosen.case else list(CASES))
        title = f"{card.name}, bfloat16: predicted, not measured"
        show(title, COLUMNS, rows, [note], words=3)
    return 0
