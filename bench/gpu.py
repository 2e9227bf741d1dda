"""`python -m bench gpu`: all that a machine with a GPU has to tell, in one command and minutes.

Every step is a process of its own with a share of the time. What one leaves behind stays, also
when it fails or its time is up; the next call of the same commit on the same device goes on where
this one stopped. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from bench.env import commit, device_name
from bench.jobs import INTERRUPTED
from bench.run import FILE

__all__ = ["Settings", "Step", "run", "settings", "steps_of"]

ROOT = Path(__file__).resolve().parents[1]
# seconds that a process has to end by itself after an interrupt, before it is killed
GRACE = 15
STATE = "gpu.json"
# tests spend their time in the kernels' compiler, a process each, and hold little of the GPU
PROCESSES = 8
# what differs between a GPU and the interpreter
KERNEL_TESTS = ("tiles", "activations", "norm", "linear", "mlp", "blocks", "contracts", "memory")
# steps that only read what there is, and the seconds kept for them
READERS = ("table", "plot")
RESERVE = 40


class Step(NamedTuple):
    """A command, and the share of the time left that it may take; steps after it take the rest."""

    name: str
    command: tuple[str, ...]
    share: float = 1.0


@dataclass(frozen=True)
class Settings:
    """How long, where the results go, and whether the sizes are toys."""

    minutes: float
    out: Path
    tiny: bool
    restart: bool


def settings(
    minutes: float, out: Path | None, allow_cpu: bool, tiny: bool, restart: bool
) -> Settings:
    """Check that there is a GPU. Raises ValueError without one, unless a CPU is allowed."""
    if not torch.cuda.is_available() and not allow_cpu:
        raise ValueError(
            "this torch sees no GPU; --allow-cpu goes through the same steps on a CPU, at toy sizes"
        )
    cuda = torch.cuda.is_available()
    name = device_name(torch.device("cuda:0" if cuda else "cpu"))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    out = out or ROOT / "bench" / "results" / f"gpu-{slug}"
    out.mkdir(parents=True, exist_ok=True)
    return Settings(minutes, out, tiny or not cuda, restart)


def _bench(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "bench", *options)


def _run(out: Path, *options: str) -> tuple[str, ...]:
    return _bench("run", "--resume", f"--out={out}", *options)


def _tests() -> tuple[str, ...]:
    command = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
    count = min(PROCESSES, os.cpu_count() or 1)
    if importlib.util.find_spec("xdist") is None or count == 1:
        return command
    # what takes most of the memory is in one group, and so never beside itself
    return (*command, "-n", str(count), "--dist=loadgroup")


def steps_of(chosen: Settings) -> list[Step]:
    """Return the steps: what others depend on first, then what matters most."""
    out, results = chosen.out, chosen.out / FILE
    first = tuple(f"tests/test_{name}.py" for name in KERNEL_TESTS)
    tune = ("tune", "--plans", f"--cache={out / 'tuned.json'}")
    env = Step("env", _bench("env"))
    draw = [
        Step("table", _bench("table", str(results))),
        Step("plot", _bench("plot", str(results), f"--out={out}")),
    ]
    if chosen.tiny:
        toy = ("--size=tiny", "--repeat=1", "--skip=compile")
        one = ("tests/test_tiles.py", "-k", "row")
        cases = Step("cases", _run(out, *toy, "--case=rms_norm", "--case=mlp"))
        return [env, Step("tests", (*_tests(), *one)), cases, *draw]
    # what a reader asks for first: blocks at one model's widths; then the other cases and widths
    main = ("--case=gated_mlp", "--case=norm_gated_mlp_residual", "--case=mlp", "--case=rms_norm")
    layers = ("--case=decoder_layer", "--case=stack", "--repeat=20")
    rest = ("--size=llama-3.2-1b", "--size=gpt2", "--repeat=20", "--skip=compile")
    # they try dozens of tilings in their first call
    slow = ("--skip=compile", "--skip=LigerMLP", "--skip=quack")
    return [
        env,
        Step("smoke", _run(out / "smoke", "--size=tiny", "--repeat=2", *slow), 0.15),
        Step("tests", (*_tests(), *first), 0.35),
        Step("cases", _run(out, *main, "--repeat=30"), 0.5),
        Step("thresholds", _bench(*tune, f"--minutes={chosen.minutes / 5:g}"), 0.5),
        Step("layers", _run(out, *layers), 0.6),
        Step("widths", _run(out, *rest), 0.6),
        Step("other-tests", (*_tests(), *(f"--ignore={file}" for file in first))),
        *draw,
    ]


class Log:
    """What became of each step, kept in a file that is replaced after every one."""

    def __init__(self, chosen: Settings):
        self.path = chosen.out / STATE
        name = device_name(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.key: dict[str, Any] = {"device": name, "commit": commit(), "tiny": chosen.tiny}
        self.steps: dict[str, dict[str, Any]] = {}
        if not chosen.restart and self.path.exists():
            self._continue()

    def _continue(self) -> None:
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            if record["key"] == self.key:
                self.steps = dict(record["steps"])
        except (ValueError, KeyError, TypeError):
            # what cannot be read is measured again
            self.steps = {}

    def is_done(self, step: Step) -> bool:
        """Whether a step ended by itself, well or not, in an earlier call."""
        return self.steps.get(step.name, {}).get("outcome") in ("ok", "failed")

    def note(self, step: Step, **facts: Any) -> None:
        """Keep what became of a step."""
        self.steps[step.name] = facts
        record = {"key": self.key, "steps": self.steps}
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        written.replace(self.path)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process and all that it started, so that it keeps what it has; then kill them."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE)
            return
        except subprocess.TimeoutExpired:
            continue


def take(step: Step, log: Path, seconds: float) -> tuple[str, int | None]:
    """Run a step, its output going to a file; returns its outcome and exit status."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell's background jobs ignore interrupts, and so would what they start
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _stop(process)
            return "out of time", process.poll()
        except KeyboardInterrupt:
            _stop(process)
            return "interrupted", process.poll()
    return ("ok" if status == 0 else "failed"), status


