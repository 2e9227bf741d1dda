"""What a measurement ran on: versions, devices, and the path that each op takes there."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fusedckpt
from fusedckpt.kernels.runtime import IS_INTERPRETED

__all__ = ["choose_device", "complete", "environment", "origin", "run", "settings", "summary"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# libraries that `run` measures, by the names they are installed under
LIBRARIES = ("liger-kernel", "quack-kernels", "transformer-engine", "flash-attn")
# a result without them is refused: they are written beside its numbers
NEEDED = ("device", "date", "torch", "triton", "fusedckpt")


def _version(package: str) -> str:
    """Return what a package calls itself: its metadata leave out which build of torch it is."""
    try:
        return str(import_module(package).__version__)
    except ImportError:
        return "not installed"


def versions() -> dict[str, str]:
    """Python and the packages that a result depends on."""
    found = {"python": platform.python_version()}
    found |= {package: _version(package) for package in ("torch", "triton", "numpy")}
    found["fusedckpt"] = fusedckpt.__version__
    for library in (*LIBRARIES, "transformers"):
        # not imported: that takes seconds, and some want a GPU for it
        with suppress(metadata.PackageNotFoundError):
            found[library] = metadata.version(library)
    return found


def commit() -> str | None:
    """The checkout's commit, marked `-dirty` with changes in it.

    FUSEDCKPT_COMMIT names that of a copy without git; without either there is None.
    """
    if named := os.environ.get("FUSEDCKPT_COMMIT"):
        return named
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def driver() -> str | None:
    """The GPU driver's version; None where there is none to ask."""
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def device_name(device: torch.device) -> str:
    """The chip's own name; for a CPU also the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        fields = ([part.strip() for part in line.split(":", 1)] for line in lines)
        name = next((field[1] for field in fields if field[0] == "model name"), name)
    threads = torch.get_num_threads()
    return f"{name} ({threads} thread{'s' * (threads > 1)})"


def choose_device(name: str | None) -> torch.device:
    """Return the device of an option, the first GPU or else the CPU for None.

    Raises ValueError where there is no such device.
    """
    num_gpus = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda:0" if num_gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device expects cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and int(name.partition(":")[2] or 0) >= num_gpus:
        raise ValueError(f"--device {name}: this torch sees {num_gpus} CUDA devices")
    return device


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a result must name besides its settings."""
    return {
        "device": device_name(device),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "paths": fusedckpt.paths(device, dtype),
        "commit": commit(),
        "driver": driver(),
        "cuda": torch.version.cuda or torch.version.hip,
        "tf32": has_tf32(),
        **versions(),
    }


def has_tf32() -> bool:
    """Whether a GPU may round float32 operands of matmuls to TF32."""
    # the older allow_tf32 raises where the newer setting was used
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def summary(facts: dict[str, Any]) -> str:
    """The device and the packages of an environment, in one line."""
    names = ("torch", "triton", "fusedckpt", *LIBRARIES)
    packages = ", ".join(f"{name} {facts[name]}" for name in names if name in facts)
    return f"{facts['device']}; {packages}{'; TF32 matmuls' if facts.get('tf32') else ''}"


def origin(facts: dict[str, Any]) -> str:
    """An environment in one line, with date and commit."""
    return f"{summary(facts)}; {facts['date'][:10]}, commit {str(facts['commit'])[:12]}"


def complete(facts: dict[str, Any]) -> None:
    """Raise ValueError unless an environment names what `origin` writes."""
    lost = [name for name in NEEDED if type(facts.get(name)) is not str]
    if "commit" not in facts:
        lost.append("commit")
    if lost:
        raise ValueError(f"environment names no {', '.join(lost)}")


def _devices() -> list[torch.device]:
    return [torch.device("cpu")] + [
        torch.device("cuda", index) for index in range(torch.cuda.device_count())
    ]


def _facts() -> Iterator[tuple[str, str]]:
    yield from versions().items()
    yield "commit", commit() or "unknown"
    yield "CUDA", torch.version.cuda or "not in this torch"
    yield "ROCm", torch.version.hip or "not in this torch"
    for device in _devices():
        yield str(device), device_name(device)
    yield "Triton interpreter", "on" if IS_INTERPRETED else "off"
    yield "TF32 matmuls", "on" if has_tf32() else "off"


def _paths(device: torch.device) -> Table:
    columns = {dtype: fusedckpt.paths(device, dtype) for dtype in DTYPES}
    out = Table("op", *(str(dtype).removeprefix("torch.") for dtype in DTYPES))
    out.title = f"paths on {device}"
    for op in columns[DTYPES[0]]:
        out.add_row(op, *(paths[op] for paths in columns.values()))
    return out


def settings() -> None:
    """Return nothing: there is nothing to choose."""


def run(chosen: None) -> int:
    """Print the environment and every op's path."""
    console = Console()
    facts = Table("what", "value", title="environment")
    for fact in _facts():
        facts.add_row(*fact)
    console.print(facts)
    for device in _devices():
        console.print(_paths(device))
    return 0
