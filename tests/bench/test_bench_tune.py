"""`bench tune`, which fills the cache of tiles and variants, and prints what can be shipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels import gemm, tiles, tuned
from fusedckpt.kernels.runtime import HAS_TRITON, IS_INTERPRETED
from fusedckpt.kernels.tiles import TILES, Tile
from fusedckpt.kernels.tuned import Tuned

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import tune

TILE = (64, 128, 32, 4, 4, 2)
CHOICES = Tuned(
    {("sm_90", 2, "long"): TILE},
    {("mlp", "sm_90", 2, 4096, 1024, 11): "split", ("mlp", "sm_90", 2, 4096, 1024, 13): "hybrid"},
)
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs the interpreter")
TINY = ["tune", "--device=cpu", "--size=tiny", "--tokens=8", "--dtype=float32", "--repeat=1"]


@pytest.fixture
def one_key(monkeypatch):
    # the interpreter takes seconds a candidate
    monkeypatch.setattr(tune, "TILE_CASES", {"short": "linear_act"})
    monkeypatch.setattr(tune, "VARIANT_CASES", ("linear_act",))


@interpreted
def test_tuning_fills_the_cache(tmp_path, monkeypatch, capsys, one_key):
    path = tmp_path / "tuned.json"
    before = Tuned({("sm_90", 2, "long"): TILE}, {})
    tuned.store(before, path)
    used = []
    run = gemm.launch_tile
    monkeypatch.setattr(gemm, "launch_tile", lambda *args: used.append(run(*args)) or used[-1])
    assert command.main([*TINY, f"--cache={path}"]) == 0
    found = tuned.load(path)
    # another chip's choices stay
    assert found.tiles.items() >= before.tiles.items()
    assert found.tiles["interpreter", 4, "short"] in [(32, 64, 16, 4, 1, 2), (32, 32, 16, 4, 1, 1)]
    assert found.variants == {("linear_act", "interpreter", 4, 80, 32, 3): "split"}
    # each candidate was really launched
    assert {tuple(tile) for tile in used} == {(32, 64, 16, 4, 1, 2), (32, 32, 16, 4, 1, 1)}
    out = capsys.readouterr().out
    _, rows, plans = re.split(
        "rows for TILES in kernels/tiles.py:|variants, which .* alone .*:", out
    )
    measured = {"short": Tile(*found.tiles["interpreter", 4, "short"])}
    row = TILES["interpreter", 4]._replace(**measured)
    assert eval(f"{{{rows}}}", vars(tiles)) == {("interpreter", 4): row}
    assert plans.strip() == "linear_act, 4 bytes, [8, 80, 32]: split"


def test_what_is_printed_can_be_pasted_into_the_table():
    choices = Tuned(
        {
            ("sm_86", 2, "long"): TILE,
            ("sm_86", 2, "pointers"): (64, 64, 32, 4, 4, 1),
            ("sm_86", 4, "short"): TILE,
            ("sm_90", 2, "long"): TILE,
        },
        CHOICES.variants,
    )
    half = TILES["sm_80", 2]._replace(long=Tile(*TILE), pointers=Tile(64, 64, 32, 4, 4, 1))
    single = TILES["sm_80", 4]._replace(short=Tile(*TILE))
    printed = "\n".join(tune.rows_of(choices, "sm_86"))
    assert eval(f"{{{printed}}}", vars(tiles)) == {("sm_80", 2): half, ("sm_80", 4): single}
    # nothing was measured here: no row, and no heading for one
    assert [*tune.report(choices, "sm_100", Path("file"))] == ["\nsm_100, stored in file"]


@interpreted
@pytest.mark.parametrize("text", ["# Readme", "", "{", '{"format": "another", "a": "fusedckpt"}'])
def test_a_file_that_is_not_ours_is_not_replaced(tmp_path, capsys, text):
    path = tmp_path / "readme.md"
    path.write_text(text)
    with pytest.raises(SystemExit):
        command.main([*TINY, f"--cache={path}"])
    assert "readme.md is no cache that bench tune wrote" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize(
    "text",
    [
        tuned.dump(CHOICES),
        tuned.dump(CHOICES)[:40],
        json.dumps(json.loads(tuned.dump(CHOICES)) | {"format": "fusedckpt tuned 3"}),
        json.dumps(json.loads(tuned.dump(CHOICES)) | {"triton": "0.1"}),
    ],
)
def test_a_file_of_ours_is_replaced_whatever_its_version(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    tune.check_place(path)
    assert path.read_text() == text
    assert [*tmp_path.iterdir()] == [path]


@interpreted
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "Is a directory"),
        ("file/tuned.json", "File exists"),
        ("file/new/tuned.json", "Not a directory"),
        # nobody makes files there
        ("/proc/self/tuned.json", "No such file or directory"),
    ],
)
def test_a_place_that_takes_no_file_is_refused_first(tmp_path, monkeypatch, capsys, place, says):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tune.Tuner, "race", lambda *args: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        command.main([*TINY, f"--cache={tmp_path / place}"])
    assert says in capsys.readouterr().err


@interpreted
def test_a_candidate_that_is_wrong_or_spills_is_out(tmp_path, monkeypatch, capsys, one_key):
    path = tmp_path / "tuned.json"
    wrong, spilling = Tile(16, 32, 16, 4, 1, 1), Tile(32, 16, 16, 4, 1, 1)
    monkeypatch.setattr(tune, "candidates", lambda *key: [wrong, spilling])
    launch = gemm.gemm_kernel

    class Kernel:
        def __getitem__(self, grid):
            def run(*args, BLOCK_M, BLOCK_N, **options):
                launch[grid](*args, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, **options)
                if BLOCK_M == 16:
                    # what the epilogue wrote
                    args[2][0].mul_(1.01)
                return type("Compiled", (), {"n_spills": 9 * (BLOCK_N == 16)})

            return run

    monkeypatch.setattr(gemm, "gemm_kernel", Kernel())
    assert command.main([*TINY, f"--cache={path}"]) == 0
    out = capsys.readouterr().out
    assert f"{tuple(wrong)}: wrong: result 0 is off" in out
    assert f"{tuple(spilling)}: ValueError: spills 9 registers" in out
    assert tuned.load(path).tiles == {("interpreter", 4, "short"): (32, 64, 16, 4, 1, 2)}


@interpreted
def test_an_interrupt_keeps_what_was_chosen(tmp_path, monkeypatch, one_key):
    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.Tuner, "race", lambda self, case, size, tokens, ways: [*ways][-1])
    monkeypatch.setattr(tune.Tuner, "variant", interrupt)
    path = tmp_path / "tuned.json"
    assert command.main([*TINY, f"--cache={path}"]) == 130
    assert list(tuned.load(path).tiles) == [("interpreter", 4, "short")]


def test_there_is_nothing_to_tune_on_aten(tmp_path, capsys):
    with forced_path("aten"), pytest.raises(SystemExit):
        command.main([*TINY, f"--cache={tmp_path / 'tuned.json'}"])
    assert "runs on ATen, which has nothing to tune" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_shipped_candidates_are_tiles_that_the_cache_takes():
    from bench.tune import candidates

    for itemsize in (2, 4):
        for tile in candidates("sm_90", itemsize):
            kept = Tuned({("sm_90", itemsize, "long"): tuple(tile)}, {})
            assert tuned.parse(tuned.dump(kept)) == kept
