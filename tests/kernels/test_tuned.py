"""The cache of what `bench tune` measured on this machine, and who reads it."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch

from fusedckpt.autograd.dispatch import forced_path, variant_for
from fusedckpt.kernels import tuned
from fusedckpt.kernels.runtime import IS_INTERPRETED
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

    def variant(kernel: str | None = None, fused: str = "hybrid") -> str:
        return variant_for("mlp", x, x.dtype, (8, 24, 16), kernel, fused)

    key = ("mlp", "interpreter", 4, 24, 16, 3)
    assert variant() == "hybrid"
    with tuned.using(Tuned({}, {key: "split"})):
        assert variant() == "split"
        assert variant("hybrid") == "hybrid"
        monkeypatch.setattr("fusedckpt.autograd.dispatch._PREFERRED", "hybrid")
        assert variant() == "hybrid"
        monkeypatch.undo()
        with forced_path("aten"):
            assert variant() == "aten"
    # a variant that this layer has not
    with tuned.using(Tuned({}, {key: "fused"})):
        assert variant() == "hybrid"


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
