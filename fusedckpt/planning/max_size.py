"""`find_max_size`: the largest inputs of which a training step fits a card, by way of training.

The peak of a step is the largest of several sums of tensors, each a polynomial of the size of the
inputs, of degree two where attention saves its scores. So a few estimates, and a parabola through
the points nearest to the card, tell where the peak meets it; an estimate there verifies it, or is
the next point. One step more takes as many bytes as the steps before it did on average: where that
exceeds the card, no estimate is made for it, as an estimate of a large model takes seconds.

Measured steps are searched in the same way, from the largest size that fits by its estimate down:
an estimate is a lower bound, so no larger size fits, and no step takes much more than the card.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fusedckpt.autograd import arguments
from fusedckpt.checkpointing.wrapper import checkpoint_module
from fusedckpt.fusing.fuser import fuse
from fusedckpt.planning.budget import bytes_of
from fusedckpt.planning.repeated_blocks import RepeatedBlocks
from fusedckpt.reporting.factory import MadeModel, made_by_factory
from fusedckpt.reporting.figure import BLUE, FAINT, INK, panel
from fusedckpt.reporting.tables import size as size_text
from fusedckpt.reporting.tables import table
from fusedckpt.reporting.without_memory import META

# the share of a card that a step may not use, by default: the CUDA context and the allocator's
# cache take it
HEADROOM = 0.1
# larger sizes are not tried
_MOST_ITEMS = 2**24
_NAME = "find_max_size"


@dataclass(frozen=True)
class MaxSize:
    """The largest inputs that fit a card in one way."""

    # the way of training
    way: str
    # bytes of the card
    card_bytes: int
    # the largest size that fits, 0 where the first step of it does not
    size: int
    # bytes of the peak at this size; with size 0 None
    peak_bytes: int | None
    # bytes of the peak one step of the size further, estimated or along the line through this size
    # and the next smaller one that was estimated; None above the largest size that is tried
    next_peak_bytes: int | None


@dataclass(frozen=True)
class MaxSizes:
    """The result of `find_max_size`."""

    # the class of the model
    model: str
    # the inputs at the first size
    inputs: str
    # the size that grows: "factory", "seq" or "batch"
    grows: str
    # sizes are multiples of it
    step: int
    # the share of a card that is left free
    slack: float
    # the class of the optimizer, "" without one
    optimizer: str
    # the largest inputs by way and card
    largest: tuple[MaxSize, ...]
    # ways that the model does not take, and why
    left: Mapping[str, str]
    # the device on which steps were measured, "" where all peaks are estimates
    measured_on: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dicts."""
        return asdict(self) | {"largest": [asdict(x) for x in self.largest]}

    @property
    def how(self) -> str:
        """Return how the sizes were found."""
        return "measured" if self.measured_on else "estimated"

    def size_of(self, way: str, card_bytes: int) -> int:
        """Return the largest size of a way on a card."""
        return next(x.size for x in self.largest if (x.way, x.card_bytes) == (way, card_bytes))

    def __str__(self) -> str:
        cards = [*dict.fromkeys(x.card_bytes for x in self.largest)]
        ways = [*dict.fromkeys(x.way for x in self.largest)]
        rows = [(way, *(f"{self.size_of(way, card):,}" for card in cards)) for way in ways]
        rows += [(way, *("-" for _ in cards)) for way in self.left]
        optimizer = f", {self.optimizer}" if self.optimizer else ""
        if self.measured_on:
            proof = f"context; each size that is named was measured by a step on {self.measured_on}"
        else:
            proof = "context and memory within kernels; nothing was allocated, and no GPU was used"
        lines = [
            f"Largest {_NOUNS[self.grows]} of a training step of {self.model}{optimizer}: "
            f"{self.how}, a multiple of {self.step:,}",
            f"at size {self.step:,}: {self.inputs}",
            table(("", *map(size_text, cards)), rows, numbers=range(1, len(cards) + 1)),
            f"each with {self.slack:.0%} of the card left for the allocator's cache, the CUDA",
            proof,
        ]
        return "\n".join([*lines, *(f"{way}: {why}" for way, why in self.left.items())])

    def plot(self, path: str | Path) -> None:
        """Draw the sizes as bars, by card and way.

        The file's suffix sets the format. Needs matplotlib: `pip install fusedckpt[bench]`.
        """
        draw_sizes(self, path)


# the size that grows -> its name in texts
_NOUNS = {"factory": "size", "seq": "sequence, in tokens,", "batch": "batch, in samples,"}


