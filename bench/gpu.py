"""`python -m bench gpu`: commands that test and measure on a GPU, in three parts of minutes each.

Every command is a process of its own with a share of its part's time. Its results stay, also when
it fails or its time is up, and are in one archive after every command; the next call of the same
commit on the same device goes on where this one stopped, in any copy of the checkout. Nothing is
downloaded, and nothing is drawn: `bench table` and `bench plot` do that elsewhere.
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
OUTCOMES = {*DONE, "killed", "out of time", "interrupted", "not started"}
NOT_STARTED = {"outcome": "not started"}
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
    command: Words
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
    chosen.archive = (chosen.archive or chosen.out.with_name(f"{chosen.out.name}.tar.gz")).resolve()
    for folder in (chosen.out, chosen.archive.parent):
        folder.mkdir(parents=True, exist_ok=True)
    chosen.tiny = chosen.tiny or not torch.cuda.is_available()
    return chosen


def _device_name() -> str:
    return device_name(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))


def _bench(command: str, *options: str, **chosen: Any) -> Words:
    """Return a command of ours; an option with a tuple of values is repeated."""
    pairs = [(name, v if isinstance(v, tuple) else (v,)) for name, v in chosen.items()]
    given = [f"--{name}={value}" for name, values in pairs for value in values]
    return (sys.executable, "-m", "bench", command, *given, *options)


def _tests(*options: str) -> Words:
    """Test in many processes, where pytest can."""
    command = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
    count = min(PROCESSES, os.cpu_count() or 1)
    if find_spec("xdist") is not None and count > 1:
        # tests that take most of the memory are one group, and so never run side by side
        command = (*command, "-n", str(count), "--dist=loadgroup")
    return (*command, *options)


def _toys(out: Path) -> list[Step]:
    """Return a step of each kind, at toy sizes."""
    few: dict[str, Any] = {"repeat": 1, **TOYS, **ALONE}
    return [
        Step(1, "env", _bench("env")),
        Step(1, "numbers", _bench("run", "--resume", out=out, **few)),
        Step(1, "kernel-tests", _tests("tests/kernels/test_tiles.py", "-k", "row")),
        Step(2, "profile", _bench("profile", out=out, **TOYS)),
        Step(3, "launched", _bench("run", "--no-graphs", out=out / "launched", **few)),
        Step(3, "capacity", _bench("capacity", out=out, memory=1, **few)),
    ]


def steps_of(out: Path, tiny: bool) -> list[Step]:
    """Return the steps, in each part first those that others depend on, then the most important."""
    if tiny:
        return _toys(out)

    def run(*options: str, place: str = "", **chosen: Any) -> Words:
        return _bench("run", "--resume", *options, out=out / place, **chosen)

    wide, short, contexts = {"size": "llama-3-8b"}, ("vit-l", "gpt2"), (512, 2048, 8192)
    every, blocks, layers = {"case": CASE_NAMES}, {"case": BLOCKS}, {"case": CASE_NAMES[-2:]}
    # those that compile are the last to be measured, and a stack takes them too long
    final = {"case": (*BLOCKS, *CASE_NAMES[:-1]), "repeat": 40}
    first, profile = tuple(f"tests/{name}" for name in KERNEL_TESTS), _bench("profile", out=out)
    attention = run(**wide, **ALONE, case="attention", tokens=contexts, repeat=20)
    steps = [
        Step(1, "env", _bench("env")),
        Step(1, "numbers", run(**wide, **every, **ALONE, repeat=20), 0.45),
        Step(1, "numbers-short", run(size=short, **blocks, **ALONE, repeat=20), 0.3),
        Step(1, "kernel-tests", _tests(*first)),
        Step(2, "profile", profile, 0.2),
        Step(2, "layers", run(**wide, **layers, **ALONE, repeat=40), 0.6),
        Step(2, "contexts", attention, 0.5),
        Step(2, "widths", run(size="llama-3.2-1b", **every, **ALONE, repeat=20)),
        Step(3, "final", run(**wide, **final), 0.5),
        Step(3, "launched", run("--no-graphs", **wide, **blocks, **ALONE, place="launched"), 0.4),
        Step(3, "other-tests", _tests(*(f"--ignore={file}" for file in first)), 0.8),
        Step(3, "capacity", _bench("capacity", out=out, repeat=5, **ALONE)),
    ]
    if shutil.which("ncu"):
        given = (*NCU, f"--log-file={out / 'ncu.txt'}", *profile, "--bare")
        steps.insert(5, Step(2, "ncu", given, 0.3))
    return steps


def _earlier(path: Path, key: Any) -> dict[str, dict[str, Any]]:
    """Return the outcomes that an earlier call kept under a key; a damaged file is set aside."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        steps = {name: {**facts} for name, facts in record["steps"].items()}
        if not {facts["outcome"] for facts in steps.values()} <= OUTCOMES:
            raise ValueError("no outcome")
        return steps if record["key"] == key else {}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        aside = path.replace(path.with_name(f"{path.name}.damaged"))
        text = f"{path} is no record of steps ({error!r}): moved to {aside.name}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return {}


