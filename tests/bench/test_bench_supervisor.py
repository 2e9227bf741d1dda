"""What kills the process that measures costs one row; Ctrl-C ends all of it in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import HANGS

pytest.importorskip("rich", reason="needs the bench extra")
pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench.supervisor import Event, Journal, supervise

from bench import __main__ as command
from bench.results import read

ROOT = Path(__file__).parents[1]
# stands for the command: its part is to note who is at work, and to leave out who crashed
TOY = """
import os, sys, time
from pathlib import Path
from bench.supervisor import Event, Journal
journal = Journal(Path(sys.argv[-1].removeprefix("--journal=")))
def work(who, crash):
    if who not in journal.crashes("job"):
        journal.note(Event("at work", "job", who))
        crash()
        journal.note(Event("measured", "job"))
"""


def toy(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", TOY + code)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_who_crashes_is_left_out(capfd):
    code = """
work("eager", lambda: None)
work("abort", os.abort)
work("leave", lambda: os._exit(0))
work("kill", lambda: os.kill(os.getpid(), 9))
for event in journal.crashes("job").items():
    print(*event)
sys.exit(1)
"""
    assert supervise([], toy(code)) == 1
    out, error = capfd.readouterr()
    assert out.splitlines() == [
        "abort crashed: SIGABRT",
        "leave crashed: exit status 0",
        "kill crashed: SIGKILL",
    ]
    assert "job: abort crashed: SIGABRT; once more without it" in error


@pytest.mark.parametrize("before", ["", "work('eager', lambda: None)", "work('abort', os.abort)"])
def test_a_crash_of_nobody_ends_the_command(capfd, before):
    assert supervise([], toy(f"{before}\nos.abort()")) == 1
    assert "died of SIGABRT, nobody at work" in capfd.readouterr().err


def test_a_command_that_ends_has_its_say():
    code = "sys.exit(int(sys.argv[1]))"
    assert [supervise([status], toy(code)) for status in ("0", "1", "2", "130")] == [0, 1, 2, 130]
    # as after an interrupt
    assert supervise([], toy("work('eager', lambda: sys.exit(130))")) == 130


def test_a_lost_device_is_a_crash(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    assert not journal.crash("nobody")
    journal.note(Event("at work", "job", "ours"))
    journal.note(Event("at work", "job", "ours"))
    assert len(path.read_text().splitlines()) == 1
    assert journal.crash("CUDA error: no luck")
    # the process then ends somehow
    assert Journal(path).crash("SIGABRT")
    assert Journal(path).crashes("job") == {"ours": "crashed: CUDA error: no luck"}
    assert not Journal(path).crashes("another")


SLOW = """
def rest():
    try:
        print("at work", flush=True)
        time.sleep(3600)
    except KeyboardInterrupt:
        time.sleep(1)
        print("kept")
        sys.exit(130)
work("slow", rest)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_both_processes(number):
    code = f"""
import sys
from bench.supervisor import supervise
sys.exit(supervise([], {toy(SLOW)!r}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    if number == signal.SIGINT:
        # of a terminal: to all in the foreground
        os.killpg(process.pid, number)
    else:
        process.terminate()
    # pipes end with the last of both
    out, error = process.communicate(timeout=HANGS)
    if number == signal.SIGINT:
        assert (process.returncode, out, error) == (130, "kept\n", "")
    else:
        assert (process.returncode, out) == (128 + signal.SIGTERM, "")


# `python -m bench` where an implementation of one case aborts
CRASHING = """
import os, sys
import bench.ways
from bench.__main__ import main
bench.ways.BASELINES = {
    "eager": lambda eager: eager,
    "checkpoint": lambda eager: eager,
    "abort": lambda eager: lambda x, *rest: os.abort() if len(rest) == 2 else eager(x, *rest),
}
sys.exit(main())
"""


def test_a_crash_of_one_implementation_loses_its_row(tmp_path, capfd):
    options = ("--case=rms_norm", "--case=layer_norm", "--repeat=1")
    arguments = ("run", "--device=cpu", "--size=tiny", *options, f"--out={tmp_path}")
    assert supervise(arguments, (sys.executable, "-c", CRASHING)) == 0
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    groups = {group.case: group for group in read(tmp_path / "run.jsonl")}
    assert list(groups) == ["rms_norm", "layer_norm"]
    # what was done before the crash is done
    assert len(lines) == sum(len(group.rows) for group in groups.values())
    for name, group in groups.items():
        failures = {row.name: row.failure for row in group.rows}
        crashed = "crashed: SIGABRT" if name == "layer_norm" else None
        assert (failures["eager"], failures["fusedckpt"]) == (None, None)
        assert failures["abort"] == crashed
    assert "layer_norm, tiny: 48 tokens, D = 32: abort crashed: SIGABRT" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["run", "capacity", "table"])
def test_what_may_crash_is_supervised(name, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "supervise", lambda argv: seen.append(argv) or 7)
    monkeypatch.setattr(command, "_run", lambda parser, args: 3)
    argv = [name] + ["file"] * (name == "table")
    assert command.main(argv, supervised=True) == (3 if name == "table" else 7)
    assert seen == [argv] * (name != "table")
    assert command.main(argv) == 3
    if name != "table":
        assert command.main([*argv, f"--journal={tmp_path / 'file'}"], supervised=True) == 3


def test_the_supervisor_spares_itself_torch():
    code = "import sys, bench.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_interrupt_ends_imports(capfd):
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
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 130
    assert capfd.readouterr().err == "interrupted\n"


def test_an_interrupt_is_a_line(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", interrupt)
    assert command.main(["env"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