class NotApplicable(Exception):
    """A model does not take a way of training."""


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks = [part.module for part in RepeatedBlocks(model).parts() if part.is_entry]
    if not blocks:
        raise NotApplicable("the model has no containers of repeated blocks to checkpoint")
    return blocks


def _torch_checkpoints(model: nn.Module) -> None:
    for block in _blocks(model):
        run: Any = functools.partial(torch_checkpoint, block.forward, use_reentrant=False)
        block.forward = run


def _with_head(model: nn.Module) -> None:
    if not _has_head(model):
        raise NotApplicable("head: the model is no causal language model of transformers")
    fuse(model, head=True)


def _has_head(model: nn.Module) -> bool:
    embedding = getattr(model, "get_output_embeddings", lambda: None)
    return embedding() is not None


def _checkpoints(model: nn.Module, **options: Any) -> None:
    blocks = _blocks(model)
    fuse(model, head=_has_head(model))
    for block in blocks:
        checkpoint_module(block, **options)


# the change to a model, by name
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: None,
    "torch checkpoint": _torch_checkpoints,
    "fuse preact": functools.partial(fuse, save="preact"),
    "fuse": fuse,
    "fuse, head": _with_head,
    "fuse, checkpoint, head": _checkpoints,
    "fuse, checkpoint, head, nine bits": functools.partial(_checkpoints, store="int8"),
    "fuse, checkpoint, head, offload": functools.partial(_checkpoints, offload=True),
}


def find_max_size(
    factory: Callable[..., Any],
    cards: Sequence[int | str] = ("24GiB", "48GiB", "80GiB"),
    *,
    grows: str = "factory",
    step: int = 1,
    batch: int | None = None,
    seq: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: str | None = "AdamW",
    accumulate: bool = False,
    ways: Sequence[str] = tuple(WAYS),
    slack: float = HEADROOM,
    device: str = "cuda",
    measure: str | None = None,
) -> MaxSizes:
    """Return the largest inputs of which a training step fits each card, in several ways.

        sizes = fusedckpt.find_max_size(llama, ["24GiB", "80GiB"], grows="seq", step=1024, batch=1)
        print(sizes)

    Nothing is allocated: peaks are those of `estimate`, which are lower bounds, and may take
    `1 - slack` of a card. Each answer fits by its own estimate; one step more does not, by another
    or by the line through the answer and a smaller size: about six estimates for each way.

    Ways: "eager"; "torch checkpoint" around every repeated block; "fuse preact" and "fuse" with
    save="preact" and "inputs"; "fuse, head" with the loss in the head; "fuse, checkpoint, head"
    with `checkpoint_module` around every repeated block, and the loss in the head of a causal
    language model; the same with store="int8", where inputs of checkpoints wait in nine bits a
    value, and with offload=True, where they wait on the host.

    Args:
        factory: as that of `python -m fusedckpt estimate`: returns a causal language model of
            transformers, or a model and its inputs. Parts that are frozen, adapters, and quantized
            weights (`register_quantized`) count as they are.
        cards: bytes of each card, or a size such as "24GiB".
        grows: "factory": the factory is called with the size; "seq" or "batch": the second or first
            dimension of the inputs.
        step: sizes are multiples of it.
        batch, seq: as in the command, of the dimension that does not grow.
        dtype: default dtype while the factory runs.
        optimizer: a class of torch.optim, with its default options; None for none.
        accumulate: whether gradients exist when the step begins.
        ways: some of the names above.
        slack: the share of a card that stays free, 0.0 to below 1.0.
        device: the kind of device of the cards, as optimizers ask for it.
        measure: a device, "cpu" or "cuda": steps are taken there, as `report` takes them, from the
            largest size that fits by its estimate down, until one fits as measured. Memory that ops
            allocate inside counts then. The factory is called with this default device, too.

    Raises:
        TypeError, ValueError: an argument is wrong, a card is larger than the device that measures,
            or the model's forward cannot run without numbers, see `estimate`.
    """
    limits = [bytes_of(_NAME, card, torch.device("cpu")) for card in cards]
    _check(factory, limits, grows, step, ways, slack)
    sizes = {"batch": batch, "seq": seq}
    steps = _Steps(factory, grows, step, sizes, dtype, optimizer, torch.device(device), accumulate)
    measuring = None if measure is None else _measuring_device(measure, limits)
    first = steps.made(step)
    largest: list[MaxSize] = []
    left: dict[str, str] = {}
    for way in ways:
        try:
            peaks = steps.peaks(way)
        except NotApplicable as reason:
            left[way] = str(reason)
            continue
        estimates = [_largest(peaks, way, card, slack) for card in limits]
        if measuring is None:
            largest += estimates
            continue
        peaks = steps.peaks(way, measuring)
        for estimate in estimates:
            largest.append(_largest(peaks, way, estimate.card_bytes, slack, estimate))
    return MaxSizes(
        model=type(first.model).__name__,
        inputs=first.inputs,
        grows=grows,
        step=step,
        slack=slack,
        optimizer=optimizer or "",
        largest=tuple(largest),
        left=left,
        measured_on="" if measuring is None else str(measuring),
    )


