"""`bench host` at toy sizes: on a CPU its times mean nothing, its rows and arithmetic do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import host
from bench.cases import CASES, SIZES, load_of
from bench.results import read

(TINY,) = SIZES["tiny"]


def rows_of(tmp_path, *options):
    base = ["host", "--device=cpu", "--size=tiny", "--repeat=1", f"--out={tmp_path}"]
    assert command.main([*base, *options]) == 0
    return read(tmp_path / host.FILE)


def sum_of(row):
    return row["forward_ms"][0] + row["backward_ms"][0]


def test_rows_name_implementations_and_their_environment(tmp_path, capsys):
    rows = rows_of(tmp_path, "--case=rms_norm", "--case=gated_mlp", "--skip=Liger")
    names = [row["name"] for row in rows if row["case"] == "gated_mlp" and not row["failure"]]
    levels = [f"fusedckpt {level}" for level in ("inputs", "gate", "preact")]
    assert names == ["eager", "checkpoint", *levels]
    for row in rows:
        assert row.keys() >= {"commit", "torch", "device"}
        assert row["dtype"] == "float32"
        if not row["failure"]:
            assert row["both_ms"][0] == pytest.approx(sum_of(row), rel=1e-3)
            # the driver of a CPU has no launches
            assert row["launches"] is None
            assert row["break_even"] > 0
    out = capsys.readouterr().out
    assert "rms_norm, tiny: 48 tokens, D = 32" in out
    assert "break-even" in out
    assert command.main(["show", str(tmp_path / host.FILE)]) == 0


def test_a_llama_layer_is_trained_in_every_way(tmp_path):
    pytest.importorskip("transformers")
    rows = {row["name"]: row["failure"] for row in rows_of(tmp_path, "--case=llama_layer")}
    assert list(rows)[:3] == ["eager", "checkpoint", "Liger"]
    assert [name for name, failure in rows.items() if failure] == ["Liger"] * bool(rows["Liger"])


def test_break_even_is_where_the_device_takes_as_long_as_the_host():
    per_call, per_token = host.device_us(
        CASES["gated_mlp"], TINY, 64, torch.float32, tflops=1e-3, tbytes=1e-6
    )
    load = load_of(CASES["gated_mlp"], TINY, 128, torch.float32)
    assert per_call + 128 * per_token == pytest.approx(load["flops"] / 1e3 + load["bytes"] / 1)
    assert per_call > 0
    tokens = host.break_even(per_call + 300 * per_token, per_call, per_token)
    assert tokens == 300
    assert host.break_even(per_call / 2, per_call, per_token) == 0


def test_one_that_fails_costs_its_own_row():
    def broken(x):
        raise ValueError("two lines\nof text")

    x = torch.ones(2, 2, requires_grad=True)
    subjects = [host.Subject("a", lambda x: x * 2, ()), host.Subject("b", broken, ())]
    times, counts, failures = host.measure(subjects, x, 1)
    assert list(times) == list(counts)[1:] == ["a"]
    assert failures == {"b": "ValueError: two lines"}
    assert x.grad is None
