"""The tile of a GEMM launch: a table and its lookup.

Tiles were chosen by compiling: none spills, none serialises its tensor-core instructions. None was
timed on a device.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Launch options by their names in the kernel; the epilogue runs in SLICES column slices."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    SLICES: int = 1


# the longest short contraction: two blocks of its tile fit on a multiprocessor, so that the
# epilogue of one overlaps with the main loop of the other
SHORT_K = 1024
# float32 without TF32 runs on the scalar units, which need small tiles
SCALAR = Tile(64, 64, 16, 8, 2)

_LONG, _SHORT = Tile(128, 256, 64, 8, 3, 8), Tile(128, 128, 64, 8, 3, 2)
_HYBRID_LONG, _HYBRID_SHORT = Tile(256, 128, 64, 8, 3, 8), Tile(128, 128, 64, 8, 3, 4)
_SMALL = Tile(64, 64, 32, 8, 3)
_TF32 = Tile(128, 128, 32, 8, 3, 2)
_AMPERE = Tile(128, 128, 32, 8, 3, 4)
_NARROW = Tile(128, 64, 32, 8, 3, 2)
_CDNA = Tile(128, 128, 64, 8, 2, 2)
# unequal sides, so that a test sees a swapped axis
_INTERPRETED = 5 * (Tile(32, 64, 16, 4, 1, 2),)

# (architecture family, bytes per element) -> tiles of long and short contractions, of both with a
# hybrid epilogue, and of operands that tensor descriptors cannot address; the last three need
# registers, as a hybrid epilogue reads as much as it writes
TILES = {
    ("sm_80", 2): (_AMPERE, _AMPERE, _NARROW, _NARROW, _SMALL),
    ("sm_80", 4): 5 * (_SMALL,),
    ("sm_90", 2): (_LONG, _SHORT, _HYBRID_LONG, _HYBRID_SHORT, _SMALL),
    ("sm_90", 4): (_TF32, _TF32, _SMALL, _SMALL, _SMALL),
    # 256 rows of dh spill
    ("sm_100", 2): (_LONG, _SHORT, _HYBRID_SHORT, _HYBRID_SHORT, _SMALL),
    ("sm_100", 4): (_TF32, _TF32, _SMALL, _SMALL, _SMALL),
    ("gfx9", 2): (_CDNA, _CDNA, _NARROW, _NARROW, _SMALL),
    ("gfx9", 4): 5 * (_SMALL,),
    ("interpreter", 2): _INTERPRETED,
    ("interpreter", 4): _INTERPRETED,
}


def family(arch: str) -> str:
    """Return the table's name for an architecture such as `sm_86` or `gfx942`."""
    if arch.startswith("sm_"):
        return {9: "sm_90", 10: "sm_100"}.get(int(arch[3:]) // 10, "sm_80")
    return "gfx9" if arch.startswith("gfx") else arch


def tile_for(arch: str, itemsize: int, k: int, hybrid: bool, aligned: bool, precision: str) -> Tile:
    """Return the tile of a GEMM with contraction length k on operands of `itemsize` bytes.

    `aligned`: tensor descriptors can address the operands; `precision`: "tf32" or "ieee".
    """
    if itemsize == 4 and precision == "ieee" and arch != "interpreter":
        return SCALAR
    tiles = TILES[family(arch), itemsize]
    return tiles[2 * hybrid + (k <= SHORT_K)] if aligned else tiles[-1]
