"""`python -m bench gpu`: all that a machine with a GPU has to tell, in one command and minutes.

Every step is a process of its own with a share of the time. What one leaves behind stays, also
when it fails or its time is up; the next call of the same commit on the same device goes on where
this one stopped. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from bench.capacity import FILE as CAPACITIES
from bench.env import commit, device_name
from bench.run import FILE
from bench.steps import GRACE, ROOT, Log, Step, Stops, take
from bench.supervisor import INTERRUPTED

__all__ = ["Settings", "run", "settings", "steps_of"]

STATE = "gpu.json"
# what steps measured and take up again: files and a folder
MEASURED = (STATE, FILE, "smoke", "tuned.json", CAPACITIES)
# tests spend their time in the kernels' compiler, a process each, and hold little of the GPU
PROCESSES = 8
# what differs between a GPU and the interpreter
KERNEL_TESTS = (
    "kernels/test_tiles.py",
    "kernels/test_activations.py",
    *(f"layers/test_{name}.py" for name in ("norm", "linear", "mlp", "blocks", "contracts")),
    "reporting/test_memory.py",
)
# seconds kept for the steps that only read
RESERVE = 60


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
    slug = re.sub(r"[^a-z0-9]+", "-", _device_name().lower()).strip("-")
    # steps run in another folder than this process
    out = (out or ROOT / "bench" / "results" / f"gpu-{slug}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    return Settings(minutes, out, tiny or not torch.cuda.is_available(), restart)


def _device_name() -> str:
    return device_name(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))


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
    first = tuple(f"tests/{name}" for name in KERNEL_TESTS)
    tune = ("tune", "--plans", f"--cache={out / 'tuned.json'}")
    env = Step("env", _bench("env"))
    draw = [
        Step("table", _bench("table", str(results)), 0.5, only_reads=True),
        Step("plot", _bench("plot", str(results), f"--out={out}"), only_reads=True),
    ]
    if chosen.tiny:
        toy = ("--size=tiny", "--repeat=1", "--skip=compile")
        one = ("tests/kernels/test_tiles.py", "-k", "row")
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
        Step("capacity", _bench("capacity", f"--out={out}", "--repeat=5", *slow)),
        *draw,
    ]


def _tail(log: Path, lines: int = 3) -> Sequence[str]:
    found = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in found if line.strip()][-lines:]


def _limit(step: Step, left: float, reserve: float) -> float | None:
    """Return how many seconds of those left a step may take, None where it is too late to start."""
    # a step that is stopped may take its grace too
    left -= GRACE if step.only_reads else GRACE + reserve
    return None if left <= 0 else min(left, max(30.0, left * step.share))


def _take_all(chosen: Settings, log: Log, stops: Stops, console: Console) -> None:
    """Take every step that is left, until time is up or a stop is asked for."""
    end, reserve = time.monotonic() + 60 * chosen.minutes, min(RESERVE, 60 * chosen.minutes / 4)
    for step in steps_of(chosen):
        if stops.count:
            return
        if log.is_done(step):
            console.print(f"{step.name}: {log.outcome(step)}, in an earlier call")
            continue
        left = end - time.monotonic()
        limit = _limit(step, left, reserve)
        if limit is None:
            console.print(f"{step.name}: not started, the time is up")
            continue
        console.print(f"{step.name}: at most {limit:.0f} s, of {left:.0f} s left", highlight=False)
        path, start = chosen.out / f"{step.name}.log", time.monotonic()
        outcome, status = take(step, path, limit, stops)
        seconds = round(time.monotonic() - start, 1)
        log.note(step, outcome, status=status, seconds=seconds, command=step.command[1:])
        ended = f"{outcome} with status {status}" if status else outcome
        console.print(f"{step.name}: {ended} after {seconds:.0f} s", highlight=False)
        for line in () if outcome == "ok" else _tail(path):
            console.print(f"    {line}", markup=False, highlight=False)


def _set_aside(out: Path) -> None:
    """Move what earlier calls left into a folder of its own."""
    names = [name for name in MEASURED if (out / name).exists()]
    if not names:
        return
    folder = next(p for n in itertools.count(1) if not (p := out / f"before-{n}").exists())
    folder.mkdir()
    for name in names:
        (out / name).rename(folder / name)


def run(chosen: Settings) -> int:
    """Take every step; returns 0 where all went well, 1 where not, 130 where interrupted."""
    if chosen.restart:
        _set_aside(chosen.out)
    console = Console()
    key = {"device": _device_name(), "commit": commit(), "tiny": chosen.tiny}
    log = Log(chosen.out / STATE, key, steps_of(chosen))
    console.print(f"{chosen.minutes:g} minutes, results in {chosen.out}", markup=False)
    with Stops() as stops:
        _take_all(chosen, log, stops, console)
    if failed := log.failed():
        console.print(f"failed: {', '.join(failed)}; see the logs in {chosen.out}", markup=False)
    if left := log.left():
        console.print(f"left: {', '.join(left)}; another call goes on there", markup=False)
    return INTERRUPTED if stops.count else int(bool(failed or left))
