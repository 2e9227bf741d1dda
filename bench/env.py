"""A measurement's environment: versions, devices, and the path that each function takes there."""

from __future__ import annotations

import platform
import re
import subprocess
from argparse import Namespace
from contextlib import suppress
from datetime import datetime, timezone
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

import fusedckpt
from fusedckpt.reporting.versions import checkout_commit as commit

ROOT = Path(__file__).resolve().parents[1]
# libraries that `run` measures, by the names they are installed under
LIBRARIES = ("liger-kernel", "quack-kernels", "transformer-engine", "flash-attn")


def _version(package: str) -> str:
    """Return a package's `__version__`: its metadata leave out which build of torch it is."""
    try:
        return str(import_module(package).__version__)
    except ImportError:
        return "not installed"


def versions() -> dict[str, str]:
    """Python and the packages that a result depends on."""
    by_package = {"python": platform.python_version()}
    by_package |= {package: _version(package) for package in ("torch", "triton", "numpy")}
    by_package["fusedckpt"] = fusedckpt.__version__
    for library in (*LIBRARIES, "transformers"):
        # not imported: that takes seconds, and some want a GPU for it
        with suppress(metadata.PackageNotFoundError):
            by_package[library] = metadata.version(library)
    return by_package


def _said(*command: str) -> str | None:
    """Return the first line that a program prints; None where it is absent or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        text = subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
        return text.partition("\n")[0].strip() or None
    return None


def device_name(device: torch.device) -> str:
    """The chip's own name; for a CPU also the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        facts = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        name = next((text.strip() for key, _, text in facts if key.strip() == "model name"), name)
    threads = torch.get_num_threads()
    return f"{name} ({threads} thread{'s' * (threads > 1)})"


def choose_device(name: str | None) -> torch.device:
    """Return the device of an option, the first GPU or else the CPU for None.

    Raises ValueError where there is no such device.
    """
    num_gpus = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda:0" if num_gpus else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device expects cpu, cuda or cuda:N, got {name!r}")
    if name != "cpu" and int(name.partition(":")[2] or 0) >= num_gpus:
        raise ValueError(f"--device {name}: this torch sees {num_gpus} CUDA devices")
    return torch.device(name)


def has_tf32() -> bool:
    """Whether a GPU may round float32 operands of matmuls to TF32."""
    # the older allow_tf32 raises where the newer setting was used
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the facts that a result must name besides its settings."""
    return {
        "device": device_name(device),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "paths": fusedckpt.backends(device, dtype),
        "commit": commit(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda or torch.version.hip,
        "tf32": has_tf32(),
        **versions(),
    }


def summary(facts: dict[str, Any]) -> str:
    """The device and the packages of an environment, in one line."""
    names = ("torch", "triton", "fusedckpt", *LIBRARIES)
    packages = ", ".join(f"{name} {facts[name]}" for name in names if name in facts)
    return f"{facts['device']}; {packages}{'; TF32 matmuls' if facts.get('tf32') else ''}"


def origin(facts: dict[str, Any]) -> str:
    """An environment in one line, with date and commit."""
    return f"{summary(facts)}; {facts['date'][:10]}, commit {str(facts['commit'])[:12]}"


def announced(chosen: Namespace, how: str) -> dict[str, Any]:
    """Return the environment of a command, and print it with how it measures."""
    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    print(f"{summary(facts)}; {chosen.dtype}{how}", flush=True)
    return facts
