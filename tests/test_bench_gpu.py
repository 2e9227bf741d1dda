"""`python -m bench gpu`: steps in processes of their own, within their time, kept and resumed."""

from __future__ import annotations

import json
import signal
import sys
import time
from functools import partial

import pytest
import torch

pytest.importorskip("rich", reason="needs the bench extra")
pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import gpu
from bench.gpu import Settings, Step

CPU = ["gpu", "--allow-cpu", "--tiny", "--minutes=9"]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.fixture
def steps(monkeypatch):
    made: list[Step] = []
    monkeypatch.setattr(gpu, "steps_of", lambda chosen: made)
    return made


def outcomes(out) -> dict[str, str]:
    record = json.loads((out / "gpu.json").read_text())
    return {name: facts["outcome"] for name, facts in record["steps"].items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["gpu"])
    assert ended.value.code == 2
    assert "this torch sees no GPU; --allow-cpu" in capsys.readouterr().err


def test_a_failure_costs_its_own_step_alone(tmp_path, capsys, steps):
    steps += [
        Step("bad", python("raise SystemExit('no [luck]')")),
        Step("good", python("print(7)")),
    ]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 1
    assert outcomes(tmp_path) == {"bad": "failed", "good": "ok"}
    assert (tmp_path / "good.log").read_text() == "7\n"
    out = capsys.readouterr().out
    assert "    no [luck]" in out
    assert "failed: bad" in out


def test_another_call_goes_on_where_one_stopped(tmp_path, steps, capsys, monkeypatch):
    mark = f"open({str(tmp_path / 'mark')!r}, 'a').write('x')"
    steps += [Step("once", python(mark)), Step("plot", python(mark))]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    # what reads results reads them again
    assert (tmp_path / "mark").read_text() == "xxx"
    assert "once: ok, in an earlier call" in capsys.readouterr().out
    assert command.main([*CPU, "--restart", f"--out={tmp_path}"]) == 0
    assert (tmp_path / "mark").read_text() == "xxxxx"
    # another commit's steps are to be taken
    monkeypatch.setattr(gpu, "commit", lambda: "another")
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert (tmp_path / "mark").read_text() == "xxxxxxx"
    (tmp_path / "gpu.json").write_text("{")
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert (tmp_path / "mark").read_text() == "xxxxxxxxx"


SLEEPER = """
import sys, time
print("half", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("kept")
    sys.exit(130)
"""


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_time_that_is_up_interrupts_first(tmp_path, request, handler):
    """Also in the background of a shell, where interrupts are ignored."""
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, handler)
    log, start = tmp_path / "log", time.monotonic()
    assert gpu.take(Step("slow", python(SLEEPER)), log, 3.0) == ("out of time", 130)
    assert time.monotonic() - start < 30
    assert log.read_text() == "half\nkept\n"


def test_who_does_not_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    outcome, status = gpu.take(Step("deaf", python(code)), tmp_path / "log", 2.0)
    assert (outcome, status) == ("out of time", -9)


def test_steps_share_the_time():
    step = Step("half", (), 0.5)
    assert gpu._limit(step, 400.0) == 200.0
    # a process needs as long to start
    assert gpu._limit(step, 40.0) == 30.0
    assert gpu._limit(step, 20.0) == 20.0
    assert gpu._limit(step, 0.0) is None
    assert gpu._limit(Step("table", ()), -5.0) == gpu.RESERVE


@pytest.mark.parametrize(("has_xdist", "cores"), [(True, 16), (True, 1), (False, 16)])
def test_tests_share_the_gpu_where_they_can(tmp_path, monkeypatch, has_xdist, cores):
    found = object() if has_xdist else None
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: cores)
    steps = gpu.steps_of(Settings(9.0, tmp_path, False, False))
    commands = [" ".join(step.command) for step in steps if "pytest" in step.command]
    assert len(commands) == 2
    for words in commands:
        assert ("-n 8 --dist=loadgroup" in words) == (has_xdist and cores > 1)


def test_the_steps_of_a_gpu_are_commands_that_exist(tmp_path, monkeypatch):
    chosen = Settings(9.0, tmp_path, False, False)
    seen = []
    monkeypatch.setattr(command, "_run", lambda parser, args: seen.append(args) or 0)
    steps = gpu.steps_of(chosen)
    for step in steps:
        if step.command[1:3] == ("-m", "bench"):
            assert command.main(step.command[3:]) == 0
    assert {args.command for args in seen} == {"env", "run", "tune", "table", "plot"}
    assert all((gpu.ROOT / f"tests/test_{name}.py").exists() for name in gpu.KERNEL_TESTS)
    assert [step.name for step in steps][:3] == ["env", "smoke", "tests"]


def test_a_cpu_goes_through_the_same_steps(tmp_path, monkeypatch, capsys):
    # a process takes seconds: two of them show that the commands are right
    chosen = gpu.steps_of(Settings(9.0, tmp_path, True, False))
    # interpreted kernels would take longer
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu, "steps_of", lambda _: [chosen[2], chosen[3]])
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0, capsys.readouterr().out
    assert outcomes(tmp_path) == {"cases": "ok", "table": "ok"}
    assert (tmp_path / "run.jsonl").exists()
    assert "mlp, tiny: 48 tokens" in (tmp_path / "table.log").read_text()
