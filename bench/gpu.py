"""`python -m bench gpu`: tests and measurements on a GPU, in three parts of minutes each.

Every step is a process of its own with a share of its part's time. Its results stay,
also when it fails or its time is up, and are in one archive after every step; the next call of the
same commit on the same device goes on where this one stopped, in any copy of the checkout. Nothing
is downloaded, and nothing is drawn: `bench table` and `bench plot` do that elsewhere.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
import tarfile
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
from bench.settings import CASE_NAMES, PARTS

STATE = "gpu.json"
# results that steps wrote and take up again: files and a folder
MEASURED = (STATE, "run.jsonl", "launched", "profile.jsonl", "capacity.jsonl")
# tests spend their time in the kernels' compiler, a process each, and hold little of the GPU
PROCESSES = 14
# tests of code that differs between a GPU and the interpreter
KERNEL_TESTS = (
    *("kernels/test_gemm.py", "kernels/test_tiles.py", "kernels/test_activations.py"),
    *(f"layers/test_{name}.py" for name in ("norm", "linear", "mlp", "blocks", "contracts")),
    "reporting/test_memory.py",
)
# of these a step is done with; one that a signal killed may have had bad luck
DONE = ("ok", "failed")
OUTCOMES = (*DONE, "killed", "out of time", "interrupted", "not started")
# a model's blocks, which a reader asks for first
BLOCKS = ("norm_gated_mlp_residual", "gated_mlp", "mlp", "linear_act", "rms_norm")
# without those that compile, which takes longer than to measure all others, and other libraries
ALONE: dict[str, Any] = {"skip": ("compile", "Liger", "quack", "TE", "flash-attn")}
TOYS: dict[str, Any] = {"size": "tiny", "case": "rms_norm"}
# a few replays of each kernel that is marked
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats")
NCU = ("ncu", "--profile-from-start=off", "--clock-control=none")
NCU += tuple(f"--section={name}" for name in SECTIONS)
Words = tuple[str, ...]


class Step(NamedTuple):
    """A command, its part, and the share of the part's time left that it may take."""

    part: int
    name: str
    command: tuple[str, ...]
    share: float = 1.0


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
    chosen.archive = (chosen.archive or chosen.out.with_name(f"{chosen.out.name}.tar.gz")).resolve()
    chosen.archive.parent.mkdir(parents=True, exist_ok=True)
    chosen.tiny = chosen.tiny or not torch.cuda.is_available()
    return chosen


def _device_name() -> str:
    return device_name(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))


def _bench(command: str, *options: str, **chosen: Any) -> Words:
    """Return a command of ours; an option with a tuple of values is repeated."""
    pairs = [(name, v if isinstance(v, tuple) else (v,)) for name, v in chosen.items()]
    given = [f"--{name}={value}" for name, values in pairs for value in values]
    return (sys.executable, "-m", "bench", command, *given, *options)


class Commands(NamedTuple):
    """The commands of steps; tiny: the same at toy sizes, for fewer cases and tests."""

    out: Path
    tiny: bool

    def run(self, *options: str, place: str = "", **chosen: Any) -> Words:
        """Measure cases."""
        chosen = {"repeat": 1, **TOYS, **ALONE} if self.tiny else chosen
        return _bench("run", "--resume", *options, out=self.out / place, **chosen)

    def profile(self, *options: str) -> Words:
        """Look at the kernels one by one."""
        return _bench("profile", *options, out=self.out, **(TOYS if self.tiny else {}))

    def capacity(self) -> Words:
        """Fill memory with tokens."""
        options = {"memory": 1, "repeat": 1, **TOYS} if self.tiny else {"repeat": 5}
        return _bench("capacity", out=self.out, **options, **ALONE)

    def tests(self, *options: str) -> Words:
        """Test in many processes, where pytest can."""
        command = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
        count = min(PROCESSES, os.cpu_count() or 1)
        if find_spec("xdist") is not None and count > 1:
            # tests that take most of the memory are one group, and so never run side by side
            command = (*command, "-n", str(count), "--dist=loadgroup")
        return (*command, *(("tests/kernels/test_tiles.py", "-k", "row") if self.tiny else options))


