"""The rule of error of store="int8", on small models, and the command that measures it."""

from argparse import Namespace

import pytest

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import results, rounding
from bench.__main__ import main
from fusedckpt.autograd.dispatch import forced_path

# three of 128 channels: more groups have one than in any model
SMALL = {"dim": 128, "seq": 32, "batches": 4, "steps": 2}
NINE = 'store="int8"'
# formats that break the rule
FP8 = ["fp8 (e4m3), groups of 128"]
INT8 = ["int8, groups of 32", "int8, groups of 128"]


@pytest.fixture(scope="module")
def data():
    return rounding.text()


@pytest.mark.parametrize(
    ("case", "worse", "path"),
    [
        (rounding.Case(3), FP8, "aten"),
        # the kernels round alike: one model shows it
        (rounding.Case(3, channels=50), INT8, None),
        (rounding.Case(3, channels=1000), INT8, "aten"),
        (rounding.Case(3, channels=200, token=200), INT8, "aten"),
        (rounding.Case(6, channels=200), INT8, "aten"),
    ],
    ids=str,
)
def test_gradients_at_most_twice_as_wrong_as_eagers(monkeypatch, data, case, worse, path):
    monkeypatch.setattr(rounding, "CASES", {"case": case})
    with forced_path(path):
        rows = {row["name"]: row for row in rounding.measured("case", Namespace(**SMALL), data, {})}
    assert rows[NINE]["above_limit"] == 0
    assert rows[NINE]["largest_ratio"] <= rounding.LIMIT
    # weights of norms with large channels, see the docstring of `fuse`
    fused = rows['fuse(store="int8")']
    assert rows["fuse"]["above_limit"] == 0
    assert fused["above_limit"] <= (3 if case.channels > 1 else 0)
    assert fused["largest_ratio"] <= (4.1 if case.channels > 1 else rounding.LIMIT)
    for name in worse:
        assert rows[name]["above_limit"] > 0, name


def test_the_command(tmp_path, capsys):
    # a trained model has half of the width
    sizes = {**SMALL, "dim": 256, "batches": 1}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    with forced_path("aten"):
        assert main(["rounding", "--case", "trained", f"--out={tmp_path}", *options]) == 0
    rows = results.read(tmp_path / rounding.FILE)
    assert [row["name"] for row in rows] == list(rounding.FORMATS)
    assert rows[0]["largest_ratio"] == 1
    printed = capsys.readouterr().out
    assert "trained for 2 steps" in printed
    assert "fp8 (e4m3), groups of 128" in printed
