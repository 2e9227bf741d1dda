"""Failures of `python -m bench run` stay alone, and wrong numbers get no speed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("matplotlib", reason="needs the bench extra")

from running import bench, rows_of

from bench import jobs

pytestmark = pytest.mark.usefixtures("aten", "uncompiled")


def test_wrong_numbers_get_no_speed(tmp_path, add_way, capsys):
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:  # type: ignore[override]
            return dy * 1.001

    add_way("off", lambda eager: lambda x, *weights: eager(Off.apply(x), *weights))
    add_way("nan", lambda eager: lambda *inputs: eager(*inputs) * math.nan)
    status, result = bench(tmp_path, "--case=mlp")
    row = rows_of(result)["off"]
    assert status == 1
    # y, then dx
    assert row["failure"].startswith("wrong: result 1 is off by ")
    assert row["is_wrong"]
    assert row["both_ms"] is row["forward_ms"] is row["saved_bytes"] is None
    assert "off: wrong: result 1" in capsys.readouterr().out
    assert rows_of(result)["nan"]["is_wrong"]
    assert rows_of(result)["eager"]["both_ms"]


@pytest.mark.parametrize("calls", [0, 3, 6])
def test_a_crash_loses_its_own_row_alone(tmp_path, add_way, capsys, calls):
    def crash(eager):
        left = iter(range(calls))

        def fn(*inputs: Tensor) -> Tensor:
            if next(left, None) is None:
                raise RuntimeError("out of [memory]\nat a place")
            return eager(*inputs)

        return fn

    add_way("crash", crash)
    status, result = bench(tmp_path, "--case=mlp")
    rows = rows_of(result)
    assert status == 0
    assert rows.pop("crash")["failure"] == "RuntimeError: out of [memory]"
    assert all(row["both_ms"] for row in rows.values())
    assert "crash: RuntimeError: out of [memory]" in capsys.readouterr().out


def test_inputs_that_cannot_be_made_lose_one_size(tmp_path, monkeypatch):
    def refuse(*args, **options) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(jobs, "draw", refuse)
    status, result = bench(tmp_path, "--case=mlp")
    # eager's among them
    assert status == 1
    assert {row["failure"] for row in rows_of(result).values()} == {"MemoryError: no room"}


def test_it_fails_where_eager_or_ours_raises(tmp_path, add_way):
    def refuse(*inputs: Tensor) -> Tensor:
        raise RuntimeError("no")

    for name, expected in (("library", 0), ("torch.compile", 0), ("ours(x)", 1), ("eager", 1)):
        add_way(name, lambda eager: refuse)
        status, _ = bench(tmp_path, "--case=rms_norm", "--repeat=1", "--skip=fusedckpt")
        assert status == expected, name


def test_who_wishes_to_exit_loses_its_row(tmp_path, add_way):
    add_way("exit", lambda eager: lambda *inputs: exit("enough"))
    status, result = bench(tmp_path, "--case=rms_norm", "--repeat=1")
    assert status == 0
    assert rows_of(result, "rms_norm")["exit"]["failure"] == "SystemExit: enough"
    assert rows_of(result, "rms_norm")["fusedckpt"]["both_ms"]


def test_a_lost_device_costs_a_row(tmp_path, add_way, monkeypatch, capsys):
    def fault(*inputs: Tensor) -> Tensor:
        # as any later call for the device does then
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", fault)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    measured = jobs._measure

    def in_another_process(*args) -> None:
        # which has a device
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        measured(*args)

    monkeypatch.setattr(jobs, "_measure", in_another_process)
    add_way("fault", lambda eager: lambda *x: fault() if len(x) == 2 else eager(*x))
    status, result = bench(tmp_path, "--case=rms_norm", "--case=layer_norm", "--repeat=1")
    why = "crashed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert status == 0
    assert rows_of(result, "rms_norm")["fault"]["failure"] == why
    assert rows_of(result, "rms_norm")["fusedckpt"]["both_ms"]
    assert rows_of(result, "layer_norm")["fault"]["both_ms"]
    assert f"fault {why}; once more without it" in capsys.readouterr().err


def test_numbers_are_checked_after_timing_too(tmp_path, add_way):
    def from_call(first: int, change):
        def wrap(eager):
            calls = iter(range(first))
            return lambda *inputs: (
                change(eager, *inputs) if next(calls, None) is None else eager(*inputs)
            )

        return wrap

    def double(eager, x: Tensor, *rest: Tensor) -> Tensor:
        y = eager(x, *rest)
        # as a kernel writes, unseen by autograd
        x.data.mul_(2)
        return y

    for first in (1, 4):
        add_way(f"off {first}", from_call(first, lambda eager, *inputs: 1.01 * eager(*inputs)))
        add_way(f"writes {first}", from_call(first, double))
    status, result = bench(tmp_path, "--case=layer_norm")
    rows = rows_of(result, "layer_norm")
    assert status == 1
    for first in (1, 4):
        assert rows[f"off {first}"]["failure"].startswith("wrong: result 0 is off by ")
        assert rows[f"writes {first}"]["failure"] == "wrong: it overwrites input 0"
        assert rows[f"off {first}"]["both_ms"] is rows[f"writes {first}"]["both_ms"] is None
    assert rows["eager"]["both_ms"]
    assert rows["fusedckpt"]["both_ms"]


def test_inputs_that_change_for_once_are_nobodys_numbers(tmp_path, add_way):
    calls = iter(range(1000))

    def once(eager):
        def fn(x: Tensor, *rest: Tensor) -> Tensor:
            y = eager(x, *rest)
            if next(calls) == 5:
                x.data.add_(1)
            return y

        return fn

    add_way("once", once)
    status, result = bench(tmp_path, "--case=rms_norm")
    assert status == 1
    assert {row["both_ms"] for row in rows_of(result, "rms_norm").values()} == {None}


def test_another_dtype_is_wrong(tmp_path, add_way):
    add_way("wide", lambda eager: lambda *inputs: eager(*inputs).double())
    options = ("--case=rms_norm", "--case=gated_mlp", "--repeat=1")
    status, result = bench(tmp_path, *options)
    assert status == 1
    expected = "wrong: result 0 is torch.float64, eager's torch.float32"
    assert rows_of(result, "rms_norm")["wide"]["failure"] == expected
