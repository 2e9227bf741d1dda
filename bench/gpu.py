"""`python -m bench gpu`: all that a machine with a GPU has to tell, in one command and minutes.

Every step is a process of its own with a share of the time. What one leaves behind stays, also
when it fails or its time is up; the next call of the same commit on the same device goes on where
this one stopped. Nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.env import commit, device_name
from bench.processes import GRACE, ROOT, Stops, take

STATE = "gpu.json"
# what steps measured and take up again: files and a folder
MEASURED = (STATE, "run.jsonl", "smoke", "tuned.json", "capacity.jsonl")
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
# of these a step is done with; one that a signal killed may have had bad luck
DONE = ("ok", "failed")
OUTCOMES = (*DONE, "killed", "out of time", "interrupted", "not started")


class Step(NamedTuple):
    """A command, and the share of the time left that it may take; steps after it take the rest.

    A step that only reads what other steps left is taken again in every call.
    """

    name: str
    command: tuple[str, ...]
    share: float = 1.0
    only_reads: bool = False


def prepare(chosen: Namespace) -> Namespace:
    """Check that there is a GPU. Raises ValueError without one, unless a CPU is allowed."""
    if not torch.cuda.is_available() and not chosen.allow_cpu:
        raise ValueError(
            "this torch sees no GPU; --allow-cpu goes through the same steps on a CPU, at toy sizes"
        )
    slug = re.sub(r"[^a-z0-9]+", "-", _device_name().lower()).strip("-")
    # steps run in another folder than this process
    chosen.out = (chosen.out or ROOT / "bench" / "results" / f"gpu-{slug}").resolve()
    chosen.out.mkdir(parents=True, exist_ok=True)
    chosen.tiny = chosen.tiny or not torch.cuda.is_available()
    return chosen


def _device_name() -> str:
    return device_name(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))


def _bench(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "bench", *options)


def _tests() -> tuple[str, ...]:
    command = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
    count = min(PROCESSES, os.cpu_count() or 1)
    if find_spec("xdist") is None or count == 1:
        return command
    # what takes most of the memory is in one group, and so never beside itself
    return (*command, "-n", str(count), "--dist=loadgroup")


def steps_of(out: Path, minutes: float, tiny: bool) -> list[Step]:
    """Return the steps: what others depend on first, then what matters most."""
    measured = _bench("run", "--resume", f"--out={out}")
    first = tuple(f"tests/{name}" for name in KERNEL_TESTS)
    env = Step("env", _bench("env"))
    draw = [
        Step("table", _bench("table", str(out / "run.jsonl")), 0.5, only_reads=True),
        Step("plot", _bench("plot", str(out / "run.jsonl"), f"--out={out}"), only_reads=True),
    ]
    if tiny:
        toy = ("--size=tiny", "--repeat=1", "--skip=compile", "--case=rms_norm", "--case=mlp")
        tests = Step("tests", (*_tests(), "tests/kernels/test_tiles.py", "-k", "row"))
        return [env, tests, Step("cases", (*measured, *toy)), *draw]
    # what a reader asks for first: blocks at one model's widths; then the other cases and widths
    main = ("--case=gated_mlp", "--case=norm_gated_mlp_residual", "--case=mlp", "--case=rms_norm")
    layers = ("--case=decoder_layer", "--case=stack", "--repeat=20")
    rest = ("--size=llama-3.2-1b", "--size=gpt2", "--repeat=20", "--skip=compile")
    # they try dozens of tilings in their first call
    slow = ("--skip=compile", "--skip=LigerMLP", "--skip=quack")
    smoke = _bench("run", "--resume", f"--out={out / 'smoke'}", "--size=tiny", "--repeat=2", *slow)
    tune = _bench("tune", "--plans", f"--cache={out / 'tuned.json'}", f"--minutes={minutes / 5:g}")
    return [
        env,
        Step("smoke", smoke, 0.15),
        Step("tests", (*_tests(), *first), 0.35),
        Step("cases", (*measured, *main, "--repeat=30"), 0.5),
        Step("thresholds", tune, 0.5),
        Step("layers", (*measured, *layers), 0.6),
        Step("widths", (*measured, *rest), 0.6),
        Step("other-tests", (*_tests(), *(f"--ignore={file}" for file in first))),
        Step("capacity", _bench("capacity", f"--out={out}", "--repeat=5", *slow)),
        *draw,
    ]


class Log:
    """What became of each step, kept in a file that is replaced after every one."""

    def __init__(self, path: Path, key: dict[str, Any], steps: Sequence[Step]):
        self.path, self.key = path, key
        earlier, new = self._read(), {"outcome": "not started"}
        self.steps = {s.name: new if s.only_reads else earlier.get(s.name, new) for s in steps}
        self._write()

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return what an earlier call kept under this key; a damaged file is set aside."""
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            key, steps = record["key"], dict(record["steps"])
            if not all(facts["outcome"] in OUTCOMES for facts in steps.values()):
                raise ValueError("no outcome")
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            self.path.replace(aside)
            text = f"{self.path} is no record of steps ({error!r}): moved to {aside.name}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return {}
        return steps if key == self.key else {}

    def _write(self) -> None:
        written = self.path.with_suffix(".part")
        record = {"key": self.key, "steps": self.steps}
        written.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        written.replace(self.path)

    def note(self, step: Step, **facts: Any) -> None:
        """Keep what became of a step."""
        self.steps[step.name] = facts
        self._write()

    def outcome(self, step: Step) -> str:
        """What became of a step, in this call or an earlier one."""
        return self.steps[step.name]["outcome"]


