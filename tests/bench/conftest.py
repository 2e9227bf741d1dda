"""What tests of the commands share."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture(scope="module")
def aten():
    """Kernels and fuse's check have tests of their own, and would take long."""
    with forced_path("aten"), pytest.MonkeyPatch.context() as changes:
        changes.setattr("fusedckpt.fusing.verification.difference", lambda *args: None)
        yield


@pytest.fixture(scope="module")
def uncompiled():
    """torch.compile takes seconds a case, and has a test of its own."""
    from bench.implementations import BASELINES

    with pytest.MonkeyPatch.context() as changes:
        for name in [name for name in BASELINES if name.startswith("torch.compile")]:
            changes.delitem(BASELINES, name)
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
        # torch may say before that a toolkit is here and no GPU
        *_, usage, error = capsys.readouterr().err.splitlines()
        assert usage == f"usage: python -m bench {argv[0]} [options]"
        return error

    return run


@pytest.fixture(scope="session")
def bench_run():
    """Run `bench run` at toy sizes in this process, without peers; returns status and rows."""
    from bench import peers
    from bench.__main__ import main

    def found(package: str) -> object:
        return None if package in absent else find_spec(package)

    absent = (peers.LIGER, peers.QUACK, peers.TE, peers.FLASH)

    def run(out: Path, *options: str) -> tuple[int, list[dict]]:
        sizes = ("--in-process", "--device=cpu", "--size=tiny", "--repeat=3")
        with patch.object(peers, "find_spec", found):
            status = main(["run", *sizes, *options, f"--out={out}"])
        return status, [json.loads(line) for line in (out / "run.jsonl").open()]

    return run
