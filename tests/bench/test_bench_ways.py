"""`python -m bench ways`: the table of ways on a model of the caller's, and what is no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch import nn

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import ways
from bench.env import settled
from bench.settings import parsers

pytestmark = pytest.mark.usefixtures("aten")
SOURCE = """
import torch
from torch import nn

def block():
    mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return nn.Sequential(nn.LayerNorm(16), mlp, nn.Dropout(0.1))

class Net(nn.Module):
    def __init__(self, wrong=False):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.wrong = wrong

    def forward(self, x):
        for block in self.blocks:
            if self.wrong and type(block).__name__ == "CheckpointWrapper":
                raise RuntimeError("not wrapped")
            x = x + block(x)
        return self.norm(x)

def make():
    return Net(), torch.randn(32, 16)

def by_name():
    return Net(), {"x": torch.randn(32, 16)}

def both():
    return Net(), (torch.randn(32, 16),), {}

def fails_wrapped():
    return Net(wrong=True), torch.randn(32, 16)

def nothing():
    return None

def frozen():
    return Net().requires_grad_(False), torch.randn(32, 16)

number = 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    # which naming a file adds to, and a module stays in
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net_of_the_caller", raising=False)
    path = tmp_path / "net_of_the_caller.py"
    path.write_text(SOURCE)
    return path


def bench(file: Path, *options: str, factory: str = "make") -> tuple[int, dict]:
    base = ["ways", f"--model={file}:{factory}", "--repeat=1", f"--out={file.parent}"]
    status = command.main([*base, *options])
    return status, json.loads((file.parent / "ways.json").read_text())


def test_the_table_of_a_model(file, capsys):
    status, result = bench(file)
    assert status == 0
    rows = {row["name"]: row for row in result["own"]["rows"]}
    names = ["eager", "checkpoint", "fuse", "fuse+ckpt", "plan memory", "fuse+plan memory"]
    assert list(rows)[: len(names)] == names
    budgets = [row for name, row in rows.items() if name not in names]
    assert all(row["name"].startswith("fuse+plan ") for row in budgets)
    assert budgets
    assert all(row["rise_bytes"] <= row["asked_bytes"] for row in budgets)
    # dropout and batch statistics are the same in every way
    assert all(row["loss_difference"] <= 1e-5 for row in rows.values())
    assert rows["eager"]["losses"][0] != rows["eager"]["losses"][1]
    assert rows["checkpoint"]["saved_bytes"] < rows["eager"]["saved_bytes"]
    assert rows["fuse+ckpt"]["saved_bytes"] <= rows["checkpoint"]["saved_bytes"]
    assert rows["fuse"]["saved_bytes"] < rows["eager"]["saved_bytes"]
    assert "fuse: fused 6 modules" in capsys.readouterr().out
    assert command.main(["plot", str(file.parent / "ways.json")]) == 0


def prepared(spec: str, out: Path):
    options = [f"--model={spec}", "--steps=1", "--repeat=1", f"--out={out}"]
    return ways.prepare(settled(vars(parsers()[1]["ways"].parse_args(options))))


@pytest.mark.parametrize("factory", ["by_name", "both"])
def test_a_factory_gives_arguments_by_name_too(file, factory):
    batch = prepared(f"{file}:{factory}", file.parent).batch
    args, kwargs = (0, {"x"}) if factory == "by_name" else (1, set())
    assert (len(batch.args), batch.kwargs.keys()) == (args, kwargs)


def test_a_module_can_be_named(file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent))
    assert isinstance(prepared("net_of_the_caller:make", file.parent).made, nn.Module)


def test_budgets_that_no_plan_fits_and_ways_that_fail_are_told(file, capsys):
    options = "--budget=64KiB", "--budget=1KiB", "--budget=2KiB"
    status, result = bench(file, *options, factory="fails_wrapped")
    assert status == 1
    names = [row["name"] for row in result["own"]["rows"]]
    assert "checkpoint" not in names
    assert names[-1] == "fuse+plan 0.062 MiB"
    out = capsys.readouterr().out
    assert "checkpoint: RuntimeError: not wrapped" in out
    assert out.count("fuse+plan: plan: the least feasible activation budget is") == 2


def test_a_cache_of_keys_and_values_is_turned_off(file, capsys):
    found = prepared(f"{file}:make", file.parent)
    found.made.config = type("Config", (), {"use_cache": True})()
    assert ways.run(found) == 0
    assert found.made.config.use_cache is False
    assert "model.config.use_cache was set to False" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("make", "--model expects module:factory or file.py:factory, got 'make'"),
        ("nowhere_at_all:make", "No module named 'nowhere_at_all'"),
        ("nowhere.at.all:make", "No module named 'nowhere'"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("{file}:other", "has no attribute 'other'"),
        ("{file}:number", "number is no function"),
        ("{file}:nothing", "it returned (NoneType)"),
        ("{file}:block", "it returned (Sequential)"),
        ("{file}:frozen", "no parameter of the Net is trained"),
    ],
)
def test_what_is_no_model_ends_in_one_line(file, spec, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["ways", f"--model={spec.format(file=file)}", f"--out={file.parent}"])
    usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert usage == "usage: python -m bench ways [options]"
    assert message in error
