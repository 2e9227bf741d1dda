"""The command line and the shares of models."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import env
from fusedckpt.autograd.dispatch import forced_path

COUNT = "expected a positive integer, got"
DEVICE = "--device expects cpu, cuda or cuda:N, got 'tpu'"


@pytest.mark.parametrize(
    ("base", "option", "message"),
    [
        ("run", "--case=nothing", "--case: invalid choice: 'nothing'"),
        ("run", "--size=huge", "--size: invalid choice: 'huge'"),
        ("run", "--repeat=0", f"--repeat: {COUNT} '0'"),
        ("run", "--dtype=int8", "--dtype: invalid choice: 'int8'"),
        ("run", "--device=tpu", DEVICE),
        # torch makes a negative index of it
        ("run", "--device=cuda:99999", "--device cuda:99999: this torch sees"),
        ("run", "--only=egaer", "--only egaer is part of no name: eager, "),
        ("run", "--skip=Ligar", "--skip Ligar is part of no name: eager, "),
        ("run", "--tokens=5000", "5000 tokens are no multiple of 2048, a sequence of decoder"),
        ("run", f"--out={__file__}", "File exists"),
        ("demo", "--batch=1.5", f"--batch: {COUNT} '1.5'"),
        ("demo", "--dim=100", "--dim expects a multiple of the head size 64, got 100"),
        ("demo", "--seq=99999999", "seq 99999999 needs a longer text than one of"),
        ("demo", "--seed=-1", "--seed: expected an integer in [0, 2^63), got '-1'"),
        ("classics", "--mlp-width=15", "--mlp-width expects a square number, got 15"),
        ("classics", "--depth-dim=100", "--depth-dim expects a multiple of the head size 64"),
        ("classics", "--depth-budget=much", "--depth-budget: a budget is bytes"),
        ("finetune", "--dim=65", "--dim expects a multiple of the head size 64, got 65"),
        ("run", "--memory=0", f"--memory: {COUNT} '0'"),
        ("run", "--memory=1 --tokens=48", "--memory finds the tokens: expected no --tokens"),
        ("ways", "--ways=magic", "--ways: invalid choice: 'magic'"),
        ("ways", "--model=own --budget=much", "--budget: a budget is bytes"),
        ("show", "a b c", "expected one file, or two to compare"),
        ("show", "a b --plot", "expected one file, or two to compare"),
        ("show", "a --threshold=1", "expected a number in [0, 1)"),
        ("shares", "lama", "MODEL must be one of llama, "),
    ],
)
def test_bad_options_end_in_one_line_before_any_work(base, option, message, refused):
    device = () if "device" in option or base in ("show", "shares") else ("--device=cpu",)
    # a file's name may have a space
    options = [option] if option.startswith("--out") else option.split()
    error = refused(base, *device, *options)
    assert error.startswith(f"python -m bench {base}: error: ")
    assert message in error


def test_help_lists_commands_without_torch(capsys):
    code = "import sys; from bench.__main__ import main; main([]); sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True)
    assert all(name in out.stdout.decode() for name in command.COMMANDS)
    for name in command.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            command.main([name, "--help"])
        assert ended.value.code == 0


def test_a_missing_extra_names_its_install_command(monkeypatch, capsys):
    def missing(name: str):
        raise ModuleNotFoundError(name="matplotlib")

    monkeypatch.setattr(command, "import_module", missing)
    with pytest.raises(SystemExit) as ended:
        command.main(["show", "run.jsonl"])
    assert ended.value.code == 2
    message = 'bench needs matplotlib: pip install -c constraints.txt -e ".[bench]"\n'
    assert capsys.readouterr().err == message


def test_an_interrupt_is_a_line(monkeypatch, capsys):
    def interrupt(name: str):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", interrupt)
    assert command.main(["shares"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_output_that_nothing_reads_ends_without_a_traceback(monkeypatch, capfd):
    def write(name: str):
        raise BrokenPipeError

    targets = []
    monkeypatch.setattr(command, "import_module", write)
    monkeypatch.setattr(command.os, "dup2", lambda source, target: targets.append(target))
    assert command.main(["shares"]) == 141
    assert targets == [sys.stdout.fileno()]
    assert capfd.readouterr().err == ""


def test_an_environment_names_commit_libraries_and_tf32(monkeypatch):
    def version(name: str) -> str:
        if name != "flash-attn":
            raise PackageNotFoundError(name)
        return "2.8"

    found = SimpleNamespace(version=version, PackageNotFoundError=PackageNotFoundError)
    monkeypatch.setattr(env, "metadata", found)
    monkeypatch.setenv("FUSEDCKPT_COMMIT", "0123abc")
    monkeypatch.setattr(env, "has_tf32", lambda: True)
    facts = env.environment(torch.device("cpu"), torch.float32)
    assert (facts["commit"], facts["flash-attn"], facts["tf32"]) == ("0123abc", "2.8", True)
    assert "liger-kernel" not in facts
    assert env.summary(facts).endswith("flash-attn 2.8; TF32 matmuls")


def test_logits_and_layers_are_gone_from_whole_models(capsys, refused, tmp_path):
    pytest.importorskip("transformers")
    from bench.shares import WHOLE

    assert "MODEL must be one of llama, " in refused("shares", "lama", "--whole")
    assert command.main(["shares", "llama", "--whole", f"--out={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.startswith("llama"))
    layers, classes, before, after = map(int, row.split()[1:5])
    assert (layers, classes) == (32, WHOLE["llama"].classes // 16)
    # eager saves the logits of 64 tokens in bfloat16, at least
    assert before * 1024 > 2 * 64 * classes
    assert after < 0.12 * before
    assert re.fullmatch(r"median of 1: \d+\.\d% gone", lines[-2])
    assert lines[-1] == f"wrote {tmp_path / 'whole.jsonl'}"


def test_a_block_of_own_code(capsys, refused, tmp_path):
    from bench.results import read

    assert "MODEL must be one of nanogpt, " in refused("shares", "lama", "--own")
    with forced_path("aten"):
        assert command.main(["shares", "convnext", "--own", f"--out={tmp_path}"]) == 0
    rows = {row["name"]: row for row in read(tmp_path / "own.jsonl")}
    assert rows["fuse"]["saved_bytes"] < 0.2 * rows["eager"]["saved_bytes"]
    # one GEMM of 512 x 64 x 256 more for each of two blocks
    more = rows["fuse"]["step_flops"] - rows["eager"]["step_flops"]
    assert more == 2 * 2 * 512 * 64 * 256


def test_layers_save_less_by_model(capsys, tmp_path):
    pytest.importorskip("transformers")
    from bench.results import read

    torch.set_num_threads(2)
    with forced_path("aten"):
        assert command.main(["shares", "gpt2", "--verbose", f"--out={tmp_path}"]) == 0
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # the process is as before
    assert (num_threads, logging.root.manager.disable) == (2, logging.NOTSET)
    out = capsys.readouterr().out
    assert "gpt2: fused" in out
    (row,) = (line for line in out.splitlines() if line.startswith("gpt2 "))
    assert row.split()[1:4] == ["30.08", "4.08", "86%"] or row.split()[3] == "86%"
    assert "median of 1 dense models: 86% gone" in out
    rows = {row["name"]: row for row in read(tmp_path / "layers.jsonl")}
    assert {(row["case"], row["unit_bytes"]) for row in rows.values()} == {("gpt2", 64 * 256 * 2)}
    values = [rows[way]["saved_bytes"] / rows[way]["unit_bytes"] for way in ("eager", "fuse")]
    assert [f"{value:.2f}" for value in values] == row.split()[1:3]


def test_models_of_all_groups_are_measured_with_recipes(capsys, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from bench import survey
    from bench.results import read
    from bench.zoo import ZOO

    def find(package: str) -> object:
        return None if package == "diffusers" else object()

    monkeypatch.setattr(survey, "find_spec", find)
    # one part alone: a test below extends costs to more
    monkeypatch.setitem(ZOO, "distilbert", ZOO["distilbert"]._replace(repeats=0))
    with forced_path("aten"):
        assert command.main(["shares", "distilbert", "dit", f"--out={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "dit: left out, it needs diffusers\n" in text
    rows = {row["name"]: row for row in read(tmp_path / "shares.jsonl")}
    assert {row["case"] for row in rows.values()} == {"distilbert"}
    saved = {name: row["saved_bytes"] for name, row in rows.items()}
    assert saved["fuse+recipes"] < saved["fuse"] < saved["recipes"] < saved["eager"]
    # GEMMs never run again for a recipe; a fused MLP runs its first one again
    flops = {name: row["step_flops"] for name, row in rows.items()}
    assert flops["eager"] == flops["recipes"] < flops["fuse"] == flops["fuse+recipes"]
    written = {name: row["written_elements"] for name, row in rows.items()}
    assert written["eager"] < written["recipes"] < written["fuse"] < written["fuse+recipes"]
    bytes_table, work_table, _ = text.split("\n\n", 2)
    others = ("fuse", "recipes", "fuse+recipes")
    gone = [f"{1 - saved[name] / saved['eager']:.0%}" for name in others]
    (line,) = (line for line in bytes_table.splitlines() if line.startswith("distilbert"))
    assert line.split()[3:6] == gone
    (line,) = (line for line in work_table.splitlines() if line.startswith("distilbert"))
    assert line.split()[3:6] == [f"{flops[name] / flops['eager']:.3f}" for name in others]
    assert line.split()[7:] == [f"{written[name] / written['eager']:.2f}" for name in others]
    assert re.search(rf"^encoder +1 +{' +'.join(gone)} ", text, re.MULTILINE)


def test_costs_are_extended_to_the_parts_of_a_checkpoint():
    from bench.survey import Cost

    single, double = Cost(10, 20, 30, 40), Cost(11, 22, 33, 44)
    assert single.extended(double, 1) == single
    assert single.extended(double, 2) == double
    assert single.extended(double, 12) == (21, 42, 63, 84)


def test_work_counts_the_parts_of_fused_layers():
    from bench.work import work_of
    from fusedckpt import fuse

    tokens, dim, hidden = 16, 8, 32
    model = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
    x = torch.randn(tokens, dim)

    def step():
        model(x).sum().backward()

    step()
    eager = work_of(step)
    assert fuse(model).swapped
    with forced_path("aten"):
        fused = work_of(step)
    # backward runs the first linear and its ReLU again, and copies the gradient that a sum expands
    assert fused.flops == eager.flops + 2 * tokens * dim * hidden
    assert fused.written == eager.written + tokens * hidden + tokens * dim


def test_work_leaves_out_views_and_allocations():
    from bench.work import work_of

    assert work_of(lambda: torch.empty(5).view(5, 1).t().relu_()) == (0, 5)


def test_work_counts_attention_and_grouped_gemms_of_a_cpu():
    from bench.work import work_of

    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    gemm = 2 * 2 * 16 * 16 * 8
    results = []
    attend = partial(F.scaled_dot_product_attention, q, k, v)
    assert work_of(lambda: results.append(attend())) == (2 * gemm, 0)
    # the backward computes the scores again
    (y,) = results
    assert work_of(lambda: y.backward(y.detach())).flops == 5 * gemm
    a, b = torch.randn(6, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    ends = torch.tensor([2, 6], dtype=torch.int32)
    assert work_of(lambda: F.grouped_mm(a, b, offs=ends)) == (2 * 6 * 16 * 8, 0)
