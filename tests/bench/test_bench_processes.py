"""What kills the process that measures costs one row; Ctrl-C ends all of it in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from support import HANGS

pytest.importorskip("matplotlib", reason="needs the bench extra")

from crashing import Crashes, CrashesBetween, Crashing
from stepping import SLEEPER, Clock, python

from bench import __main__ as command
from bench import jobs, processes
from bench.processes import Stops, take
from bench.results import groups, read
from bench.settings import SIZES

pytestmark = pytest.mark.usefixtures("hang_guard")
ROOT = Path(__file__).parents[2]
(SIZE,) = SIZES["tiny"]
JOB = Crashing("rms_norm", "tiny", SIZE, 48, torch.device("cpu"), torch.float32)


def rows_of(measurement, *names: str, tick=lambda name, **kwargs: None) -> list[dict]:
    chosen = Namespace(in_process=False, timeout=HANGS)
    job = JOB._replace(only=names)
    rows, is_interrupted = jobs._rows(job, chosen, measurement, Stops(), tick)
    assert not is_interrupted
    return rows


def test_what_crashes_is_left_out(capfd):
    rows = rows_of(Crashes(), "eager", "abort", "leave", "kill")
    assert {row["name"]: row["failure"] for row in rows} == {
        "eager": None,
        "abort": "crashed: SIGABRT",
        "leave": "crashed: exit status 0",
        "kill": "crashed: SIGKILL",
    }
    error = capfd.readouterr().err
    assert f"{JOB.title}: abort crashed: SIGABRT; once more without it" in error


def test_what_hangs_is_left_out(monkeypatch):
    """Time passes once it is at work, and by what happens."""
    now = iter(range(0, 10**9, HANGS + 1))
    at_work = []
    stand_in = Namespace(sleep=time.sleep, monotonic=lambda: next(now) if at_work else 0)
    monkeypatch.setattr(processes, "time", stand_in)

    def tick(name: str, **kwargs) -> None:
        at_work[:] = [name] if name == "hang" else []

    rows = rows_of(Crashes(), "hang", "eager", tick=tick)
    assert [row["failure"] for row in rows] == ["crashed: out of time after 600 s", None]


def test_a_crash_between_implementations_costs_one_case():
    rows = rows_of(CrashesBetween(), "eager")
    failures = {row["name"]: row["failure"] for row in rows}
    assert failures == {"eager": "crashed: SIGABRT"}


def library(folder: Path, monkeypatch, code: str) -> None:
    """Put a library in the place of Liger, whose RMSNorm is this code when it is imported."""
    ops = folder / "liger_kernel" / "ops"
    ops.mkdir(parents=True)
    for place in (ops.parent, ops):
        (place / "__init__.py").touch()
    (ops / "rms_norm.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def bench(out: Path, *options: str) -> tuple[str, ...]:
    command = (sys.executable, "-m", "bench", "run", "--device=cpu", "--size=tiny")
    return (*command, "--repeat=1", "--only=Liger", f"--out={out}", *options)


def test_a_crash_of_one_implementation_loses_its_row(tmp_path, monkeypatch):
    library(tmp_path, monkeypatch, "import os; os.abort()")
    cases = ("--case=rms_norm", "--case=layer_norm")
    done = subprocess.run(bench(tmp_path, *cases), capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert "rms_norm, tiny: 48 tokens, D = 32: Liger crashed: SIGABRT; once more" in done.stderr
    first, second = groups(read(tmp_path / "run.jsonl"))
    assert [row["failure"] for row in first] == [None, "crashed: SIGABRT"]
    assert second[1]["failure"].startswith("ModuleNotFoundError")
    assert first[0]["both_ms"]
    assert second[0]["both_ms"]


def test_an_interrupt_ends_both_processes(tmp_path, monkeypatch):
    code = "print('at work', flush=True)\nimport time; time.sleep(3600)"
    library(tmp_path, monkeypatch, code)
    process = subprocess.Popen(
        bench(tmp_path, "--case=rms_norm"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # which a shell's background ignores
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while process.stdout.readline() != "at work\n":
        assert process.poll() is None
    # of a terminal: to all in the foreground
    os.killpg(process.pid, signal.SIGINT)
    # pipes end with the last of both
    out, error = process.communicate(timeout=HANGS)
    assert process.returncode == 130
    assert out.endswith("interrupted\n")
    assert "Traceback" not in error
    # nothing was timed
    assert not (tmp_path / "run.jsonl").exists()


def test_an_interrupt_ends_imports():
    """Also where a library takes it for its own failure, as numpy does."""
    code = """
import os, signal, sys
from bench import __main__ as command
def swallow(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100): pass
    except BaseException:
        raise ImportError("cannot load module more than once per process")
command.import_module = swallow
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(command.main(["env"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    # for a shell that is 130
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_an_interrupt_is_a_line(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", interrupt)
    assert command.main(["env"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_time_that_is_up_interrupts_first(tmp_path, request, monkeypatch, handler):
    """Also in the background of a shell, where interrupts are ignored."""
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, handler)
    log = tmp_path / "log"
    Clock(monkeypatch, log, grace_ends=False)
    assert take(python(SLEEPER), log, 3.0, Stops()) == ("out of time", 130)
    assert log.read_text() == "half\nkept\n"


def test_who_does_not_stop_is_killed(tmp_path, monkeypatch):
    log = tmp_path / "log"
    clock = Clock(monkeypatch, log, grace_ends=True)
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    code += "; print('deaf', flush=True); time.sleep(3600)"
    outcome, status = take(python(code), log, 2.0, Stops())
    assert (outcome, status) == ("out of time", -9)
    assert clock.sent == [signal.SIGINT, signal.SIGKILL]


def test_what_is_to_be_ignored_stays_so(outer):
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stops() as stops:
        signal.raise_signal(signal.SIGHUP)
        assert stops.count == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_nothing_of_a_step_outlives_it(tmp_path):
    sleeper = [*python("import time; time.sleep(3600)")]
    code = f"import subprocess; print(subprocess.Popen({sleeper}).pid)"
    assert take(python(code), tmp_path / "log", HANGS, Stops()) == ("ok", 0)
    stat = Path(f"/proc/{(tmp_path / 'log').read_text().strip()}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        # a zombie until someone waits for it
        while stat.read_text().split()[2] != "Z":
            time.sleep(0.01)
