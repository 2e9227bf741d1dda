"""Which tile a GEMM launch uses and whether a layer runs split or fused: data, and two lookups.

The sm_80 to sm_100 and gfx942 rows were chosen by compiling: none spills, none serialises its
tensor-core instructions. No row was timed on a device yet.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Block sizes and launch options of one GEMM; the epilogue runs in `slices` column slices."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    slices: int = 1


class Tiles(NamedTuple):
    """An architecture's tiles: by tensor descriptor, for short contractions, by pointers."""

    long: Tile
    short: Tile
    pointers: Tile


# up to here two blocks per multiprocessor hide one's epilogue under the other's main loop
SHORT_K = 1024

_AMPERE = Tile(128, 128, 32, 8, 3, 2)
_HOPPER = Tiles(
    long=Tile(128, 256, 64, 8, 3, 4),
    short=Tile(128, 128, 64, 8, 3, 2),
    pointers=Tile(128, 64, 32, 8, 3, 1),
)
_TF32 = Tile(128, 128, 32, 8, 3, 2)
_SMALL = Tile(64, 64, 32, 8, 3, 1)
_CDNA = Tile(128, 128, 64, 8, 2, 2)
# unequal sides, so that a test sees a swapped axis
_INTERPRETED = Tile(32, 64, 16, 4, 1, 2)

# (architecture family, bytes per element)
TILES: dict[tuple[str, int], Tiles] = {
    ("sm_80", 2): Tiles(_AMPERE, _AMPERE, _HOPPER.pointers),
    ("sm_80", 4): Tiles(_SMALL, _SMALL, _SMALL),
    ("sm_90", 2): _HOPPER,
    ("sm_90", 4): Tiles(_TF32, _TF32, _SMALL),
    ("sm_100", 2): _HOPPER,
    ("sm_100", 4): Tiles(_TF32, _TF32, _SMALL),
    ("gfx9", 2): Tiles(_CDNA, _CDNA, _HOPPER.pointers),
    ("gfx9", 4): Tiles(_SMALL, _SMALL, _SMALL),
    ("interpreter", 2): Tiles(_INTERPRETED, _INTERPRETED, _INTERPRETED),
    ("interpreter", 4): Tiles(_INTERPRETED, _INTERPRETED, _INTERPRETED),
}
# float32 without TF32 runs on the scalar units, which want small tiles
SCALAR_TILE = Tile(64, 64, 16, 8, 2)


def family(arch: str) -> str:
    """Return the table's row for an architecture name such as `sm_86` or `gfx942`."""
    if arch.startswith("sm_"):
        major = int(arch[3:]) // 10
        return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")
    return "gfx9" if arch.startswith("gfx") else arch


def tile_for(
    arch: str, itemsize: int, k: int, descriptors: bool = True, precision: str = "tf32"
) -> Tile:
    """Return the tile of a GEMM with contraction length k on operands of `itemsize` bytes.

    `descriptors`: whether tensor descriptors can address both operands; `precision`: "tf32" or
    "ieee", for float32 operands.
    """
    if itemsize == 4 and precision == "ieee" and arch != "interpreter":
        return SCALAR_TILE
    tiles = TILES[family(arch), itemsize]
    if not descriptors:
        return tiles.pointers
    return tiles.short if k <= SHORT_K else tiles.long


def kernel_for(arch: str, itemsize: int, k: int) -> str:
    """Choose `fused` or `split` for a single linear whose pre-activation is recomputed.

    Fusing saves two passes over z and costs what the Triton GEMM loses to the vendor's; the model
    of that trade breaks even near k = 2048 on half precision. float32 stays with the vendor's GEMM.
    """
    if arch == "interpreter":
        return "fused"
    return "fused" if itemsize == 2 and k <= SHORT_K else "split"
