"""Tiles of matrix products on cards that are not there: predicted, not measured.

For each GEMM with an epilogue of ours, and for the products of experts: how many tiles run at a
time, the share of the last wave that idles, bytes in flight, and the clocks of a step of the main
loop in the tensor cores, in issuing, and in reading L2. A multiprocessor that holds one tile at a
time runs its main loop, then its epilogue; one that holds several overlaps them.

The last two columns are shares of the speed of a GEMM whose tensor cores always work, as the
vendor's at its best: the most that a tile reaches, and the share at which a fused GEMM takes no
longer than the vendor's and our elementwise kernel. No time is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bench.launches import drawn, ints
from bench.predict import LATENCY, Card, fit, resident
from bench.step import RATES
from bench.tables import Columns, show
from fusedckpt.kernels import linear
from fusedckpt.kernels.grouped_gemm import grouped_gemm, grouped_grad

if TYPE_CHECKING:
    from tests.kernels.emulated import Launch

TOKENS = 8192
WIDTHS = (768, 1024, 2048, 4096, 8192)
# of Qwen3-30B-A3B
EXPERTS, EXPERT_D, EXPERT_F = 128, 2048, 768
ROWS = (64, 128, 256, 512, 1024)
# products of bf16 that a multiprocessor's tensor cores add at a clock
PRODUCTS = {"A100": 1024, "H100": 2048}
# bytes a clock of all multiprocessors out of L2: an A100's by NVIDIA's paper of the chip, assumed
# to be an H100's
L2_CLOCK = 5120


class Product(NamedTuple):
    """A GEMM [M, K] x [K, N] and its epilogue."""

    name: str
    # bytes of an element of the result that the elementwise kernel moves beside the vendor's GEMM
    saved: int
    # makes tensors of M, N and K, and launches
    launch: Callable[[int, int, int], Any]


def _act(m: int, n: int, k: int) -> None:
    linear.linear_then_act(drawn(m, k), drawn(n, k), None, "gelu", keep_z=False)


def _act_grad(m: int, n: int, k: int) -> None:
    linear.linear_act_dz(drawn(m, n), drawn(m, k), drawn(n, k), None, "gelu", needs_db=False)


def _hidden_grad(m: int, n: int, k: int) -> None:
    z, up, h = drawn(m, n), drawn(m, n), drawn(m, n)
    grads = linear.HiddenGrad(z, up, h, z, up)
    linear.hybrid_grad(drawn(m, k), drawn(k, n), grads, "silu", (False, False))


PRODUCTS_OF_LAYERS = (
    Product("linear and activation", 4, _act),
    Product("its gradient", 6, _act_grad),
    Product("gated MLP's gradient", 12, _hidden_grad),
)


class Fit(NamedTuple):
    """A launch of a GEMM on a card."""

    card: Card
    name: str
    # D of a layer, or rows of an expert
    size: int
    launch: Launch
    # steps of the main loop
    steps: int
    # result's tiles that have rows of their own, of all tiles' rows
    used: float
    # least share of the vendor's speed at which fusing pays, None of products of experts
    needed: float | None

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows, columns, and elements of a step."""
        options = self.launch.arguments
        return options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]

    @property
    def together(self) -> int:
        """Tiles on a multiprocessor at a time."""
        return resident(self.launch, self.card)

    @property
    def waves(self) -> float:
        """How often all multiprocessors are filled."""
        return self.launch.programs * self.used / (self.together * self.card.units)

    @property
    def busy(self) -> float:
        """The share of multiprocessors that work, the last wave included."""
        return self.waves / math.ceil(self.waves)

    @property
    def in_flight(self) -> int:
        """Bytes that a multiprocessor waits for at a time."""
        stages = self.launch.kernel.metadata.num_stages
        return self.together * (stages - 1) * self.loaded

    @property
    def loaded(self) -> int:
        """Bytes of operands that a step loads."""
        rows, columns, depth = self.tile
        return (rows + columns) * depth * 2

    def step(self) -> dict[str, float]:
        """Return the clocks of a step: in the tensor cores, issuing, reading L2."""
        body = self.launch.kernel.metadata.body
        rows, columns, depth = self.tile
        return {
            "tensor": rows * columns * depth / PRODUCTS[self.card.name],
            # four instructions of a warp a clock
            "issue": body[0] * self.launch.num_warps / 4,
            "L2": self.loaded / (L2_CLOCK / self.card.units),
        }

    def epilogue(self) -> float:
        """Return the clocks after the main loop: issuing, or moving its bytes."""
        _, _, _, _, _, _, _, _, after, read, written = self.launch.kernel.metadata.body
        threads = 32 * self.launch.num_warps
        per_clock = 1e-3 / fit(self.card.arch)[1] / self.card.units / self.card.clock
        return max(after * self.launch.num_warps / 4, (read + written) * threads / per_clock)

    def most(self) -> float:
        """Return the most of a GEMM's speed whose tensor cores always work."""
        step = self.step()
        work = self.steps * max(step.values())
        beside = self.epilogue() + 1e3 * LATENCY * self.card.clock
        # a further tile's main loop covers the epilogue, except the work of the epilogue's units
        clocks = work + beside if self.together == 1 else max(work, beside)
        return self.steps * step["tensor"] / clocks * self.busy * self.used