def _limit(step: Step, left: float, reserve: float) -> float | None:
    """Return how many seconds of those left a step may take, None where it is too late to start."""
    # a step that is stopped may take its grace too
    left -= GRACE if step.only_reads else GRACE + reserve
    return None if left <= 0 else min(left, max(30.0, left * step.share))


def _take_all(out: Path, steps: Sequence[Step], minutes: float, log: Log, stops: Stops) -> None:
    """Take every step that is left, until time is up or a stop is asked for."""
    end, reserve = time.monotonic() + 60 * minutes, min(RESERVE, 60 * minutes / 4)
    for step in steps:
        if stops.count:
            return
        if log.outcome(step) in DONE:
            print(f"{step.name}: {log.outcome(step)}, in an earlier call")
            continue
        left = end - time.monotonic()
        limit = _limit(step, left, reserve)
        if limit is None:
            print(f"{step.name}: not started, the time is up")
            continue
        print(f"{step.name}: at most {limit:.0f} s, of {left:.0f} s left", flush=True)
        path, start = out / f"{step.name}.log", time.monotonic()
        outcome, status = take(step.command, path, limit, stops)
        seconds = round(time.monotonic() - start, 1)
        command = step.command[1:]
        log.note(step, outcome=outcome, status=status, seconds=seconds, command=command)
        ended = f"{outcome} with status {status}" if status else outcome
        print(f"{step.name}: {ended} after {seconds:.0f} s")
        said = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in () if outcome == "ok" else [line for line in said if line.strip()][-3:]:
            print(f"    {line}")


def _set_aside(out: Path) -> None:
    """Move what earlier calls left into a folder of its own."""
    names = [name for name in MEASURED if (out / name).exists()]
    if not names:
        return
    folder = next(p for n in itertools.count(1) if not (p := out / f"before-{n}").exists())
    folder.mkdir()
    for name in names:
        (out / name).rename(folder / name)


def run(chosen: Namespace) -> int:
    """Take every step; returns 0 where all went well, 1 where not, 130 where interrupted."""
    if chosen.restart:
        _set_aside(chosen.out)
    steps = steps_of(chosen.out, chosen.minutes, chosen.tiny)
    key = {"device": _device_name(), "commit": commit(), "tiny": chosen.tiny}
    log = Log(chosen.out / STATE, key, steps)
    print(f"{chosen.minutes:g} minutes, results in {chosen.out}", flush=True)
    with Stops() as stops:
        _take_all(chosen.out, steps, chosen.minutes, log, stops)
    failed = [step.name for step in steps if log.outcome(step) == "failed"]
    left = [step.name for step in steps if log.outcome(step) not in DONE]
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {chosen.out}")
    if left:
        print(f"left: {', '.join(left)}; another call goes on there")
    return 130 if stops.count else int(bool(failed or left))
