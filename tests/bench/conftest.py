"""What tests of the commands share."""

from __future__ import annotations

import signal

import pytest
from support import HANGS

from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture(scope="module")
def aten():
    """The kernels have tests of their own; here the interpreter would take most of the time."""
    with forced_path("aten"):
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
    from bench.implementations import BASELINES

    def add(name: str, wrap) -> None:
        monkeypatch.setitem(BASELINES, name, wrap)

    return add


@pytest.fixture
def outer():
    """The handlers of a program that runs the command, wherever this test runs."""

    def handler(number, frame) -> None:
        raise RuntimeError(f"died of {number}")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, handler) for number in numbers]
    yield handler
    for number, was in zip(numbers, before, strict=True):
        signal.signal(number, was)


@pytest.fixture
def hang_guard():
    """Fail a test whose process does not end, instead of waiting for it."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(HANGS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
