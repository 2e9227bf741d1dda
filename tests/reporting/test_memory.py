"""Saved bytes and peaks against numbers computed by hand."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedckpt import functional, memory
from fusedckpt.memory import peak_bytes, phases_of, saved_tensors

# rows, in and out features, and the bytes of a float32 matrix of each; the allocator of a GPU
# rounds up to 512 bytes
R, K, N = 32, 64, 96
X, W, Y = 4 * R * K, 4 * N * K, 4 * R * N


def given(*shape: int) -> torch.Tensor:
    """Draw a tensor that needs no gradient."""
    return randn(*shape, requires_grad=False)


def intermediate(*shape: int) -> torch.Tensor:
    return randn(*shape).exp()


def layer(frozen: bool = False) -> nn.Linear:
    return nn.Linear(K, N, device=DEVICE).requires_grad_(not frozen)


# a function of an intermediate [R, K], and the bytes that it saves
SAVED = {
    # weight.t(), a view of a parameter, is kept as well
    "a linear's input": (lambda x: layer()(x), X),
    "leaves are not counted": (lambda x: (randn(R, K) @ randn(N, K).t()).exp(), Y),
    "frozen parameters are not counted": (lambda x: layer(frozen=True)(x), 0),
    "a plain tensor is": (lambda x: F.linear(x, given(N, K)), W),
    # sin and cos keep x, exp2 and tanh what they return
    "shared": (lambda x: (x.sin(), x.cos(), x.t().exp2(), x[0].tanh()), X + X + 4 * K),
    "a view counts its whole storage": (lambda x: x[0].sin(), X),
    # each result is freed before the next is made, whose storage takes its address
    "freed": (lambda x: [x.exp() is None for _ in range(32)], 32 * X),
    "no gradient": (lambda x: given(R, K).exp(), 0),
    "no_grad": (torch.no_grad()(lambda x: layer()(x).exp()), 0),
    "checkpoint": (
        lambda x: checkpoint(lambda x: layer()(x).exp().exp(), x, use_reentrant=False),
        X,
    ),
    "no checkpoint": (lambda x: layer()(x).exp().exp(), X + 2 * Y),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes(name):
    run, nbytes = SAVED[name]
    x = intermediate(R, K)
    with saved_tensors() as saved:
        run(x)
    assert saved.nbytes == nbytes


def test_excluded_tensors_are_not_counted():
    x, linear = given(R, K), layer()
    for exclude, nbytes in (([], X), ([x], 0)):
        with saved_tensors(exclude) as saved:
            linear(x)
            # a view of it
            linear(x[: R // 2])
        assert saved.nbytes == nbytes


def test_gradients_are_unchanged():
    x = randn(R, K)

    def gradients() -> tuple[torch.Tensor, ...]:
        (first,) = torch.autograd.grad(x.exp().sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.detach(), second

    expected = gradients()
    with saved_tensors():
        found = gradients()
    assert all(map(torch.equal, found, expected))


def test_nothing_outlives_the_graph():
    x = intermediate(R, K)
    with saved_tensors():
        y = x.exp()
    freed = weakref.ref(y)
    del y
    gc.collect()
    assert freed() is None


def test_peak_counts_what_lives_together():
    def run():
        first = torch.empty(X, dtype=torch.uint8, device=DEVICE)
        second = torch.empty(Y, dtype=torch.uint8, device=DEVICE)
        del first
        return second, torch.empty(512, dtype=torch.uint8, device=DEVICE)

    assert peak_bytes(run, DEVICE) == X + Y


def test_peak_includes_what_is_returned_and_left_behind():
    x, dy = randn(R, K), given(R, K)
    kept = []
    assert peak_bytes(lambda: kept.append(x.exp()), DEVICE) == X
    # the gradient stays; y is freed with the graph
    assert peak_bytes(lambda: x.exp().backward(dy), DEVICE) == X + X
    assert x.grad is not None


def test_peak_is_above_the_start():
    def blocks() -> list[torch.Tensor]:
        return [torch.empty(Y, dtype=torch.uint8, device=DEVICE) for _ in range(20)]

    held = []
    # the profiler remembers the sizes of blocks that it saw, and the addresses are used again
    peak_bytes(lambda: held.extend(blocks()), DEVICE)
    held.clear()
    held.extend(blocks())

    def free_then_allocate():
        held.clear()
        return torch.empty(X, dtype=torch.uint8, device=DEVICE)

    assert peak_bytes(free_then_allocate, DEVICE) == (0 if DEVICE.type == "cuda" else X)
    assert peak_bytes(lambda: None, DEVICE) == 0


def test_peak_sees_into_an_op():
    # float64 runs on ATen on every device
    x, w, dy = (given(*shape).double() for shape in ((R, K), (N, K), (R, N)))
    x.requires_grad_()
    y = functional.linear_act(x, w)

    def backward():
        return torch.autograd.grad(y, x, dy, retain_graph=True)

    backward()
    # z, recomputed inside the op, and the block that dz goes through before it is written over z;
    # dx, smaller than that block, comes after it
    assert peak_bytes(backward, DEVICE) == 2 * (Y + Y)


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
def test_phases_on_cuda_are_the_allocators(monkeypatch, backend):
    """Bytes that a GPU was asked for count, not the blocks, whose sizes depend on work before.

    As an allocator with 7 bytes of others counts them.
    """
    state = {"current": 7, "peak": 7}
    name = "requested" if backend == "native" else "allocated"

    def take(*changes):
        for change in changes:
            state["current"] += change
            state["peak"] = max(state["peak"], state["current"])

    def run(mark):
        mark("enter 0")
        take(50, -40)
        mark("leave 0")

    stats = lambda _: {f"{name}_bytes.all.{key}": x for key, x in state.items()}  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(memory, "open_workspaces", lambda device: None)
    reset = lambda _: state.update(peak=state["current"])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    assert [phase[:3] for phase in phases_of(run, torch.device("cuda"), 100)] == [
        ("begin", 100, 100),
        ("enter 0", 100, 150),
        ("leave 0", 110, 110),
    ]
    assert peak_bytes(lambda: take(600, -600), "cuda:0") == 600


def test_phases_on_a_cpu():
    def run(mark):
        mark("enter 0")
        x = torch.empty(1000, dtype=torch.uint8)
        y = torch.empty(5000, dtype=torch.uint8)
        del y
        mark("leave 0")
        del x
        mark("returned")

    assert [phase[:3] for phase in phases_of(run, torch.device("cpu"), 100)] == [
        ("begin", 100, 100),
        ("enter 0", 100, 6100),
        ("leave 0", 1100, 1100),
        ("returned", 100, 100),
    ]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU beside the CPU")
def test_devices_are_counted_apart():
    def run():
        return torch.empty(X, device=DEVICE), torch.empty(Y, dtype=torch.uint8, device="cpu")

    assert peak_bytes(run, DEVICE) == 4 * X
    assert peak_bytes(run, "cpu") == Y
