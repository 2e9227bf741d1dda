"""What was measured on this machine: the cache, who reads it, and `bench tune`, which fills it."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from fusedckpt.autograd.dispatch import forced_path, plan_for
from fusedckpt.kernels import gemm, tiles, tuned
from fusedckpt.kernels.runtime import HAS_TRITON, IS_INTERPRETED
from fusedckpt.kernels.tiles import TILES, Tile, tile_for
from fusedckpt.kernels.tuned import NOTHING, Tuned

TILE = (64, 128, 32, 4, 4, 2)
CHOICES = Tuned(
    {("sm_90", 2, "long"): TILE, ("interpreter", 4, "short"): (32, 32, 16, 4, 1, 1)},
    {("mlp", "sm_90", 2, 4096, 1024, 11): "split", ("mlp", "sm_90", 2, 4096, 1024, 13): "hybrid"},
)
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs the interpreter")


def changed(change) -> str:
    record = json.loads(tuned.dump(CHOICES))
    change(record)
    return json.dumps(record)


def tile_of(record: dict) -> dict:
    return record["tiles"]["sm_90/2/long"]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "tuned.json"
    tuned.store(CHOICES, path)
    assert tuned.load(path) == CHOICES
    assert list(path.parent.iterdir()) == [path]


def test_no_file_is_no_choice(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.load(tmp_path / "none.json") == NOTHING


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"format": "another program"}',
        changed(lambda record: record.update(format="fusedckpt tuned 3")),
        changed(lambda record: record.update(triton="0.1")),
        changed(lambda record: record.pop("variants")),
        changed(lambda record: record.update(tiles=[])),
        changed(lambda record: record["tiles"].update({"sm_90/2/tall": {}})),
        changed(lambda record: record["tiles"].update({"sm_90/2/long": [1, 2]})),
        changed(lambda record: tile_of(record).update(block_m=96)),
        changed(lambda record: tile_of(record).update(block_k=8)),
        changed(lambda record: tile_of(record).update(slices=16)),
        changed(lambda record: tile_of(record).update(num_warps=True)),
        changed(lambda record: tile_of(record).update(num_stages=64)),
        changed(lambda record: tile_of(record).update(block_n="128")),
        changed(lambda record: tile_of(record).update(block_n=-128)),
        changed(lambda record: tile_of(record).pop("slices")),
        changed(lambda record: record["variants"].update({"mlp/sm_90/2/1/1/1": "fast"})),
        changed(lambda record: record["variants"].update({"mlp/sm_90/2/1/1/1": ["split"]})),
        changed(lambda record: record["variants"].update({"mlp/sm_90/2/1": "split"})),
        changed(lambda record: record["variants"].update({"mlp": "split"})),
    ],
)
def test_a_file_that_is_not_ours_is_ignored_aloud(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"fusedckpt ignores .*tuned\.json: "):
        assert tuned.load(path) == NOTHING


def test_bytes_that_are_no_text_are_ignored_aloud(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(RuntimeWarning, match="fusedckpt ignores"):
        assert tuned.load(path) == NOTHING


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    tuned.store(CHOICES, path)
    before = path.read_text()

    def refuse(*args) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        tuned.store(NOTHING, path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_tiles_measured_come_before_those_shipped():
    with tuned.using(CHOICES):
        assert tile_for("sm_90", 2, 4096) == Tile(*TILE)
        assert tile_for("sm_90", 2, 512) == TILES["sm_90", 2].short
        # another chip of the family was not measured
        assert tile_for("sm_86", 2, 4096) == TILES["sm_80", 2].long
        assert tile_for("sm_90", 4, 4096) == TILES["sm_90", 4].long
    assert tile_for("sm_90", 2, 4096) == TILES["sm_90", 2].long


def test_the_nearest_number_of_rows_decides():
    sizes = 4096, 1024
    rows = (1, 2048, 4095, 8192, 65536)
    found = {m: CHOICES.variant("mlp", "sm_90", 2, (m, *sizes)) for m in rows}
    assert found == {1: "split", 2048: "split", 4095: "split", 8192: "hybrid", 65536: "hybrid"}
    # as near to both: the lower
    assert CHOICES.variant("mlp", "sm_90", 2, (4096, *sizes)) == "split"
    assert CHOICES.variant("gated_mlp", "sm_90", 2, (2048, *sizes)) is None
    assert CHOICES.variant("mlp", "sm_90", 2, (2048, 1024, 4096)) is None


@interpreted
def test_variants_measured_come_after_a_call_and_before_the_rule(monkeypatch):
    x = torch.ones(8, 16)

    def plan(kernel: str | None = None, fused: str = "hybrid") -> str:
        return plan_for("mlp", x, x.dtype, (8, 24, 16), kernel, fused)

    key = ("mlp", "interpreter", 4, 24, 16, 3)
    assert plan() == "hybrid"
    with tuned.using(Tuned({}, {key: "split"})):
        assert plan() == "split"
        assert plan("hybrid") == "hybrid"
        monkeypatch.setattr("fusedckpt.autograd.dispatch._PREFERRED", "hybrid")
        assert plan() == "hybrid"
        monkeypatch.undo()
        with forced_path("aten"):
            assert plan() == "aten"
    # a variant that this layer has not
    with tuned.using(Tuned({}, {key: "fused"})):
        assert plan() == "hybrid"


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"FUSEDCKPT_CACHE": "{}/mine.json"}, "mine.json"),
        ({"XDG_CACHE_HOME": "{}"}, "fusedckpt/tuned.json"),
        ({"XDG_CACHE_HOME": "", "HOME": "{}"}, ".cache/fusedckpt/tuned.json"),
        ({"FUSEDCKPT_CACHE": "", "XDG_CACHE_HOME": "{}"}, None),
    ],
)
def test_the_file_is_read_once(tmp_path, monkeypatch, environment, name):
    monkeypatch.delenv("FUSEDCKPT_CACHE")
    for key, value in environment.items():
        monkeypatch.setenv(key, value.format(tmp_path))
    path = tmp_path / (name or "fusedckpt/tuned.json")
    tuned.store(CHOICES, path)
    assert tuned.cache_path() == (path if name else None)
    tuned._from_file.cache_clear()
    try:
        assert tuned.tuned() == (CHOICES if name else NOTHING)
        tuned.store(Tuned({}, CHOICES.variants), path)
        assert tuned.tuned() == (CHOICES if name else NOTHING)
    finally:
        tuned._from_file.cache_clear()


# what follows is the command
pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command  # noqa: E402
from bench import tune  # noqa: E402

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
        changed(lambda record: record.update(format="fusedckpt tuned 3")),
        changed(lambda record: record.update(triton="0.1")),
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