def steps_of(out: Path, tiny: bool) -> list[Step]:
    """Return the steps, in each part first those that others depend on, then the most important.

    tiny: toys of different steps are alike, and the first of them stands for all.
    """
    do, wide, short = Commands(out, tiny), {"size": "llama-3-8b"}, ("vit-l", "gpt2")
    every, blocks, layers = {"case": CASE_NAMES}, {"case": BLOCKS}, {"case": CASE_NAMES[-2:]}
    # those that compile are the last to be measured, and a stack takes them too long
    final = {"case": (*BLOCKS, *CASE_NAMES[:-1]), "repeat": 40}
    launch, first = ("--no-graphs",), tuple(f"tests/{name}" for name in KERNEL_TESTS)
    steps = [
        Step(1, "env", _bench("env")),
        Step(1, "numbers", do.run(**wide, **every, **ALONE, repeat=20), 0.45),
        Step(1, "numbers-short", do.run(size=short, **blocks, **ALONE, repeat=20), 0.3),
        Step(1, "kernel-tests", do.tests(*first)),
        Step(2, "profile", do.profile(), 0.2),
        Step(2, "layers", do.run(**wide, **layers, **ALONE, repeat=40), 0.6),
        Step(2, "widths", do.run(size="llama-3.2-1b", **every, **ALONE, repeat=20)),
        Step(3, "final", do.run(**wide, **final), 0.5),
        Step(3, "launched", do.run(*launch, **wide, **blocks, **ALONE, place="launched"), 0.4),
        Step(3, "other-tests", do.tests(*(f"--ignore={file}" for file in first)), 0.8),
        Step(3, "capacity", do.capacity()),
    ]
    if shutil.which("ncu"):
        given = (*NCU, f"--log-file={out / 'ncu.txt'}", *do.profile("--bare"))
        steps.insert(5, Step(2, "ncu", given, 0.3))
    return list({step.command: step for step in steps[::-1]}.values())[::-1] if tiny else steps


class Log:
    """The outcome of each step, kept in a file that is replaced after every one."""

    def __init__(self, path: Path, key: dict[str, Any], steps: Sequence[Step]):
        self.path, self.key = path, key
        earlier = self._read()
        self.steps = {s.name: earlier.get(s.name, {"outcome": "not started"}) for s in steps}
        self._write()

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the steps that an earlier call kept under a key; a damaged file is set aside."""
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
        """Keep the outcome of a step and other facts."""
        self.steps[step.name] = facts
        self._write()

    def outcome(self, step: Step) -> str:
        """Return the outcome of a step, in this call or an earlier one."""
        return self.steps[step.name]["outcome"]


def _limit(step: Step, left: float) -> float | None:
    """Return how many seconds of those left a step may take, None where it is too late to start."""
    # one that is stopped may take its grace too
    left -= GRACE
    return None if left <= 0 else min(left, max(30.0, left * step.share))


def _take_all(chosen: Namespace, steps: Sequence[Step], log: Log, stops: Stops) -> None:
    """Take every step of a part that is left, until time is up or a stop is asked for."""
    end = time.monotonic() + 60 * chosen.minutes
    for step in steps:
        if stops.count:
            return
        if log.outcome(step) in DONE:
            print(f"{step.name}: {log.outcome(step)}, in an earlier call")
            continue
        left = end - time.monotonic()
        limit = _limit(step, left)
        if limit is None:
            print(f"{step.name}: not started, the time is up")
            continue
        print(f"{step.name}: at most {limit:.0f} s, of {left:.0f} s left", flush=True)
        path, start = chosen.out / f"{step.name}.log", time.monotonic()
        outcome, status = take(step.command, path, limit, stops)
        seconds = round(time.monotonic() - start, 1)
        log.note(step, outcome=outcome, status=status, seconds=seconds, command=step.command)
        # after every step: no signal can take away the archive's files
        _pack(chosen.out, chosen.archive)
        ended = f"{outcome} with status {status}" if status else outcome
        print(f"{step.name}: {ended} after {seconds:.0f} s")
        said = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in () if outcome == "ok" else [line for line in said if line.strip()][-3:]:
            print(f"    {line}")


def _pack(folder: Path, archive: Path) -> None:
    """Replace the archive by one of all that is in the folder."""
    written = archive.with_name(f"{archive.name}.part")
    with tarfile.open(written, "w:gz") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path not in (archive, written):
                file.add(path, path.relative_to(folder))
    written.replace(archive)


def _set_aside(out: Path) -> None:
    """Move the results of earlier calls into a folder of its own."""
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
    steps = steps_of(chosen.out, chosen.tiny)
    key = {"device": _device_name(), "commit": commit(), "tiny": chosen.tiny}
    log = Log(chosen.out / STATE, key, steps)
    parts = chosen.part or PARTS
    print(f"{chosen.minutes:g} minutes a part, results in {chosen.archive}", flush=True)
    with Stops() as stops:
        try:
            for part in parts:
                _take_all(chosen, [step for step in steps if step.part == part], log, stops)
        finally:
            _pack(chosen.out, chosen.archive)
    steps = [step for step in steps if step.part in parts]
    failed = [step.name for step in steps if log.outcome(step) == "failed"]
    left = [step.name for step in steps if log.outcome(step) not in DONE]
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {chosen.out}")
    if left:
        print(f"left: {', '.join(left)}; another call goes on there")
    return 130 if stops.count else int(bool(failed or left))
