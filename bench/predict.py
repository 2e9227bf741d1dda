"""Predict the time of kernels from their bytes and instructions: predicted, not measured.

Kernels are compiled for an A100 and an H100 that are not there; two programs of each launch run in
the tests' PTX emulator, which counts bytes and instructions. A launch takes a fixed time, and then
the longer of moving its bytes and issuing its instructions. The fixed time and the bandwidth are
fitted on RMSNorm forward rows that Liger-Kernel has published; `--errors` prints how far the model
is from its other rows. Kernels that spill, or wait longer than they work, get no time. Ops of ATen,
which other libraries call, count as a launch that moves each of its operands once: the least.
"""

from __future__ import annotations

import csv
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cards import CARDS, Card
from bench.clock import Stopwatch
from bench.env import device_name, environment
from bench.launches import OPERATIONS, Operation, Peer
from bench.options import Options
from bench.results import Row, append
from bench.tables import Columns, show, significant
from bench.work import ALLOCATIONS, moved

if TYPE_CHECKING:
    from tests.kernels.emulated import Launch

MEASURED = Path(__file__).parent / "results" / "liger-measured.csv"
SOURCE = (
    "Measured: medians of benchmark/data/all_benchmark_data.csv of linkedin/Liger-Kernel at "
    "ead96b6 (BSD 2-Clause, Copyright 2024 LinkedIn Corporation)."
)
PEERS = (
    "Measured times are Liger's own, of its kernel at that size, launched by another version. "
    "Ops of ATen (sums of weights' gradients, casts, parts of losses) count as the least that they "
    "take: a launch, and each operand once. Unsloth's kernels have its warps of any card. Of "
    "inductor's each call of a kernel has the fastest configuration by this model, of those that "
    "torch.compile would time."
)
FILE = "predict.jsonl"
# calls before the first that counts, and those that do
WARMUP, ROUNDS = 5, 50
# the rows that the fixed time and the bandwidth are fitted on
FITTED = ("megatron_rms_norm", "rms_norm")
# assumed: us of a load under load, of a barrier, of starting a program, of a further launch
LATENCY, BARRIER, START, NEXT = 0.65, 0.05, 0.5, 3.0
# share of a launch's work that waits may add; of more there is no time
WAITING = 0.15
# share of L2 whose data are read again: fitted on Liger's cross entropy on an A100
L2_SHARE = 0.4


