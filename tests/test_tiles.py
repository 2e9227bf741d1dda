"""The tile tables and the choice of plan, as the pure functions they are."""

import pytest

from fusedckpt.kernels.tiles import (
    SCALAR_TILE,
    SHORT_K,
    TILES,
    family,
    gains_by_fusion,
    tile_for,
)


@pytest.mark.parametrize(
    ("arch", "row"),
    [
        ("sm_80", "sm_80"),
        ("sm_86", "sm_80"),
        ("sm_89", "sm_80"),
        ("sm_90", "sm_90"),
        ("sm_100", "sm_100"),
        ("sm_103", "sm_100"),
        ("sm_120", "sm_80"),
        ("gfx942", "gfx9"),
        ("gfx950", "gfx9"),
        ("interpreter", "interpreter"),
    ],
)
def test_every_architecture_has_a_row(arch, row):
    assert family(arch) == row
    for itemsize in (2, 4):
        assert tile_for(arch, itemsize, 4096) == TILES[row, itemsize].long


def test_what_a_launch_is_like_picks_its_tile():
    tiles = TILES["sm_90", 2]
    assert tile_for("sm_90", 2, SHORT_K) == tiles.short
    assert tile_for("sm_90", 2, SHORT_K + 1) == tiles.long
    assert tile_for("sm_90", 2, SHORT_K, hybrid=True) == tiles.hybrid_short
    assert tile_for("sm_90", 2, SHORT_K + 1, hybrid=True) == tiles.hybrid_long
    assert tile_for("sm_90", 2, 4096, hybrid=True, descriptors=False) == tiles.pointers
    assert tile_for("sm_90", 4, 4096, precision="ieee") == SCALAR_TILE
    assert tile_for("sm_90", 2, 4096, precision="ieee") == tiles.long
    # unequal sides: the tests would not see an axis swapped between equal ones
    interpreted = tile_for("interpreter", 4, 4096, precision="ieee")
    assert len({interpreted.block_m, interpreted.block_n, interpreted.block_k}) == 3


def test_tiles_are_what_triton_takes():
    for tiles in [*TILES.values(), (SCALAR_TILE,)]:
        for tile in tiles:
            for size in (*tile[:3], tile.num_warps, tile.slices):
                assert size > 0
                assert size & (size - 1) == 0
            assert tile.block_n // tile.slices >= 16


def test_fusion_is_chosen_for_short_half_precision_contractions():
    assert gains_by_fusion("sm_90", 2, SHORT_K)
    assert not gains_by_fusion("sm_90", 2, SHORT_K + 1)
    assert not gains_by_fusion("sm_90", 4, SHORT_K)
    assert gains_by_fusion("interpreter", 4, 4096)
