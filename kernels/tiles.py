"""Which tile a GEMM launch uses: data, and one lookup.

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
    """An architecture's tiles, by what the launch is like.

    `short` contractions end soon: two blocks per multiprocessor hide one's epilogue under the
    other's main loop. `hybrid` epilogues read as much as they write, and want registers for it.
    `pointers` replace tensor descriptors where alignment forbids those, and want registers too.
    """

    long: Tile
    short: Tile
    hybrid_long: Tile
    hybrid_short: Tile
    pointers: Tile


SHORT_K = 1024

_SMALL = Tile(64, 64, 32, 8, 3, 1)
_HOPPER = Tiles(
    long=Tile(128, 256, 64, 8, 3, 8),
    short=Tile(128, 128, 64, 8, 3, 2),
    hybrid_long=Tile(256, 128, 64, 8, 3, 8),
    hybrid_short=Tile(128, 128, 64, 8, 3, 4),
    pointers=_SMALL,
)
_TF32 = Tile(128, 128, 32, 8, 3, 2)
_HOPPER_TF32 = Tiles(_TF32, _TF32, _SMALL, _SMALL, _SMALL)
_AMPERE = Tile(128, 128, 32, 8, 3, 4)
_NARROW = Tile(128, 64, 32, 8, 3, 2)
_CDNA = Tile(128, 128, 64, 8, 2, 2)
# unequal sides, so that a test sees a swapped axis
_INTERPRETED = Tiles(*5 * [Tile(32, 64, 16, 4, 1, 2)])

# (architecture family, bytes per element)
TILES: dict[tuple[str, int], Tiles] = {
    ("sm_80", 2): Tiles(_AMPERE, _AMPERE, _NARROW, _NARROW, _SMALL),
    ("sm_80", 4): Tiles(*5 * [_SMALL]),
    ("sm_90", 2): _HOPPER,
    ("sm_90", 4): _HOPPER_TF32,
    # 256 rows of dh spill there
    ("sm_100", 2): _HOPPER._replace(hybrid_long=_HOPPER.hybrid_short),
    ("sm_100", 4): _HOPPER_TF32,
    ("gfx9", 2): Tiles(_CDNA, _CDNA, _NARROW, _NARROW, _SMALL),
    ("gfx9", 4): Tiles(*5 * [_SMALL]),
    ("interpreter", 2): _INTERPRETED,
    ("interpreter", 4): _INTERPRETED,
}
# float32 without TF32 runs on the scalar units, which want small tiles
SCALAR_TILE = Tile(64, 64, 16, 8, 2)


def family(arch: str) -> str:
    """Return the table's row for an architecture name such as `sm_86` or `gfx942`."""
    if arch.startswith("sm_"):
        major = int(arch[3:]) // 10
        return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")
    return "gfx9" if arch.startswith("gfx") else arch


def has_tensor_maps(arch: str) -> bool:
    """Whether kernels load tiles by tensor descriptors that the host made: from Hopper on."""
    return family(arch) in ("sm_90", "sm_100", "interpreter")


def tile_for(
    arch: str,
    itemsize: int,
    k: int,
    hybrid: bool = False,
    descriptors: bool = True,
    precision: str = "tf32",
) -> Tile:
    """Return the tile of a GEMM with contraction length k on operands of `itemsize` bytes.

    `descriptors`: whether both operands are aligned as those want them; `precision`: "tf32" or
    "ieee", for float32 operands.
    """
    if itemsize == 4 and precision == "ieee" and arch != "interpreter":
        return SCALAR_TILE
    slot = slot_of(k, hybrid, descriptors)
    return getattr(TILES[family(arch), itemsize], slot)


def slot_of(k: int, hybrid: bool = False, descriptors: bool = True) -> str:
    """Return which of Tiles a GEMM of contraction length k takes."""
    if not descriptors:
        return "pointers"
    return ("hybrid_" if hybrid else "") + ("short" if k <= SHORT_K else "long")
