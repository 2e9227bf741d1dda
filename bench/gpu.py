"""Test and measure everything on a machine with a GPU, in three parts of minutes each.

Part 1 measures all cases and runs the kernels' tests, 2 profiles and measures more widths, 3 takes
the final times. Every command is a process of its own with a share of its part's time; its results
stay, also when it fails or its time is up, and are in one archive after every command. Called
again, at the same commit on the same device, it takes the steps that did not end. Nothing is
downloaded, and nothing is drawn: `bench table` and `bench plot` do that elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.cases import CASES
from bench.env import ROOT, commit, device_name
from bench.options import POSITIVE, Options

STATE = "gpu.json"
PARTS = (1, 2, 3)
# seconds that a process has to end by itself after an interrupt, before it is killed
GRACE = 15
# tests spend their time in the kernels' compiler, a process each, and hold little of the GPU
PROCESSES = 14
# tests of code that differs between a GPU and the interpreter
KERNEL_TESTS = (
    *("kernels/test_gemm.py", "kernels/test_tiles.py", "kernels/test_activations.py"),
    *(f"layers/test_{name}.py" for name in ("norm", "linear", "mlp", "blocks", "contracts")),
    "reporting/test_memory.py",
)
# a model's blocks, which a reader asks for first
BLOCKS = ("norm_gated_mlp_residual", "gated_mlp", "mlp", "linear_act", "rms_norm")
# without those that compile, which takes longer than to measure all others, and other libraries
ALONE: dict[str, Any] = {"skip": ("compile", "Liger", "quack", "TE", "flash-attn")}
Words = tuple[str, ...]


class Step(NamedTuple):
    """A command, its part, and the share of the part's time that it may take."""

    part: int
    name: str
    command: Words
    share: float


def options(add: Options) -> None:
    """Add the options."""
    text = "numbers and kernel tests, profile and widths, or final times; default: all three"
    add.many("part", text, type=int, choices=PARTS, metavar="1|2|3")
    add.one("minutes", "how long a part may take", 9, type=POSITIVE, metavar="N")
    text = "folder for results; default: bench/results/gpu-<device>"
    add.one("out", text, type=Path, metavar="DIR")
    text = "archive of the folder, replaced after every step; default: DIR.tar.gz"
    add.one("archive", text, type=Path, metavar="FILE")
    add.flag("allow-cpu", "run all parts on a CPU, at toy sizes")
    add.flag("tiny", "toy sizes on a GPU too")


