"""Options that make no sense end in one line, before any work; help needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import classics, demo, run

RUN, DEMO, CLASSICS = ["run", "--device=cpu"], ["demo", "--device=cpu"], ["classics"]
COUNT = "expected a positive integer, got"


@pytest.mark.parametrize(
    ("base", "option", "message"),
    [
        (RUN, "--case=nothing", "--case: invalid choice: 'nothing'"),
        (RUN, "--size=huge", "--size: invalid choice: 'huge'"),
        (RUN, "--repeat=0", f"--repeat: {COUNT} '0'"),
        (RUN, "--dtype=int8", "--dtype: invalid choice: 'int8'"),
        (RUN, "--device=tpu", "--device expects cpu, cuda or cuda:N, got 'tpu'"),
        # torch makes a negative index of it
        (RUN, "--device=cuda:99999", "--device cuda:99999: this torch sees"),
        (RUN, "--only=egaer", "--only egaer is part of no name: eager, "),
        (RUN, "--skip=Ligar", "--skip Ligar is part of no name: eager, "),
        (RUN, "--tokens=5000", "5000 tokens are no multiple of 2048, a sequence of decoder_layer"),
        (RUN, f"--out={__file__}", "File exists"),
        (DEMO, "--steps=0", f"--steps: {COUNT} '0'"),
        (DEMO, "--layers=-1", f"--layers: {COUNT} '-1'"),
        (DEMO, "--batch=1.5", f"--batch: {COUNT} '1.5'"),
        (DEMO, "--dim=100", "--dim expects a multiple of the head size 64, got 100"),
        (DEMO, "--seq=99999999", "seq 99999999 needs a longer text than one of"),
        (DEMO, "--mlp=relu", "--mlp: invalid choice: 'relu'"),
        (DEMO, "--dtype=int8", "--dtype: invalid choice: 'int8'"),
        (DEMO, "--device=tpu", "--device expects cpu, cuda or cuda:N, got 'tpu'"),
        (DEMO, "--device=cuda:99", "--device cuda:99: this torch sees"),
        (DEMO, "--seed=-1", "--seed: expected an integer in [0, 2^63), got '-1'"),
        (DEMO, f"--out={__file__}", "File exists"),
        (CLASSICS, "--part=all-of-it", "--part: invalid choice"),
        (CLASSICS, "--layers=0", f"--layers: {COUNT} '0'"),
        (CLASSICS, "--mlp-width=15", "--mlp-width expects a square number, got 15"),
        (CLASSICS, "--depth-dim=100", "--depth-dim expects a multiple of the head size 64, got 1"),
        (CLASSICS, "--depth-budget=much", "--depth-budget: a budget is bytes"),
        (CLASSICS, "--device=tpu", "--device expects cpu, cuda or cuda:N, got 'tpu'"),
        (["finetune"], "--dim=65", "--dim expects a multiple of the head size 64, got 65"),
    ],
)
def test_bad_options_end_in_one_line_before_any_work(base, option, message, monkeypatch, capsys):
    for module in (run, demo, classics):
        monkeypatch.setattr(module, "run", lambda chosen: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        command.main([*base, option])
    usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert usage == f"usage: python -m bench {base[0]} [options]"
    assert error.startswith(f"python -m bench {base[0]}: error: ")
    assert message in error


@pytest.mark.parametrize("threshold", ["1", "-0.1", "x"])
def test_a_threshold_is_a_share(capsys, threshold):
    with pytest.raises(SystemExit):
        command.main(["compare", "a", "b", f"--threshold={threshold}"])
    assert "expected a number in [0, 1)" in capsys.readouterr().err


def test_help_spares_itself_torch():
    code = "import sys, bench.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_no_command_prints_help(capsys):
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert "demo" in out
    assert "env" in out


def test_a_missing_extra_names_its_install_command(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        command.main(["plot", "run.jsonl"])
    assert ended.value.code == 2
    message = 'bench needs matplotlib: pip install -c constraints.txt -e ".[bench]"\n'
    assert capsys.readouterr().err == message
    # what only measures does without
    assert command.main(["env"]) == 0
