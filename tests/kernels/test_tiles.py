"""The tile tables and the choice of variant, as the pure functions they are."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from support import randn

from fusedckpt.autograd import dispatch
from fusedckpt.functional import gated_mlp, linear_act
from fusedckpt.kernels.gemm import SCALAR, SHORT_K, TILES, Tile, family, tile_for
from fusedckpt.kernels.runtime import HAS_TRITON


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
        assert tile_for(arch, itemsize, 4096, False, True, "tf32") == TILES[row, itemsize][0]


def test_what_a_launch_is_like_picks_its_tile():
    long, short, hybrid_long, hybrid_short, pointers = TILES["sm_90", 2]

    def tile(k: int, hybrid: bool = False, aligned: bool = True, itemsize: int = 2) -> Tile:
        return tile_for("sm_90", itemsize, k, hybrid, aligned, "ieee")

    assert tile(SHORT_K) == short
    assert tile(SHORT_K + 1) == long
    assert tile(SHORT_K, hybrid=True) == hybrid_short
    assert tile(SHORT_K + 1, hybrid=True) == hybrid_long
    assert tile(4096, hybrid=True, aligned=False) == pointers
    assert tile(4096, itemsize=4) == SCALAR
    # unequal sides: the tests would not see an axis swapped between equal ones
    assert len(set(tile_for("interpreter", 4, 4096, False, True, "ieee")[:3])) == 3


def test_tiles_are_what_triton_takes():
    for tile in (SCALAR, *(tile for tiles in TILES.values() for tile in tiles)):
        for size in (*tile[:3], tile.num_warps, tile.SLICES):
            assert size > 0
            assert size & (size - 1) == 0
        assert tile.BLOCK_N // tile.SLICES >= 16


def test_split_is_shipped_for_gpus_and_may_be_overridden(monkeypatch):
    monkeypatch.setattr(dispatch, "path_of", lambda device, dtype: "triton")
    monkeypatch.setattr(dispatch, "arch", lambda: "sm_90")
    monkeypatch.setattr(dispatch, "IS_INTERPRETED", False)
    x = torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta")

    def variant(kernel: str | None = None, op: str = "mlp", fused: str = "hybrid") -> str:
        return dispatch.variant_for(op, x, x.dtype, (8192, 4096, 1024), kernel, fused)

    assert variant() == variant(op="linear_act", fused="fused") == "split"
    assert variant("hybrid") == "hybrid"
    monkeypatch.setattr(dispatch, "_PREFERRED", "hybrid")
    assert variant() == "hybrid"
    # a linear has no hybrid variant
    assert variant("split") == variant(op="linear_act", fused="fused") == "split"


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_the_choice_is_reported_on_request(caplog):
    x, w, down = randn(3, 16), randn(24, 16), randn(16, 24)
    with caplog.at_level(logging.DEBUG, "fusedckpt"), torch.no_grad():
        linear_act(x, w, kernel="split")
        gated_mlp(x, w, w, down, kernel="hybrid")
    linear, mlp = (record.getMessage() for record in caplog.records)
    assert linear.startswith("linear_act 3x24x16 torch.float32 on ")
    assert linear.endswith(": split")
    assert mlp.startswith("gated_mlp 3x24x16 torch.float32 on ")
    assert mlp.endswith(": hybrid")


def test_the_environment_prefers_a_variant():
    code = "from fusedckpt.autograd import dispatch; print(dispatch._PREFERRED)"
    command = [sys.executable, "-c", code]
    for preferred, status in (("hybrid", 0), ("fast", 1)):
        environment = os.environ | {"FUSEDCKPT_KERNEL": preferred}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status
        said = done.stderr if status else done.stdout
        expected = f"FUSEDCKPT_KERNEL must be one of split, hybrid, fused, got '{preferred}'"
        assert (expected if status else preferred) in said
