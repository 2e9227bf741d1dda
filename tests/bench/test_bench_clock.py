"""CUDA graphs of the benchmarks, on stand-ins for the device: what a failed capture leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import clock
from bench.measure import Implementation, Work

POOL = (0, 7)


class Device:
    """As much of CUDA's state as a capture touches."""

    def __init__(self):
        self.stream = "default"
        self.recording: list[tuple[int, int]] = []
        self.draws_are_captured = False
        self.is_invalid = False

    def end_recording(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)


def graph_on(device: Device) -> type:
    class Graph:
        """torch's: an invalid capture ends before the allocator and the generator hear of it."""

        def capture_begin(self, pool=None, **options) -> None:
            if pool in device.recording:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            self.pool = pool
            device.recording.append(pool)
            device.draws_are_captured = True

        def capture_end(self) -> None:
            if device.is_invalid:
                device.is_invalid = False
                raise RuntimeError("operation failed due to a previous error during capture")
            device.end_recording(0, self.pool)
            device.draws_are_captured = False

        def replay(self) -> None:
            pass

    return Graph


class OnStream:
    def __init__(self, device: Device, stream: str):
        self.device, self.stream = device, stream

    def __enter__(self) -> None:
        self.before, self.device.stream = self.device.stream, self.stream

    def __exit__(self, *error) -> None:
        self.device.stream = self.before


@pytest.fixture
def device(monkeypatch):
    device = Device()
    zeros = torch.zeros
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "CUDAGraph": graph_on(device),
        "stream": lambda stream: OnStream(device, "side"),
        "Stream": lambda device=None: stream,
        "current_stream": lambda device=None: stream,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", device.end_recording, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None: zeros(*shape))
    clock._side_stream.cache_clear()
    yield device
    clock._side_stream.cache_clear()


def test_forward_and_backward_are_two_graphs_on_one_stream(device):
    streams = []
    first, second = clock.capture(
        lambda: streams.append(device.stream) or 3, lambda made: streams.append(made), POOL
    )
    # once to set up, once recorded
    assert streams == ["side", 3, "side", 3]
    assert device.stream == "default"
    assert first.__self__ is not second.__self__


@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("is_invalid", [False, True])
def test_a_capture_that_fails_leaves_nothing_behind(device, calls, is_invalid):
    """By CUDA's own refusal, or by an error of the code that is captured, in either graph."""
    left = iter(range(calls))

    def step(*made) -> None:
        if next(left, None) is None:
            device.is_invalid = is_invalid
            raise ValueError("not while capturing")

    with pytest.raises((ValueError, RuntimeError)):
        clock.capture(step, step, POOL)
    assert device.stream == "default"
    assert not device.recording
    assert not device.draws_are_captured
    # who comes next is captured
    clock.capture(lambda: None, lambda made: None, POOL)


def test_who_cannot_be_captured_is_launched(device):
    def fn(x):
        if device.draws_are_captured:
            device.is_invalid = True
            raise ValueError("not while capturing")
        return x * 2

    x = torch.ones(3, requires_grad=True)
    work = Work([x], [torch.ones(3)], torch.device("cpu"))
    one = Implementation("one", fn)
    forward, backward = one.steps(work, POOL)
    assert not one.is_graph
    assert torch.equal(forward()[0], x * 2)
    assert torch.equal(backward()[0], torch.full((3,), 2.0))
    other = Implementation("other", torch.sin)
    other.steps(work, POOL)
    assert other.is_graph
