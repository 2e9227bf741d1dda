"""The model of `bench predict` beside rows that Liger has measured, and the command's table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import predict
from bench.__main__ import main
from bench.launches import OPERATIONS
from bench.results import read

SIZE = predict.CARDS["H100"], 4096, 4096


def test_errors_on_kernels_that_the_model_was_not_fitted_on(capsys):
    checked = 0
    for row in predict.published():
        error = predict.error_of(row)
        if row.kernel in predict.FITTED or error is None:
            continue
        print(f"{row.arch} {row.kernel} {row.mode} {row.rows} x {row.columns}: {error:+.1%}")
        if row.moved >= 64e6:
            checked += 1
            assert abs(error) <= (0.05 if row.arch == "sm_90" else 0.12), row
        else:
            # a launch of a few us; 32 warps on rows of 1024 are the worst
            assert abs(error) <= 0.15, row
    assert checked >= 15


def test_fits_nearly_pass_through_their_rows():
    for arch in ("sm_80", "sm_90"):
        start, per_byte = predict.fit(arch)
        assert 5 < start < 10
        assert 1.4e6 < 1 / per_byte < 3.2e6
    rows = [row for row in predict.published() if row.kernel in predict.FITTED]
    assert len(rows) == 11
    assert all(abs(predict.error_of(row) or 0.0) <= 0.03 for row in rows)


def test_a_kernel_that_spills_has_no_time():
    rows = [row for row in predict.published() if row.spills]
    assert rows
    assert all(predict.error_of(row) is None for row in rows)


def test_the_table_of_errors(capsys):
    assert main(["predict", "--errors"]) == 0
    out = capsys.readouterr().out
    assert "no time" in out
    assert "BSD 2-Clause" in out


def test_every_time_is_called_predicted():
    for head in (*predict.COLUMNS, *predict.ERRORS, *predict.COMPARISONS):
        assert "us" not in head.split() or head.split()[0] in ("predicted", "measured"), head


def launch_of(**counts: Any) -> Any:
    """A launch of 132 programs that moves 67 MB, 22 us on an H100."""
    pytest.importorskip("triton", reason="launches are Triton's")
    from tests.kernels.emulated import Launch

    known = {"name": "k", "arguments": {}, "kernel": None, "registers": 64, "spills": 0}
    launch = Launch(grid=(132, 1, 1), shared=0, num_warps=8, **known)
    launch.read = 67e6
    vars(launch).update(counts)
    return launch


def prediction_of(launch: Any, total: float | None) -> predict.Prediction:
    card = predict.CARDS["H100"]
    time = predict.time_of(launch, card)
    return predict.Prediction(card, "rms_norm", (8, 16), "ours", launch, time, total, None, None)


def test_waits_that_nothing_covers_have_no_time():
    card = predict.CARDS["H100"]
    assert predict.time_of(launch_of(waits=32, is_prefetched=True), card).us is not None
    assert predict.time_of(launch_of(waits=32, is_prefetched=False), card).us is None
    # eight programs a multiprocessor, each of an eighth of the rows
    covered = launch_of(waits=4, is_prefetched=False, grid=(1056, 1, 1), registers=32)
    assert predict.time_of(covered, card).us == pytest.approx(6.6 + 22.2, rel=0.05)


def test_a_kernel_that_is_tuned_takes_its_fastest_configuration():
    slow, fast, spilled = launch_of(read=99e6), launch_of(), launch_of(spills=8, read=1e6)
    other = launch_of(name="other", spills=8)
    card = predict.CARDS["H100"]
    assert predict.fastest([slow, spilled, fast, other], card) == [fast, other]
    # two calls of one kernel, each in two configurations, and the same op of ATen twice
    x, y = torch.empty(1), torch.empty(1)
    calls = [launch_of(arguments={"x": t, "BLOCK": block}) for t in (x, y) for block in (8, 16)]
    ops = [launch_of(name="ATen sum", num_warps=0) for _ in range(2)]
    assert predict.fastest([*calls, *ops], card) == [calls[0], calls[2], *ops]


def test_the_first_load_of_a_loop_waits_for_its_turn():
    launch = launch_of()
    from tests.kernels.emulated import count_instructions

    # of each turn the loads precede the barrier, and a load before the loop goes first
    lines = ["LDG.E.128 R0, [R2] ;", ".L_x_1:", "LDG.E.128 R4, [R6] ;", "BAR.SYNC 0x0 ;"]
    lines += ["FADD R4, R4, R0 ;", "BRA `(.L_x_1) ;", "STG.E.128 [R8], R4 ;", "EXIT ;"]
    listing = "\n".join(x if x.startswith(".") else f"        /*0000*/ {x}" for x in lines)
    count_instructions(launch, listing, [(31.0, 16)], 1.0)
    assert (launch.waits, launch.barriers, launch.is_prefetched) == (32, 31, False)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2", 16),
        ("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2", 4),
        ("cp.async.commit_group", 0),
        ("ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ]", 16),
        ("st.global.b32 [ %rd1 + 0 ], { %r1 }", 0),
    ],
)
def test_the_bytes_that_an_instruction_reads(text, nbytes):
    """By them a loop of SASS is known to be the PTX's, or that unrolled."""
    pytest.importorskip("triton", reason="launches are Triton's")
    from tests.kernels.emulated import bytes_read
    from tests.ptx.emulator import parse_instruction

    assert bytes_read(parse_instruction(text)) == nbytes


