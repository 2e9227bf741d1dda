"""What tests of the commands share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture(scope="module")
def aten():
    """Kernels and fuse's check have tests of their own, and would take long."""
    with forced_path("aten"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedckpt.fusing.verification.difference", lambda *args: None)
        yield


@pytest.fixture(scope="module")
def uncompiled():
    """torch.compile takes seconds a case, and has a test of its own."""
    from bench.implementations import BASELINES

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in BASELINES if name.startswith("torch.compile")]:
            patch.delitem(BASELINES, name)
        yield


@pytest.fixture
def add_way(monkeypatch):
    """Add an implementation of every case: name, and eager function -> function."""
    from bench.implementations import BASELINES

    return lambda name, wrap: monkeypatch.setitem(BASELINES, name, wrap)


@pytest.fixture
def refused(capsys):
    """Run a command that is to end in one line before any work, and return the line."""
    from bench.__main__ import main

    def run(*argv: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
        usage, error = capsys.readouterr().err.splitlines()
        assert usage == f"usage: python -m bench {argv[0]} [options]"
        return error

    return run


@pytest.fixture(scope="session")
def bench_run():
    """Run `bench run` at toy sizes in this process; returns status and rows."""
    from bench.__main__ import main

    def run(out: Path, *options: str) -> tuple[int, list[dict]]:
        sizes = ("--in-process", "--device=cpu", "--size=tiny", "--repeat=3")
        status = main(["run", *sizes, *options, f"--out={out}"])
        return status, [json.loads(line) for line in (out / "run.jsonl").open()]

    return run
