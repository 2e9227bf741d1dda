"""What `python -m bench tune` tries: tiles, and the cases that launch them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fusedckpt.kernels.tiles import Tile

__all__ = ["PLAN_CASES", "TILE_CASES", "candidates"]

# slot of the tile tables -> the case whose second plan launches it
TILE_CASES = {
    "long": "linear_act",
    "short": "linear_act",
    "hybrid_long": "gated_mlp",
    "hybrid_short": "gated_mlp",
}
PLAN_CASES = ("linear_act", "mlp", "gated_mlp")

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
    shapes = HALF if itemsize == 2 else SINGLE
    for shape, stages in product(shapes, (3, 4)):
        # wide tiles spill without slices
        for slices in (2, 4) if shape[1] >= 128 else (1, 2):
            yield Tile(*shape, stages, slices)
