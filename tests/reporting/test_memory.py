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
from fusedckpt.memory import peak_bytes, saved_tensors

# rows, in and out features, and the bytes of a float32 matrix of each; the allocator of a GPU
# rounds up to 512 bytes
R, K, N = 32, 64, 96
X, W, Y = 4 * R * K, 4 * N * K, 4 * R * N


def given(*shape: int) -> torch.Tensor:
    """Draw a tensor that needs no gradient."""
    return randn(*shape, requires_grad=False)


def intermediate(*shape: int) -> torch.Tensor:
    return randn(*shape).exp()


def test_linear_keeps_its_input():
    x, layer = intermediate(R, K), nn.Linear(K, N, device=DEVICE)
    with saved_tensors() as saved:
        layer(x)
    # weight.t(), a view of a parameter, is kept as well
    assert saved.nbytes == X


def test_leaves_are_not_counted():
    x, w = randn(R, K), randn(N, K)
    with saved_tensors() as saved:
        (x @ w.t()).exp()
    assert saved.nbytes == Y


def test_frozen_parameters_are_not_counted():
    layer = nn.Linear(K, N, device=DEVICE).requires_grad_(False)
    x = intermediate(R, K)
    with saved_tensors() as saved:
        y = layer(x)
    assert y.requires_grad
    assert saved.nbytes == 0
    # a plain tensor is
    with saved_tensors() as saved:
        F.linear(x, layer.weight.detach().clone())
    assert saved.nbytes == W


def test_excluded_tensors_are_not_counted():
    x, layer = given(R, K), nn.Linear(K, N, device=DEVICE)
    with saved_tensors() as saved:
        layer(x)
    assert saved.nbytes == X
    with saved_tensors(exclude=[x]) as saved:
        layer(x)
        # a view of it
        layer(x[: R // 2])
    assert saved.nbytes == 0


def test_a_shared_storage_counts_once():
    x = intermediate(R, K)
    with saved_tensors() as saved:
        x.sin()
        x.cos()
        x.t().exp2()
        x[0].tanh()
    # sin and cos keep x, exp2 and tanh what they return
    assert saved.nbytes == X + X + 4 * K


def test_a_view_counts_its_whole_storage():
    x = intermediate(R, K)
    with saved_tensors() as saved:
        x[0].sin()
    assert saved.nbytes == X


def test_what_was_freed_is_not_mistaken_for_what_came_after():
    x = intermediate(R, K)
    with saved_tensors() as saved:
        for _ in range(32):
            # each result is freed before the next is made, whose storage takes its address
            x.exp()
    assert saved.nbytes == 32 * X


def test_nothing_is_kept_without_gradients():
    x, layer = intermediate(R, K), nn.Linear(K, N, device=DEVICE)
    with saved_tensors() as saved, torch.no_grad():
        layer(x).exp()
    with saved_tensors() as saved:
        given(R, K).exp()
    assert saved.nbytes == 0


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


def test_a_checkpoint_inside_keeps_its_input():
    x, layer = intermediate(R, K), nn.Linear(K, N, device=DEVICE)
    with saved_tensors() as saved:
        checkpoint(lambda x: layer(x).exp().exp(), x, use_reentrant=False)
    assert saved.nbytes == X
    with saved_tensors() as saved:
        layer(x).exp().exp()
    assert saved.nbytes == X + 2 * Y


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


@pytest.mark.parametrize(("backend", "peak"), [("native", 600), ("cudaMallocAsync", 1024)])
def test_what_a_gpu_was_asked_for_counts(monkeypatch, backend, peak):
    """Not the blocks that the allocator took, whose sizes depend on what ran before."""
    stats = {
        f"{count}_bytes.all.{when}": value
        for count, values in (("requested", (100, 700)), ("allocated", (512, 1536)))
        for when, value in zip(("current", "peak"), values, strict=True)
    }
    called = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(memory, "open_workspaces", lambda device: called.append("open"))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: called.append(name))
    assert peak_bytes(lambda: called.append("fn"), "cuda:0") == peak
    assert called == ["open", "synchronize", "reset_peak_memory_stats", "fn", "synchronize"]


def test_workspaces_are_there_before_anything_is_counted(monkeypatch):
    """In the thread of the forward and in that of the backward; a CPU has none."""
    with torch.no_grad():
        memory.open_workspaces(DEVICE)
    called = []
    monkeypatch.setattr(memory, "open_workspaces", called.append)
    memory.profiled(lambda: called.append("fn"), "cuda:0")
    memory.profiled(lambda: None)
    assert called == ["cuda:0", "fn"]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU beside the CPU")
def test_devices_are_counted_apart():
    def run():
        return torch.empty(X, device=DEVICE), torch.empty(Y, dtype=torch.uint8, device="cpu")

    assert peak_bytes(run, DEVICE) == 4 * X
    assert peak_bytes(run, "cpu") == Y
