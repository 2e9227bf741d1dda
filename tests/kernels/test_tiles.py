"""The tile tables and the choice of variant, as the pure functions they are."""

import os
import subprocess
import sys
from unittest import TestCase

import pytest
import torch
from support import randn

from fusedckpt.autograd import dispatch
from fusedckpt.functional import gated_mlp, linear_act
from fusedckpt.kernels import gemm, norm
from fusedckpt.kernels.gemm import SCALAR, SHORT_K, TILES, Tile, family, precision_of, tile_for
from fusedckpt.kernels.linear import linear_then_act as launch_linear_act
from fusedckpt.kernels.runtime import HAS_TRITON, cdiv
from tests.ptx.product_cases import precision as multiplying_in


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
def test_the_choice_is_reported_on_request():
    x, w, down = randn(3, 16), randn(24, 16), randn(16, 24)
    with TestCase().assertLogs("fusedckpt", "DEBUG") as logs, torch.no_grad():
        linear_act(x, w, kernel="split")
        gated_mlp(x, w, w, down, kernel="hybrid")
    linear, mlp = (record.getMessage() for record in logs.records)
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


@pytest.mark.parametrize(
    ("arch", "dtype", "precision"),
    [
        ("sm_80", torch.float32, "rounded tf32"),
        ("sm_120", torch.float32, "rounded tf32"),
        ("gfx942", torch.float32, "tf32"),
        # Triton refuses TF32 there
        ("gfx90a", torch.float32, "ieee"),
        ("gfx1100", torch.float32, "ieee"),
        ("sm_90", torch.bfloat16, "ieee"),
    ],
)
def test_tf32_is_asked_for_where_a_chip_has_it(arch, dtype, precision, monkeypatch):
    monkeypatch.setattr(gemm, "arch", lambda: arch)
    x = torch.empty(2, 3, dtype=dtype, device="meta")
    assert precision_of(x) == "ieee"
    with multiplying_in("tf32"):
        assert precision_of(x) == precision


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("can_round", {False, gemm.DESCRIPTORS_ROUND})
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_descriptors_that_cannot_round_load_no_tf32(can_round, precision, monkeypatch):
    """As those of triton 3.6, which would cut the operands of a product."""
    launches = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: launches.append((args, options))

    monkeypatch.setattr(gemm, "arch", lambda: "sm_90")
    monkeypatch.setattr(gemm, "gemm_kernel", Recorder())
    monkeypatch.setattr(gemm, "DESCRIPTORS_ROUND", can_round)
    x, w = torch.empty(16, 32), torch.empty(64, 32)
    with multiplying_in(precision):
        launch_linear_act(x, w, None, "gelu", keep_z=False)
    ((args, options),) = launches
    assert options["DESCRIPTORS"] == (can_round or precision == "ieee")
    if options["DESCRIPTORS"] and precision == "tf32":
        assert args[0].round_f32_to_tf32
        assert args[1].round_f32_to_tf32


def test_no_more_programs_share_rows_than_the_longest_turn_needs():
    """Each program of a norm's gradient writes a row of sums, which one launch reads again."""
    # rows, rows of a tile, programs that fit a multiprocessor, multiprocessors
    for rows, block_m, resident, units, programs in (
        (4096, 4, 1, 132, 128),
        (512, 2, 1, 108, 86),
        # two on each
        (4096, 4, 2, 108, 216),
        # beyond one each they get 8 rows
        (512, 1, 4, 132, 128),
        (1600, 1, 4, 132, 200),
        (3, 4, 1, 132, 1),
        (0, 4, 1, 132, 1),
    ):
        assert norm.programs_for(rows, block_m, resident, units) == programs
    for tiles in range(1, 300, 7):
        programs = norm.programs_for(tiles, 1, 1, 108)
        turns = cdiv(tiles, min(tiles, 108))
        assert cdiv(tiles, programs) == turns
        assert programs == 1 or cdiv(tiles, programs - 1) > turns
    # groups share the multiprocessors
    assert norm.programs_for(4096, 4, 1, 132, groups=8) == 16
    assert norm.programs_for(4096, 4, 1, 6, groups=8) == 1