class _Steps(NamedTuple):
    """The training steps of a factory's model, by the size that grows."""

    factory: Callable[..., Any]
    # "factory", "seq" or "batch"
    grows: str
    # the first size
    step: int
    # of the inputs, by dimension: "batch" and "seq"
    sizes: Mapping[str, int | None]
    # the default dtype while the factory runs
    dtype: torch.dtype | None
    # a class of torch.optim, None for none
    optimizer: str | None
    # of the cards
    device: torch.device
    # whether gradients exist when a step begins
    accumulate: bool

    def made(self, size: int, on: torch.device = META) -> MadeModel:
        """Return the factory's model and inputs of a size."""
        by_factory = self.grows == "factory"
        calls = functools.partial(self.factory, size) if by_factory else self.factory
        sizes = self.sizes if by_factory else self._grown(size)
        options = {**sizes, "dtype": self.dtype, "optimizer": self.optimizer}
        return made_by_factory(_NAME, calls, **options, device=on)

    def _grown(self, size: int) -> dict[str, int | None]:
        return {**self.sizes, self.grows: size}

    def peaks(self, way: str, on: torch.device = META) -> Peaks:
        """Return the peaks of steps in one way: estimated, or measured on another device."""
        trained = self.made(self.step, on)
        WAYS[way](trained.model)

        def peak(size: int) -> int:
            if self.grows != "factory":
                sizes = self._grown(size)
                made = trained.resized(sizes["batch"], sizes["seq"])
            elif size != self.step:
                made = self.made(size, on)
                WAYS[way](made.model)
            else:
                made = trained
            if on == META:
                return made.estimated(self.device, accumulate=self.accumulate).peak_bytes
            return _measured_peak(made, self.accumulate)

        return Peaks(peak, self.step)


def _measuring_device(name: str, limits: Sequence[int]) -> torch.device:
    """Return the device that measures, which must have the memory of every card."""
    device = torch.device(name)
    if device.type == "meta":
        raise ValueError(f"{_NAME}: measure must be a device with memory, got {name!r}")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if max(limits) > total:
            raise ValueError(
                f"{_NAME}: a card of {size_text(max(limits))} cannot be measured on {name}, which "
                f"has {size_text(total)}"
            )
    return device


def _measured_peak(made: MadeModel, accumulate: bool) -> int:
    """Return the peak of a step, or the bytes of the device where that has too few."""
    try:
        return made.measured(accumulate).peak_bytes
    except torch.OutOfMemoryError:
        device = next(made.model.parameters()).device
        return torch.cuda.get_device_properties(device).total_memory


def _check(
    factory: Callable[..., Any],
    limits: Sequence[int],
    grows: str,
    step: int,
    ways: Sequence[str],
    slack: float,
) -> None:
    """Refuse wrong arguments before any model is made."""
    if not limits:
        raise ValueError(
            f"{_NAME}: expected at least one card, got none: pass its memory, as ['24GiB']"
        )
    if grows not in _NOUNS:
        raise ValueError(f"{_NAME}: grows must be one of {', '.join(_NOUNS)}, got {grows!r}")
    arguments.integer(_NAME, "step", step, least=1)
    if unknown := [way for way in ways if way not in WAYS]:
        raise ValueError(f"{_NAME}: expected ways among {', '.join(WAYS)}, got {unknown[0]!r}")
    if not ways:
        raise ValueError(
            f"{_NAME}: expected at least one way, got none: pass none to try {', '.join(WAYS)}"
        )
    if not 0.0 <= slack < 1.0:
        raise ValueError(f"{_NAME}: slack must be from 0.0 to below 1.0, got {slack}")
    if grows == "factory" and not inspect.signature(factory).parameters:
        raise ValueError(
            f"{_NAME}: the factory takes no size: let it take one, or say grows='seq' or 'batch'"
        )


class Peaks:
    """Peaks by the number of steps of the size, each estimated or measured once."""

    def __init__(self, peak: Callable[[int], int], step: int):
        self.step = step
        self._peak = peak
        self.known: dict[int, int] = {}

    def __call__(self, count: int) -> int:
        """Return the peak at so many steps."""
        if count not in self.known:
            self.known[count] = self._peak(count * self.step)
        return self.known[count]


