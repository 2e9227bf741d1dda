"""The model of `bench predict` beside rows that Liger has measured, and the command's table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import predict
from bench.__main__ import main


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
    for head in (*predict.COLUMNS, *predict.ERRORS):
        assert "us" not in head.split() or head.split()[0] in ("predicted", "measured"), head


COUNTED = """
import json
from bench import predict
from tests.kernels.emulated import count, recorded

card = predict.CARDS["H100"]
with recorded(card.arch, card.units) as launches:
    predict.CASES["rms_norm"].launch(24, 2048)
    predict.CASES["rms_norm backward"].launch(600, 256)
    for columns in (8192, 8193):
        predict.CASES["cross_entropy backward"].launch(3, columns)
for launch in launches:
    count(launch)
    numbers = launch.read, launch.written, launch.instructions, predict.time_of(launch, card).us
    print(json.dumps([launch.name, *numbers]))
"""


def test_bytes_are_those_of_the_shapes():
    pytest.importorskip("triton", reason="kernels need Triton")
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    how: Any = {"cwd": root, "env": environment | {"PYTHONPATH": str(root)}, "check": True}
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, **how)
    forward, backward, sums, even, odd = map(json.loads, done.stdout.splitlines())
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
