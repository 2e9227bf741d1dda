"""The versions and the commits of which a record was made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[2]
# installed or not; a version of torch says which build it is
_BESIDE_TORCH = ("triton", "transformers")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and torch, and of triton and transformers if installed."""
    by_package = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in _BESIDE_TORCH:
        with suppress(metadata.PackageNotFoundError):
            by_package[package] = metadata.version(package)
    return by_package


def checkout_commit() -> str | None:
    """Return the commit of the checkout, marked `-dirty` with changes in it.

    FUSEDCKPT_COMMIT names that of a copy without git. Of an installed package it is the commit that
    pip installed; None where no commit is known.
    """
    if named := os.environ.get("FUSEDCKPT_COMMIT"):
        return named
    if (_ROOT / ".git").exists():
        command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        with suppress(OSError, subprocess.SubprocessError):
            options = {"cwd": _ROOT, "text": True, "stderr": subprocess.DEVNULL}
            return subprocess.check_output(command, **options).strip() or None
        return None
    with suppress(metadata.PackageNotFoundError):
        origin = metadata.distribution("fusedckpt").read_text("direct_url.json")
        return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return None