def _largest(
    peaks: Peaks, way: str, card: int, slack: float, estimate: MaxSize | None = None
) -> MaxSize:
    """Return the largest size with a peak that fits a card; none above an estimate's fits."""
    if estimate is not None and not estimate.size:
        return estimate
    limit = int(card * (1.0 - slack))
    most = max(1, _MOST_ITEMS // peaks.step)
    low = 0
    high = most + 1
    if estimate is not None:
        peaks(estimate.size // peaks.step)
        high = estimate.size // peaks.step + 1
    for count, peak in sorted(peaks.known.items()):
        if peak <= limit:
            low = max(low, count)
        else:
            high = min(high, count)
    while high - low > 1 and not (low and _next_peak(peaks.known, low) > limit):
        count = _next_count(peaks.known, limit, low, high)
        if peaks(count) <= limit:
            low = count
        else:
            high = count
    return MaxSize(
        way=way,
        card_bytes=card,
        size=low * peaks.step,
        peak_bytes=peaks(low) if low else None,
        next_peak_bytes=_peak_above(peaks.known, low, limit, estimate) if low < most else None,
    )


def _peak_above(
    known: Mapping[int, int], count: int, limit: int, estimate: MaxSize | None
) -> int | None:
    """Return the peak at one step more: the estimate's, where none was measured there."""
    peak = _next_peak(known, count)
    return peak if estimate is None or peak > limit else estimate.next_peak_bytes


def _next_peak(known: Mapping[int, int], count: int) -> int:
    """Return the peak at one step more, or the least that a peak that grows ever faster has."""
    if count + 1 in known:
        return known[count + 1]
    smaller = max((x for x in known if x < count), default=None)
    if smaller is None:
        return known[count]
    return known[count] + (known[count] - known[smaller]) // (count - smaller)


def _next_count(known: Mapping[int, int], limit: int, low: int, high: int) -> int:
    """Return the number of steps to estimate next, between one that fits and one that does not."""
    if len(known) < 2:
        return min(high - 1, 4) if known else 1
    # the points next to the answer
    near = sorted(known, key=lambda count: abs(known[count] - limit))[:3]
    points = [(count, known[count]) for count in near]
    crossing = _crossing(points, limit)
    if crossing is None:
        # a parabola that turns down before the limit: a line
        crossing = _crossing(points[:2], limit)
    if crossing is None or not low <= crossing < high:
        crossing = min(low * 4, high - 1) if high > 4 * low else (low + high) // 2
    # where the crossing fits already, one step further
    return max(crossing, low + 1)


def _crossing(points: Sequence[tuple[int, int]], limit: int) -> int | None:
    """Return the largest count at which a parabola through three points, or a line through two,
    stays within a limit; None where it never meets it.
    """
    counts = np.array([count for count, _ in points], dtype=float)
    peaks = np.array([peak for _, peak in points], dtype=float)
    a, b, c = [0.0, 0.0, *np.polyfit(counts, peaks, len(points) - 1)][-3:]
    # of rounding, beside the growth of the peak
    if abs(a) * counts.max() < 1e-6 * abs(b):
        a = 0.0
    roots = np.roots([a, b, c - limit] if a else [b, c - limit])
    real = [float(root.real) for root in roots if abs(root.imag) < 1e-9 and root.real > 0]
    return int(max(real) if a <= 0 else max(real, default=0)) if real else None


def draw_sizes(sizes: MaxSizes, path: str | Path) -> None:
    """Write the figure in the format that the path's ending names."""
    cards = [*dict.fromkeys(x.card_bytes for x in sizes.largest)]
    ways = [*dict.fromkeys(x.way for x in sizes.largest)]
    with panel(path, "MaxSizes.plot") as (_, axes):
        height = 0.8 / len(cards)
        for index, card in enumerate(cards):
            widths = [sizes.size_of(way, card) for way in ways]
            places = [place + index * height for place in range(len(ways))]
            shade = 0.35 + 0.65 * (index + 1) / len(cards)
            label = size_text(card)
            bars = axes.barh(places, widths, height * 0.92, color=BLUE, alpha=shade, label=label)
            texts = [f"{width:,}" for width in widths]
            axes.bar_label(bars, texts, padding=3, fontsize=8, color=INK)
        axes.set_yticks([place + 0.4 - height / 2 for place in range(len(ways))], ways)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xscale("symlog", linthresh=max(1, sizes.step))
        axes.set_xlabel(f"{_NOUNS[sizes.grows]} {sizes.how}", color=FAINT)
        axes.set_title(f"Largest training step of {sizes.model} by card", color=INK)
        axes.legend(frameon=False, loc="lower right")