def test_published_rows_stand_beside_the_same_size():
    operation = OPERATIONS["rms_norm"]
    found = [predict.published_us(operation, c, 4096, 4096) for c in predict.CARDS.values()]
    assert found == [None, 29.184]
    assert predict.published_us(OPERATIONS["rms_norm backward"], *SIZE) is None


def test_a_device_is_measured_beside_the_model(tmp_path, monkeypatch, capsys):
    class Watch:
        def __init__(self, device):
            self.calls = 0

        def times(self, step):
            step()
            self.calls += 1
            # the first calls compile
            return [1e3 if self.calls <= predict.WARMUP else 0.025, 0.0]

    drawn: list[tuple[int, int]] = []

    def prepare(m, n):
        drawn.append((m, n))
        return lambda: None

    monkeypatch.setattr(predict, "Stopwatch", Watch)
    monkeypatch.setitem(OPERATIONS, "rms_norm", OPERATIONS["rms_norm"]._replace(prepare=prepare))
    launches = launch_of(), launch_of(spills=8)
    rows = [prediction_of(launches[0], 30.0), prediction_of(launches[1], None)]
    predict.compare(rows, torch.device("cpu"), tmp_path)
    # an operation of two launches is measured once
    assert drawn == [(8, 16)]
    (row,) = read(tmp_path / predict.FILE)
    assert (row["predicted_us"], row["both_ms"]) == (30.0, [0.025])
    assert "+20.0%" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["predict", "--measure", "--device=cpu"])
    assert "needs a CUDA device" in capsys.readouterr().err


COUNTED = """
import json
import torch
from bench import predict
from bench.launches import OPERATIONS, Peer
from tests.kernels.emulated import count, recorded

card = predict.CARDS["H100"]
with torch.device("meta"), recorded(card.arch, card.units) as launches:
    OPERATIONS["rms_norm"].prepare(24, 2048)()
    OPERATIONS["rms_norm backward"].prepare(600, 256)()
    for columns in (8192, 8193):
        OPERATIONS["cross_entropy backward"].prepare(3, columns)()
for launch in launches:
    count(launch)
    numbers = launch.read, launch.written, launch.instructions, predict.time_of(launch, card).us
    print(json.dumps([launch.name, *numbers]))
# a library that launches a program for each of 132 multiprocessors: here 12 rows a program
peer = Peer("peer", "torch", OPERATIONS["rms_norm"].prepare, is_persistent=True)
(shared,) = predict.launches_of(peer, 132 * 12 - 7, 2048, card)
print(json.dumps([shared.programs, shared.read, shared.written]))
# kernels of torch.compile, of which each configuration is compiled
(inductor,) = [x for x in OPERATIONS["rms_norm"].peers if x.name == "inductor"]
for launch in predict.launches_of(inductor, 64, 2048, card):
    print(json.dumps([launch.name, launch.read, launch.written]))
# ops that launch kernels of ATen, and some that launch nothing
def summed(m, n):
    x = torch.empty(m, n)
    return lambda: x.view(n, m).sum(0).new_empty(m).copy_(x[0, :1])

for launch in predict.launches_of(Peer("peer", "torch", summed), 64, 32, card):
    print(json.dumps([launch.name, launch.read, launch.written, predict.time_of(launch, card).us]))
"""


def test_bytes_are_those_of_the_shapes():
    pytest.importorskip("triton", reason="kernels need Triton")
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    how: Any = {"cwd": root, "env": environment | {"PYTHONPATH": str(root)}, "check": True}
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, **how)
    lines = done.stdout.splitlines()
    forward, backward, sums, even, odd, shared, compiled, *ops = map(json.loads, lines)
    assert [op[:3] for op in ops] == [["ATen sum", 8192, 256], ["ATen copy_", 4, 256]]
    assert ops[0][3] == pytest.approx(6.6, abs=0.1)
    assert compiled[0].startswith("triton_")
    assert compiled[1:] == [64 * 4096 + 4096, 64 * 4096]
    assert shared == [132, pytest.approx((132 * 12 - 7) * 4096, rel=0.1), (132 * 12 - 7) * 4096]
    rows = 24 * 2048 * 2
    assert forward[:3] == ["norm_kernel", rows + 2048 * 2, rows]
    # the least number of instructions that load and store 8 elements of a thread, and the most
    assert 50 < forward[3] < 1000
    # x and dy once; dx, and rows of sums in float32
    assert backward[1] == pytest.approx(2 * 600 * 256 * 2, rel=0.02)
    assert backward[2] > 600 * 256 * 2
    assert sums[1] == pytest.approx(backward[2] - 600 * 256 * 2, rel=0.1)
    # of an odd row's two branches a program runs one
    assert even[3] < odd[3] < 1.4 * even[3]
    assert all(us > 6 for *_, us in (forward, backward, sums))
