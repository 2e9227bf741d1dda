"""`python -m bench run` at toy sizes: every case, honest numbers, failures that stay alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusedckpt
from fusedckpt._dispatch import forced_path

pytest.importorskip("rich", reason="needs the bench extra")
pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import cases, measure, run
from bench.results import Group, table
from bench.sizes import SIZES

TINY = ["run", "--device=cpu", "--size=tiny", "--repeat=3"]
(SIZE,) = SIZES["tiny"]
F32 = 4


def bench(out: Path, *options: str) -> tuple[int, dict]:
    status = command.main([*TINY, *options, f"--out={out}"])
    return status, json.loads((out / "run.json").read_text())


def rows_of(result: dict, case: str = "mlp") -> dict[str, dict]:
    (group,) = (group for group in result["groups"] if group["case"] == case)
    return {row["name"]: row for row in group["rows"]}


@pytest.fixture(scope="module", autouse=True)
def cheap_path():
    # as in test_bench.py; torch.compile takes seconds a case and has a test of its own
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.delitem(cases.BASELINES, "torch.compile")
    with forced_path("aten"):
        yield
    patch.undo()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    status, result = bench(tmp_path_factory.mktemp("run"))
    assert status == 0
    return result


@pytest.fixture
def add_way(monkeypatch):
    def add(name: str, wrap) -> None:
        monkeypatch.setitem(cases.BASELINES, name, wrap)

    return add


def test_a_result_names_what_a_number_needs(result):
    settings, environment = result["settings"], result["environment"]
    assert settings["case"] == list(cases.CASES)
    assert settings["dtype"] == "float32"
    assert settings["repeat"] == 3
    assert environment["torch"] == torch.__version__
    assert environment["paths"] == fusedckpt.paths("cpu", torch.float32)
    assert {"device", "date", "commit", "python", "triton"} <= environment.keys()
    for group in result["groups"]:
        expected = (SIZE.dim, SIZE.hidden, SIZE.tokens)
        assert (group["dim"], group["hidden"], group["tokens"]) == expected


@pytest.mark.parametrize("name", cases.CASES)
def test_every_case_is_checked_weighed_and_timed(result, name):
    levels = cases.CASES[name].levels
    ours = [f"fusedckpt {level}" for level in levels] or ["fusedckpt"]
    rows = rows_of(result, name)
    assert list(rows) == ["eager", "checkpoint", *ours]
    for row in rows.values():
        assert row["failure"] is None
        assert len(row["errors"]) >= 3
        assert 0 < row["backward_peak_bytes"] <= row["peak_bytes"]
        for time in (row["forward_ms"], row["backward_ms"], row["both_ms"]):
            assert len(time["samples"]) == 3
            assert 0 < time["p20"] <= time["median"] <= time["p80"]
    saved = [rows[way]["saved_bytes"] for way in (*ours, "eager")]
    # linear_act keeps x and z at its last level, as eager does
    assert saved == sorted(saved)
    assert saved[0] < saved[-1]


@pytest.mark.parametrize(
    ("case", "way", "elements"),
    [
        ("mlp", "fusedckpt inputs", SIZE.dim),
        ("mlp", "fusedckpt preact", SIZE.dim + SIZE.hidden),
        ("mlp", "eager", SIZE.dim + 2 * SIZE.hidden),
        ("mlp", "checkpoint", SIZE.dim),
        ("gated_mlp", "fusedckpt gate", SIZE.dim + SIZE.hidden),
        ("gated_mlp", "fusedckpt preact", SIZE.dim + 2 * SIZE.hidden),
        ("gated_mlp", "eager", SIZE.dim + 4 * SIZE.hidden),
        ("norm_gated_mlp_residual", "fusedckpt inputs", SIZE.dim),
        ("norm_linear", "fusedckpt", SIZE.dim),
    ],
)
def test_saved_bytes_are_those_of_the_tables(result, case, way, elements):
    assert rows_of(result, case)[way]["saved_bytes"] == elements * F32 * SIZE.tokens


def test_torch_compile_takes_part(tmp_path, add_way, capsys):
    # the plain backend: no compiler of C++ is asked for
    add_way("torch.compile", lambda eager: torch.compile(eager, backend="aot_eager"))
    status, result = bench(tmp_path, "--case=mlp", "--repeat=1")
    assert status == 0
    assert rows_of(result)["torch.compile"]["failure"] is None
    out = capsys.readouterr().out
    assert f"{SIZE.tokens} tokens, D = {SIZE.dim}, F = {SIZE.hidden}" in out
    assert "torch.compile" in out


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
    def refuse(*args) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(run, "draw", refuse)
    status, result = bench(tmp_path, "--case=mlp")
    assert status == 0
    assert {row["failure"] for row in rows_of(result).values()} == {"MemoryError: no room"}


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    before, left = measure._time_once, iter(range(2 * 4 + 6))

    def interrupt(work, watch, contender) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        before(work, watch, contender)

    monkeypatch.setattr(measure, "_time_once", interrupt)
    status, result = bench(tmp_path, "--case=mlp", "--case=gated_mlp", "--repeat=9")
    assert status == run.INTERRUPTED
    rows = rows_of(result).values()
    assert [len(row["both_ms"]["samples"]) for row in rows] == [2, 1, 1, 2]
    assert len(result["groups"]) == 1


def test_turns_rotate(monkeypatch):
    order = []

    def note(work, watch, contender) -> None:
        order.append(contender.name)

    monkeypatch.setattr(measure, "_time_once", note)
    case = cases.CASES["layer_norm"]
    inputs = cases.draw(case, SIZE, 8, torch.device("cpu"), torch.float32)
    work = measure.Work(inputs, [torch.ones(8, SIZE.dim)], torch.device("cpu"))
    contenders = [measure.Contender(name, case.eager) for name in "abc"]
    ticks = []
    measure.measure(work, contenders, case.eager, 1, lambda: ticks.append(1))
    assert "".join(order) == "abcbcacab"
    assert sum(ticks) == 3 * (measure.STEPS_BEFORE_TIMING + 1)


def test_plans_are_listed_where_kernels_are_compiled():
    ways = cases.implementations(cases.CASES["gated_mlp"], has_plans=True)
    plans = {f"fusedckpt gate{plan}" for plan in ("", " split", " hybrid")}
    assert plans <= ways.keys()
    assert "fusedckpt inputs fused" in cases.implementations(cases.CASES["linear_act"], True)


def test_ratios_are_taken_within_rounds():
    rows = [measure.Contender(name, torch.relu) for name in ("eager", "fused")]
    for row, samples in zip(rows, ((1, 9, 2), (2, 9, 6)), strict=True):
        row.samples = [(1.0, 1.0, float(ms)) for ms in samples]
    group = Group("relu", "tiny", 1, 1, 1, 1, tuple(contender.row() for contender in rows))
    assert list(table(group).columns[4].cells) == ["1.00x", "2.00x"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--case=nothing", "--case: invalid choice: 'nothing'"),
        ("--size=huge", "--size: invalid choice: 'huge'"),
        ("--repeat=0", "--repeat: expected a positive integer, got '0'"),
        ("--dtype=int8", "--dtype: invalid choice: 'int8'"),
        ("--device=tpu", "--device expects cpu, cuda or cuda:N, got 'tpu'"),
        (f"--out={__file__}", "File exists"),
    ],
)
def test_bad_options_end_in_one_line(option, message, monkeypatch, capsys):
    monkeypatch.setattr(run, "run", lambda chosen: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        command.main([*TINY, option])
    usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert usage == "usage: python -m bench run [options]"
    assert error.startswith("python -m bench run: error: ")
    assert message in error