def _tail(log: Path, lines: int = 3) -> Sequence[str]:
    found = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in found if line.strip()][-lines:]


def _limit(step: Step, left: float) -> float | None:
    """Return how many seconds a step may take, None where it is too late to start."""
    if step.name in READERS:
        return RESERVE
    return None if left <= 0 else min(left, max(30.0, left * step.share))


def _take_all(chosen: Settings, log: Log, console: Console) -> bool:
    """Take every step that is left; returns whether it was interrupted."""
    end = time.monotonic() + 60 * chosen.minutes - RESERVE * min(1.0, chosen.minutes / 4)
    for step in steps_of(chosen):
        limit = _limit(step, end - time.monotonic())
        if log.is_done(step) and step.name not in READERS:
            console.print(f"{step.name}: {log.steps[step.name]['outcome']}, in an earlier call")
            continue
        if limit is None:
            console.print(f"{step.name}: not started, the time is up")
            continue
        left = max(0, end - time.monotonic())
        console.print(f"{step.name}: at most {limit:.0f} s, of {left:.0f} s left", highlight=False)
        path, start = chosen.out / f"{step.name}.log", time.monotonic()
        outcome, status = take(step, path, limit)
        seconds = round(time.monotonic() - start, 1)
        log.note(step, outcome=outcome, status=status, seconds=seconds, command=step.command[1:])
        console.print(f"{step.name}: {outcome} after {seconds:.0f} s", highlight=False)
        for line in () if outcome == "ok" else _tail(path):
            console.print(f"    {line}", markup=False, highlight=False)
        if outcome == "interrupted":
            return True
    return False


def run(chosen: Settings) -> int:
    """Take every step; returns 1 where one failed, 130 where interrupted, else 0."""
    console, log = Console(), Log(chosen)
    console.print(f"{chosen.minutes:g} minutes, results in {chosen.out}", markup=False)
    if _take_all(chosen, log, console):
        return INTERRUPTED
    failed = [name for name, facts in log.steps.items() if facts["outcome"] == "failed"]
    if failed:
        console.print(f"failed: {', '.join(failed)}; see the logs in {chosen.out}", markup=False)
    return int(bool(failed))