def _keep(chosen: Namespace, key: Any, outcomes: dict[str, dict[str, Any]]) -> None:
    """Replace the record of outcomes, and the archive by one of all that is in the folder."""
    state, archive = chosen.out / STATE, chosen.archive
    written = state.with_suffix(".part")
    written.write_text(json.dumps({"key": key, "steps": outcomes}, indent=1) + "\n", "utf-8")
    written.replace(state)
    written = archive.with_name(f"{archive.name}.part")
    with tarfile.open(written, "w:gz") as file:
        for path in sorted(chosen.out.rglob("*")):
            if path.is_file() and path not in (archive, written):
                file.add(path, path.relative_to(chosen.out))
    written.replace(archive)


def _limit(step: Step, left: float) -> float | None:
    """Return how many seconds of those left a step may take, None where it is too late to start."""
    # one that is stopped may take its grace too
    left -= GRACE
    return None if left <= 0 else min(left, max(30.0, left * step.share))


def _take(step: Step, folder: Path, left: float, stops: Stops) -> dict[str, Any]:
    """Take a step, and return its outcome and other facts."""
    limit = _limit(step, left)
    if limit is None:
        print(f"{step.name}: not started, the time is up")
        return NOT_STARTED
    print(f"{step.name}: at most {limit:.0f} s, of {left:.0f} s left", flush=True)
    path, start = folder / f"{step.name}.log", time.monotonic()
    outcome, status = take(step.command, path, limit, stops)
    seconds = round(time.monotonic() - start, 1)
    ended = f"{outcome} with status {status}" if status else outcome
    print(f"{step.name}: {ended} after {seconds:.0f} s")
    said = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in () if outcome == "ok" else [line for line in said if line.strip()][-3:]:
        print(f"    {line}")
    return {"outcome": outcome, "status": status, "seconds": seconds, "command": step.command}


def _set_aside(out: Path) -> None:
    """Move the results of earlier calls into a folder of its own."""
    if names := [name for name in MEASURED if (out / name).exists()]:
        folder = next(p for n in itertools.count(1) if not (p := out / f"before-{n}").exists())
        folder.mkdir()
        for name in names:
            (out / name).rename(folder / name)


def run(chosen: Namespace) -> int:
    """Take every step; returns 0 where all went well, 1 where not, 130 where interrupted."""
    if chosen.restart:
        _set_aside(chosen.out)
    key = {"device": _device_name(), "commit": commit(), "tiny": chosen.tiny}
    steps, earlier = steps_of(chosen.out, chosen.tiny), _earlier(chosen.out / STATE, key)
    outcomes = {step.name: earlier.get(step.name, NOT_STARTED) for step in steps}
    steps = [step for step in steps if step.part in (chosen.part or PARTS)]
    print(f"{chosen.minutes:g} minutes a part, results in {chosen.archive}", flush=True)
    ends: dict[int, float] = {}
    with Stops() as stops:
        _keep(chosen, key, outcomes)
        for step in steps:
            outcome = outcomes[step.name]["outcome"]
            end = ends.setdefault(step.part, time.monotonic() + 60 * chosen.minutes)
            if outcome in DONE:
                print(f"{step.name}: {outcome}, in an earlier call")
            elif not stops.count:
                outcomes[step.name] = _take(step, chosen.out, end - time.monotonic(), stops)
                # after every step: no signal can take away the archive's files
                _keep(chosen, key, outcomes)
    failed = [step.name for step in steps if outcomes[step.name]["outcome"] == "failed"]
    left = [step.name for step in steps if outcomes[step.name]["outcome"] not in DONE]
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {chosen.out}")
    if left:
        print(f"left: {', '.join(left)}; another call goes on there")
    return 130 if stops.count else int(bool(failed or left))