class Published(NamedTuple):
    """A published row, and the counts of its kernel."""

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
def published() -> tuple[Published, ...]:
    """Return the published rows."""
    with MEASURED.open() as file:
        return tuple(
            Published(
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


def error_of(row: Published) -> float | None:
    """Return the relative error of the model on a published row, None where it gives no time."""
    start, per_byte = fit(row.arch)
    if row.spills:
        return None
    return (start + max(row.moved * per_byte, row.issue_us)) / row.measured_us - 1


class Time(NamedTuple):
    """A launch's time by the model, in us; None where the model does not apply."""

    us: float | None
    # the slowest part: memory, or a pipe
    bound: str


class Prediction(NamedTuple):
    """A row of the table: a launch of an operation on a card."""

    card: Card
    operation: str
    size: tuple[int, int]
    library: str
    launch: Launch
    time: Time
    # of all launches of the operation, None beside the others than the first
    total_us: float | None
    # its part of the operation's time that no byte less could take, None where there is no total
    share: float | None
    # as published, None beside the others than the first
    measured_us: float | None


class Ops(TorchDispatchMode):
    """Adds each op of ATen that moves bytes to a list of launches, as one without warps."""

    def __init__(self, launches: list[Launch]):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.kernels.emulated import Launch

        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        packet = func.overloadpacket
        read, written = moved(func, args, kwargs, results)
        if written and packet not in ALLOCATIONS:
            name = f"ATen {packet.__name__}"
            launch = Launch(name, (1, 1, 1), {}, None, registers=0, spills=0, shared=0, num_warps=0)
            launch.read, launch.written = float(read), float(written)
            self.launches.append(launch)
        return results


def is_op(launch: Launch) -> bool:
    """Whether a launch is an op of ATen."""
    return launch.num_warps == 0


def resident(launch: Launch, card: Card) -> int:
    """Return how many programs of a launch a multiprocessor holds."""
    threads = 32 * launch.num_warps
    registers = -(-launch.registers // 8) * 8 * threads
    fitting = 65536 // registers, card.shared // (launch.shared + 1024), 2048 // threads, 32
    return max(1, min(fitting))


def time_of(launch: Launch, card: Card) -> Time:
    """Return the time of a counted launch, or why there is none."""
    start, per_byte = fit(card.arch)
    if is_op(launch):
        return Time(start + (launch.read + launch.written) * per_byte, "memory")
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
    # programs on a multiprocessor cover one another's waits
    chain /= min(together, max(1.0, launch.programs / card.units))
    work = max(memory, issue)
    if launch.spills:
        return Time(None, "spills: no time")
    if not launch.is_prefetched and chain > WAITING * work and chain > start:
        return Time(None, "latency: no time")
    return Time(start + work, "memory" if memory >= issue else pipe)


def ways_of(operation: Operation) -> Iterator[Peer]:
    """Yield the libraries that launch an operation: ours, and those that are installed."""
    # ours ask a card on paper for its multiprocessors
    yield Peer("ours", "fusedckpt", operation.prepare)
    yield from (peer for peer in operation.peers if find_spec(peer.package) is not None)


def launches_of(peer: Peer, m: int, n: int, card: Card) -> list[Launch]:
    """Compile a library's launches of an operation for a card, and count them."""
    from tests.kernels.emulated import count, recorded

    # without a device a library takes one multiprocessor: it is given one's rows
    rows = math.ceil(m / card.units) if peer.is_persistent else m
    with torch.device("meta"), recorded(card.arch, card.units) as launches:
        call = peer.prepare(rows, n)
        with Ops(launches):
            call()
    for launch in launches:
        if not is_op(launch):
            count(launch)
        if peer.is_persistent:
            launch.grid = (card.units, 1, 1)
            launch.read *= m / rows
            launch.written *= m / rows
            launch.again *= m / rows
    return fastest(launches, card) if peer.is_tuned else launches


def fastest(launches: Sequence[Launch], card: Card) -> list[Launch]:
    """Return for each call of a kernel the launch with the fastest configuration by the model."""
    by_call: dict[tuple[Any, ...], list[Launch]] = {}
    for launch in launches:
        tensors = [id(x) for x in launch.arguments.values() if isinstance(x, Tensor)]
        call = (id(launch),) if is_op(launch) else (launch.name, *tensors)
        by_call.setdefault(call, []).append(launch)
    us = {id(launch): time_of(launch, card).us for launch in launches}
    return [min(of, key=lambda x: us[id(x)] or math.inf) for of in by_call.values()]


def predictions(card: Card, names: Sequence[str]) -> list[Prediction]:
    """Compile, count and predict the launches of operations."""
    start, per_byte = fit(card.arch)
    rows = []
    for name in names:
        operation = OPERATIONS[name]
        for m, n in operation.sizes:
            least = start + m * n * operation.least * per_byte
            for peer in ways_of(operation):
                launches = launches_of(peer, m, n, card)
                times = [time_of(launch, card) for launch in launches]
                total: float | None = (NEXT - start) * (len(times) - 1)
                for time in times:
                    total = None if total is None or time.us is None else total + time.us
                measured = published_us(operation, card, m, n) if peer.name == "Liger" else None
                known = total, least / total if total else None, measured
                for index, (launch, time) in enumerate(zip(launches, times, strict=True)):
                    numbers = (None, None, None) if index else known
                    rows.append(Prediction(card, name, (m, n), peer.name, launch, time, *numbers))
    return rows


def published_us(operation: Operation, card: Card, m: int, n: int) -> float | None:
    """Return the published time of an operation in bfloat16 on a card, if there is one."""
    for row in published():
        names = row.kernel in operation.published and row.mode == operation.mode
        if names and (row.arch, row.dtype, row.rows, row.columns) == (card.arch, "bfloat16", m, n):
            return row.measured_us
    return None


COLUMNS: Columns = {
    "operation": lambda row: row.operation,
    "size": lambda row: size_of(row),
    "library": lambda row: row.library,
    "kernel": lambda row: row.launch.name.strip("_").removesuffix("_kernel"),
    "counted\nread MB": lambda row: significant(row.launch.read / 1e6),
    "counted\nwritten MB": lambda row: significant(row.launch.written / 1e6),
    "registers": lambda row: "" if is_op(row.launch) else str(row.launch.registers),
    "programs a\nmultiprocessor": lambda row: programs_of(row),
    "instructions\nan element": lambda row: "" if is_op(row.launch) else f"{per_element(row):.1f}",
    "float / integer /\nspecial / loads": lambda row: by_class(row),
    "predicted\nbound": lambda row: row.time.bound,
    "predicted\nus": lambda row: "no time" if row.time.us is None else f"{row.time.us:.0f}",
    "predicted share\nof the roofline": lambda row: "" if row.share is None else f"{row.share:.0%}",
    "measured\nus": lambda row: "" if row.measured_us is None else f"{row.measured_us:.0f}",
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


def programs_of(row: Prediction) -> str:
    """Write how many programs a multiprocessor holds."""
    return "" if is_op(row.launch) else str(resident(row.launch, row.card))


def by_class(row: Prediction) -> str:
    """Write the instructions of an element by class."""
    if is_op(row.launch):
        return ""
    kinds = ("float", "integer", "special", "load")
    return " / ".join(f"{per_element(row, kind):.1f}" for kind in kinds)


def predicted_us(row: Published) -> str:
    """Write the model's time of a published row."""
    error = error_of(row)
    return "no time" if error is None else f"{row.measured_us * (1 + error):.1f}"


def size_of(row: Prediction) -> str:
    """Write the rows and columns of a row."""
    return f"{row.size[0]} x {row.size[1]}"


class Comparison(NamedTuple):
    """An operation measured on a device, beside the model."""

    prediction: Prediction
    measured_us: float

    @property
    def error(self) -> float | None:
        """The model's relative error."""
        total = self.prediction.total_us
        return None if total is None else total / self.measured_us - 1


COMPARISONS: Columns = {
    "operation": lambda row: row.prediction.operation,
    "size": lambda row: size_of(row.prediction),
    "library": lambda row: row.prediction.library,
    "measured\nus": lambda row: f"{row.measured_us:.1f}",
    "predicted\nus": lambda row: significant(row.prediction.total_us),
    "error": lambda row: "" if row.error is None else f"{row.error:+.1%}",
}


def measure(rows: Sequence[Prediction], device: torch.device) -> Iterator[Comparison]:
    """Time each predicted operation on a device, its L2 cache emptied before each round."""
    watch = Stopwatch(device)
    firsts = {(row.operation, row.size, row.library): row for row in reversed(rows)}
    for (name, (m, n), library), row in reversed(firsts.items()):
        peer = next(peer for peer in ways_of(OPERATIONS[name]) if peer.name == library)
        with torch.device(device):
            launch = peer.prepare(m, n)
        times = [watch.times(launch)[0] for _ in range(WARMUP + ROUNDS)]
        yield Comparison(row, 1e3 * median(times[WARMUP:]))


def recorded_row(row: Comparison) -> Row:
    """Return a line of a results file."""
    prediction = row.prediction
    return {
        "command": "predict",
        "case": prediction.operation,
        "name": prediction.library,
        "title": f"{prediction.operation}, {size_of(prediction)}, bfloat16",
        "tokens": prediction.size[0],
        "dim": prediction.size[1],
        "failure": None,
        "is_wrong": False,
        "dtype": "bfloat16",
        "both_ms": [row.measured_us / 1e3],
        "saved_bytes": None,
        "peak_bytes": None,
        "card": prediction.card.name,
        "predicted_us": prediction.total_us,
    }


def options(add: Options) -> None:
    """Add the options."""
    add.add_argument("--card", help="the card", choices=CARDS, default=None)
    add.add_argument("--case", help="one operation", choices=OPERATIONS, default=None)
    add.flag("errors", "print published rows beside the model instead; nothing is compiled")
    add.flag("gemm", "print tiles of GEMMs instead, and the sizes at which a fused one could pay")
    add.flag("measure", "also time the operations on this GPU, and print both times")
    add.one("device", "the GPU to measure", add.device)
    add.one("out", f"with --measure, a folder for {FILE}", type=Path, metavar="DIR")


def prepare(chosen: Namespace) -> Namespace:
    """Raise ValueError where there is no GPU to measure, or none that the model knows."""
    if chosen.measure:
        device = torch.device(chosen.device)
        name = device_name(device)
        if device.type != "cuda":
            raise ValueError(f"--measure needs a CUDA device, {chosen.device} is {name}")
        cards = [card for card in CARDS if card in name]
        if not cards:
            raise ValueError(
                f"--measure: the model has rows of {' and '.join(CARDS)}, not of {name}"
            )
        chosen.card = cards[0]
    return chosen


def run(chosen: Namespace) -> int:
    """Print the table of each card, or the model's errors, or both times on this GPU."""
    for card in [CARDS[chosen.card]] if chosen.card else CARDS.values():
        start, per_byte = fit(card.arch)
        note = f"{start:.2f} us and {1e-6 / per_byte:.3f} TB/s, fitted on RMSNorm forward. {SOURCE}"
        if chosen.errors:
            rows = [row for row in published() if row.arch == card.arch]
            show(f"{card.name}: published rows beside the model", ERRORS, rows, [note], words=3)
            continue
        if chosen.gemm:
            import_module("bench.gemms").show_gemms(card)
            continue
        names = [chosen.case] if chosen.case else list(OPERATIONS)
        rows = predictions(card, names)
        title = f"{card.name}, bfloat16: predicted, not measured"
        notes = [note, PEERS, *missing(names)]
        show(title, COLUMNS, rows, notes, words=4)
        if chosen.measure:
            compare(rows, torch.device(chosen.device), chosen.out)
    return 0


def missing(names: Sequence[str]) -> list[str]:
    """Name the libraries of operations that are not installed, in a line."""
    peers = [peer for name in names for peer in OPERATIONS[name].peers]
    absent = sorted({peer.name for peer in peers if find_spec(peer.package) is None})
    return [f"Not installed: {', '.join(absent)}."] if absent else []


def compare(rows: Sequence[Prediction], device: torch.device, out: Path | None) -> None:
    """Measure predicted operations and print them beside the model; append them to a file."""
    facts = environment(device, torch.bfloat16)
    comparisons = list(measure(rows, device))
    if out is not None:
        append([recorded_row(row) | facts for row in comparisons], out / FILE)
    errors = [abs(row.error) for row in comparisons if row.error is not None]
    note = f"median absolute error of {len(errors)}: {median(errors):.1%}" if errors else ""
    show(f"{facts['device']}: measured, and predicted", COMPARISONS, comparisons, [note], words=3)
