"""`python -m bench run --memory`: it finds and times what fits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import run
from bench.__main__ import main
from bench.search import most

pytestmark = pytest.mark.usefixtures("aten", "uncompiled")


@pytest.mark.parametrize("limit", [0, 9, 10, 19, 20, 25, 39, 77, 115, 333, 10_000])
@pytest.mark.parametrize(("guess", "precision"), [(1, 0.0), (5, 0.0), (30, 0.0), (1, 1 / 8)])
def test_the_most_that_fits_is_found(limit, guess, precision):
    tried = []

    def fits(count: int) -> bool:
        tried.append(count)
        return 10 * count <= limit

    found = most(fits, guess, precision)
    assert 10 * found <= limit < 10 * (found + max(1, precision * found))
    assert len(set(tried)) == len(tried)


def test_it_finds_what_fits_and_times_it(tmp_path, bench_run, add_way, capsys):
    def limited(eager):
        def fn(x, *weights):
            if len(x) > 100:
                raise torch.OutOfMemoryError("no room")
            return eager(x, *weights)

        return fn

    add_way("limited", limited)
    add_way("off", lambda eager: lambda *inputs: 1.01 * eager(*inputs))
    options = ("--case=gated_mlp", "--memory=1", "--repeat=1")
    status, found = bench_run(tmp_path, *options)
    rows = {row["name"]: row for row in found if row["failure"] != "not installed"}
    assert status == 1
    assert rows.pop("off")["failure"].startswith("wrong: result 0")
    assert rows.pop("limited")["fits"] == 96
    for row in rows.values():
        tokens, peak = row["fits"], row["peak_bytes"]
        assert tokens > 0
        assert tokens % 48 == 0
        # another eighth, or step, would not have fitted
        assert peak * (tokens + max(48, tokens / 8)) / tokens > 2**20
        assert peak <= 2**20
        assert len(row["both_ms"]) == 1
    assert rows["fusedckpt inputs"]["fits"] > rows["checkpoint"]["fits"]
    assert main(["show", "--plot", str(tmp_path / "run.jsonl")]) == 0
    (figure,) = tmp_path.glob("*.png")
    assert figure.name == "memory-gated_mlp-tiny-32-1-float32.png"


def test_memory_too_small_is_a_reason(tmp_path, bench_run, monkeypatch, capsys, refused):
    monkeypatch.setattr(run, "MIB", 1)
    options = ("--case=mlp", "--only=eager", "--memory=1", "--repeat=1")
    assert bench_run(tmp_path, *options)[0] == 0
    assert "eager: not even 48 tokens fit" in capsys.readouterr().out
    assert "no row has times to draw" in refused("show", "--plot", str(tmp_path / "run.jsonl"))
