"""A process in which Triton compiles: in that of the tests its kernels are interpreted."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return the environment of a process that compiles for chips that are not there."""
    kept = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def ask() -> Iterator[Callable[..., Any]]:
    """Return a function that sends a request to this session's worker and returns the answer."""
    pytest.importorskip("triton", reason="kernels need Triton")
    command = [sys.executable, "-m", "tests.ptx.worker"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes) as worker:

        def send(request: str, **arguments: Any) -> Any:
            print(json.dumps((request, arguments)), file=worker.stdin, flush=True)
            line = worker.stdout.readline()
            assert line, "the worker has ended"
            return json.loads(line)

        yield send
        worker.stdin.close()