def fits(card: Card) -> Iterator[Fit]:
    """Compile the GEMMs of layers and of experts for a card."""
    from tests.kernels.emulated import recorded

    for product in PRODUCTS_OF_LAYERS:
        for width in WIDTHS:
            with torch.device("meta"), recorded(card.arch, card.units) as launches:
                product.launch(TOKENS, 4 * width, width)
            steps = math.ceil(width / launches[0].arguments["BLOCK_K"])
            needed = least_share(card, width, product.saved)
            yield Fit(card, product.name, width, launches[0], steps, 1.0, needed)
    for rows in ROWS:
        count = rows * EXPERTS
        ends = ints(EXPERTS, dtype=torch.int32).to("meta")
        with torch.device("meta"), recorded(card.arch, card.units) as launches:
            x, z = drawn(count, EXPERT_D), drawn(count, 2 * EXPERT_F)
            grouped_gemm(x, drawn(EXPERTS, 2 * EXPERT_F, EXPERT_D).mT, ends, z)
            grouped_grad(z, x, ends, drawn(EXPERTS, 2 * EXPERT_F, EXPERT_D))
        forward, grad = launches
        tile, depth = forward.arguments["BLOCK_M"], grad.arguments["BLOCK_K"]
        steps = math.ceil(EXPERT_D / forward.arguments["BLOCK_K"])
        # an expert's last tile is half full, on average
        yield Fit(card, "experts", rows, forward, steps, rows / (rows + tile / 2), None)
        steps = math.ceil(rows / depth + 0.5)
        yield Fit(card, "experts' weights", rows, grad, steps, rows / (steps * depth), None)


def least_share(card: Card, k: int, saved: int) -> float:
    """Return the share of the vendor's speed from which a fused GEMM takes no longer.

    saved: bytes of an element of the result that the elementwise kernel would move.
    """
    vendor = 2 * k / RATES[card.name].gemm
    return vendor / (vendor + saved * fit(card.arch)[1])


def _clocks(row: Fit) -> str:
    return " / ".join(f"{clocks:.0f}" for clocks in row.step().values())


GEMMS: Columns = {
    "product": lambda row: row.name,
    "D, or rows\nan expert": lambda row: str(row.size),
    "tile": lambda row: "x".join(map(str, row.tile)),
    "registers": lambda row: str(row.launch.registers),
    "tiles a\nmultiprocessor": lambda row: str(row.together),
    "KB in\nflight": lambda row: f"{row.in_flight / 1024:.0f}",
    "waves": lambda row: f"{row.waves:.1f}",
    "idle in\nlast wave": lambda row: f"{1 - row.busy:.0%}",
    "rows\nof none": lambda row: f"{1 - row.used:.0%}",
    "clocks a step:\ntensor / issue / L2": _clocks,
    "epilogue of\nmain loop": lambda row: (
        f"{row.epilogue() / row.steps / max(row.step().values()):.0%}"
    ),
    "predicted share\nof vendor, at most": lambda row: f"{row.most():.0%}",
    "needed\nto pay": lambda row: "" if row.needed is None else f"{row.needed:.0%}",
}


def show_gemms(card: Card) -> None:
    """Print the table of a card."""
    need = LATENCY / fit(card.arch)[1] / card.units
    note = f"{need / 1024:.1f} KB in flight keep the memory busy; the vendor's GEMM is assumed to "
    note += f"run at {RATES[card.name].gemm / 1e6:.0f} TFLOP/s."
    title = f"{card.name}, bfloat16, {TOKENS:,} tokens, N = 4 D: predicted, not measured"
    show(title, GEMMS, fits(card), [note], words=3)