def prepare(chosen: Namespace) -> Namespace:
    """Check that a GPU is visible. Raises ValueError without one, unless a CPU is allowed."""
    if not torch.cuda.is_available() and not chosen.allow_cpu:
        raise ValueError(
            "this torch sees no GPU; --allow-cpu goes through the same parts on a CPU, at toy sizes"
        )
    chosen.device = device_name(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    slug = re.sub(r"[^a-z0-9]+", "-", chosen.device.lower()).strip("-")
    # steps run in another folder than this process
    chosen.out = (chosen.out or ROOT / "bench" / "results" / f"gpu-{slug}").resolve()
    chosen.archive = (chosen.archive or chosen.out.with_name(f"{chosen.out.name}.tar.gz")).resolve()
    for folder in (chosen.out, chosen.archive.parent):
        folder.mkdir(parents=True, exist_ok=True)
    chosen.tiny = chosen.tiny or not torch.cuda.is_available()
    return chosen


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
    toys: dict[str, Any] = {"size": "tiny", "case": "rms_norm"}
    few = {"repeat": 1, **toys, **ALONE}
    return [
        Step(1, "env", _bench("env"), 0.2),
        Step(1, "numbers", _bench("run", "--resume", out=out, **few), 0.4),
        Step(1, "kernel-tests", _tests("tests/kernels/test_tiles.py", "-k", "row"), 0.4),
        Step(2, "profile", _bench("profile", out=out, **toys), 1.0),
        Step(3, "launched", _bench("run", "--no-graphs", out=out / "launched", **few), 0.5),
        Step(3, "capacity", _bench("capacity", out=out, memory=1, **few), 0.5),
    ]


def steps_of(out: Path, tiny: bool) -> list[Step]:
    """Return the steps, in each part first those that others depend on, then the most important."""
    if tiny:
        return _toys(out)

    def run(*options: str, place: str = "", **chosen: Any) -> Words:
        return _bench("run", "--resume", *options, out=out / place, **chosen)

    wide, short, contexts = {"size": "llama-3-8b"}, ("vit-l", "gpt2"), (512, 2048, 8192)
    names = tuple(CASES)
    every, blocks, layers = {"case": names}, {"case": BLOCKS}, {"case": names[-2:]}
    # those that compile are the last to be measured, and a stack takes them too long
    final = {"case": (*BLOCKS, *names[:-1]), "repeat": 40}
    first = tuple(f"tests/{name}" for name in KERNEL_TESTS)
    attention = run(**wide, **ALONE, case="attention", tokens=contexts, repeat=20)
    return [
        Step(1, "env", _bench("env"), 0.05),
        Step(1, "numbers", run(**wide, **every, **ALONE, repeat=20), 0.45),
        Step(1, "numbers-short", run(size=short, **blocks, **ALONE, repeat=20), 0.2),
        Step(1, "kernel-tests", _tests(*first), 0.3),
        Step(2, "profile", _bench("profile", out=out), 0.2),
        Step(2, "layers", run(**wide, **layers, **ALONE, repeat=40), 0.35),
        Step(2, "contexts", attention, 0.2),
        Step(2, "widths", run(size="llama-3.2-1b", **every, **ALONE, repeat=20), 0.2),
        Step(3, "final", run(**wide, **final), 0.45),
        Step(3, "launched", run("--no-graphs", **wide, **blocks, **ALONE, place="launched"), 0.2),
        Step(3, "other-tests", _tests(*(f"--ignore={file}" for file in first)), 0.25),
        Step(3, "capacity", _bench("capacity", out=out, repeat=5, **ALONE), 0.1),
    ]


def _earlier(path: Path, key: Any) -> dict[str, Any]:
    """Return the outcomes that an earlier call wrote under a key, if any."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["steps"] if record["key"] == key else {}
    return {}


def _keep(chosen: Namespace, key: Any, outcomes: dict[str, Any]) -> None:
    """Write the outcomes, and replace the archive by one of all that is in the folder."""
    text = json.dumps({"key": key, "steps": outcomes}, indent=1) + "\n"
    (chosen.out / STATE).write_text(text, encoding="utf-8")
    written = chosen.archive.with_name(f"{chosen.archive.name}.part")
    with tarfile.open(written, "w:gz") as file:
        for path in sorted(chosen.out.rglob("*")):
            if path.is_file() and path not in (chosen.archive, written):
                file.add(path, path.relative_to(chosen.out))
    written.replace(chosen.archive)


def _ended(process: subprocess.Popen[bytes]) -> None:
    """End a process, and all that it started, which would go on using the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def take(step: Step, log: Path, seconds: float) -> dict[str, Any]:
    """Run a step, its output going to a file; return its outcome and other facts."""
    print(f"{step.name}: at most {seconds:.0f} s", flush=True)
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = process.wait(seconds)
        outcome = "killed" if status < 0 else "failed" if status else "ok"
    except subprocess.TimeoutExpired:
        outcome = "out of time"
    finally:
        _ended(process)
    seconds = round(time.monotonic() - start, 1)
    print(f"{step.name}: {outcome} after {seconds:.0f} s")
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in () if outcome == "ok" else [line for line in said if line.strip()][-3:]:
        print(f"    {line}")
    facts = {"outcome": outcome, "status": process.returncode, "seconds": seconds}
    return facts | {"command": step.command}


def run(chosen: Namespace) -> int:
    """Take every step; returns 0 where all went well, else 1."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # as Ctrl-C, unless it is ignored, as under nohup
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    key = {"device": chosen.device, "commit": commit(), "tiny": chosen.tiny}
    outcomes = _earlier(chosen.out / STATE, key)
    steps = [s for s in steps_of(chosen.out, chosen.tiny) if s.part in (chosen.part or PARTS)]
    print(f"{chosen.minutes} minutes a part, results in {chosen.archive}", flush=True)
    for step in steps:
        if outcomes.get(step.name, {}).get("outcome") in ("ok", "failed"):
            print(f"{step.name}: {outcomes[step.name]['outcome']}, in an earlier call")
            continue
        outcomes[step.name] = {"outcome": "interrupted"}
        try:
            seconds = 60 * chosen.minutes * step.share
            outcomes[step.name] = take(step, chosen.out / f"{step.name}.log", seconds)
        finally:
            _keep(chosen, key, outcomes)
    bad = [s.name for s in steps if outcomes[s.name]["outcome"] != "ok"]
    if bad:
        print(f"not ok: {', '.join(bad)}; see the logs in {chosen.out}")
    return int(bool(bad))
