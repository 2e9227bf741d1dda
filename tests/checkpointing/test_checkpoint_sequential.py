"""checkpoint_sequential cuts a sequence of functions anywhere, and checkpoints every segment."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import assert_as_called, assert_same, chain, conv_net, reset, step, stock
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import fusedckpt
from fusedckpt import checkpoint_sequential
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import peak_bytes, saved_tensors

GIVEN = [1, 3, 7, "sqrt", "recursive", [], [1, 2, 6], range(1, 7), np.int64(3), [np.int32(2), 5]]


@pytest.mark.parametrize("segments", GIVEN, ids=str)
@pytest.mark.parametrize("options", [{}, {"debug": True}], ids=["", "debug"])
def test_sequential(segments, options):
    assert_as_called(chain(), segments, randn(4, 6), **options)


@pytest.mark.parametrize(
    ("segments", "lengths"), [(1, [7]), (3, [2, 2, 3]), ([1, 5], [1, 4, 2]), (7, [1] * 7)]
)
def test_checkpoints_every_segment(segments, lengths):
    x = randn(4, 6)
    with saved_tensors() as saved:
        checkpoint_sequential([lambda x: x.sin().sin()] * 7, segments, x * 1)
    assert saved.nbytes == len(lengths) * x.nbytes


class FourSines(nn.Module):
    """It keeps four tensors, none of which is its input."""

    def forward(self, x):
        return x + x.sin().sin().sin().sin()


@pytest.mark.parametrize("exponent", [1, 2, 3, 6, 8])
@pytest.mark.parametrize(("function", "width"), [(torch.sin, 0), (FourSines(), 3)])
def test_recursive_peaks_at_a_logarithm(exponent, function, width):
    """256 layers: 11 tensors, where sqrt takes 33; and 14, where sqrt takes 65."""
    count, x, calls = 2**exponent, randn(1 << 12), []

    def counted(x):
        calls.append(1)
        return function(x)

    def run(segments):
        x.grad = None
        y = checkpoint_sequential([counted] * count, segments, x, preserve_rng_state=False)
        y.backward(dy)

    dy = randn(1 << 12).detach()
    run(count)
    expected = x.grad
    run("recursive")
    assert torch.equal(x.grad, expected)
    calls.clear()
    # a GPU's peak falls by what is freed of before
    x.grad = None
    rise = peak_bytes(lambda: run("recursive"), DEVICE)
    assert rise == (exponent + 3 + width) * x.nbytes
    assert len(calls) <= count * (1 + exponent / 2) + 1
    if count == 256:
        x.grad = None
        assert peak_bytes(lambda: run("sqrt"), DEVICE) == (65 if width else 33) * x.nbytes
        with saved_tensors() as saved:
            checkpoint_sequential([function] * count, "recursive", x * 1)
        assert saved.nbytes == 9 * x.nbytes


def test_recursive_drops_inputs_in_containers():
    """A pair of tensors takes twice what one takes, and no more."""
    x = randn(1 << 12)

    def pair(both):
        return both[0].sin(), both[1].cos()

    def run():
        y = checkpoint_sequential(
            [pair] * 64, "recursive", (x * 1, x * 2), preserve_rng_state=False
        )
        (y[0] + y[1]).backward(dy)

    dy = randn(1 << 12).detach()
    run()
    # (6 + 3) pairs, as above, and the one that they begin with; 64 inputs else
    assert peak_bytes(run, DEVICE) < 2 * 10.5 * x.nbytes


def test_options_are_those_of_checkpoint():
    model, x = chain(), randn(4, 6)
    assert torch.is_tensor(checkpoint_sequential(model, 3, x, False, preserve_rng_state=True))
    with pytest.raises(ValueError, match="use_reentrant=True"):
        checkpoint_sequential(model, 3, x, use_reentrant=True)
    with pytest.raises(ValueError, match="checkpoint_sequential: unknown options chunks, debugs"):
        checkpoint_sequential(model, 3, x, debugs=True, chunks=2)


@pytest.mark.parametrize("segments", [9, 4, "sqrt", "recursive"])
def test_compiles(segments):
    torch._dynamo.reset()
    model, x = conv_net()[:9].eval().to(DEVICE), randn(2, 3, 8, 8)
    run = partial(checkpoint_sequential, model, segments)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    expected = step(model, x, parameters=model.parameters())
    torch.testing.assert_close(step(compiled, x, parameters=model.parameters()), expected)


def test_hands_on_anything():
    def split(x):
        return {"a": x.sin(), "b": (x.cos(), None, "s")}

    def merge(parts):
        assert parts["b"][1:] == (None, "s")
        return (parts["a"] * parts["b"][0]).sin()

    def run(x, segments):
        return checkpoint_sequential([split, merge, split, merge], segments, x)

    x = randn(4)
    expected = step(lambda x: merge(split(merge(split(x)))), x)
    for segments in (4, "sqrt", "recursive"):
        assert_same(step(partial(run, segments=segments), x), expected)


class WritesInput(nn.Module):
    """It writes its input, and then saves more."""

    def __init__(self, number=6):
        super().__init__()
        self.linear = nn.Linear(number, number)

    def forward(self, x):
        return self.linear(x.relu_()).sin()


def twice(x):
    return x.mul_(2)


def written():
    """Chains in which segments of some number start with what writes its input."""
    linear = partial(nn.Linear, 6, 6)
    return {
        "relu": [linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True), linear()],
        "functions": [linear(), twice, torch.sin, torch.Tensor.relu_, linear(), twice],
        "views": [linear(), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.ReLU(inplace=True), linear()],
        "dropout": [linear(), nn.Dropout(inplace=True), nn.BatchNorm1d(6), nn.ReLU(inplace=True)],
        "blocks": [WritesInput(), WritesInput(), WritesInput()],
        "fused": [fusedckpt.MLP(6, 6), twice, fusedckpt.MLP(6, 6), twice, fusedckpt.MLP(6, 6)],
    }


WRITTEN = [(name, k) for name, parts in written().items() for k in range(1, len(parts) + 1)]


def run_in(parts, segments, x, **options):
    """Run functions in segments, None for none, on what is no leaf."""
    reset(nn.ModuleList(part for part in parts if isinstance(part, nn.Module)))
    x = x * 1
    if segments is not None:
        return checkpoint_sequential(parts, segments, x, **options)
    for part in parts:
        x = part(x)
    return x


def assert_as_in_none(name, segments, wrap=lambda fn, x: fn(x), **options):
    parts, x = written()[name], randn(4, 6)
    modules = nn.ModuleList(part for part in parts if isinstance(part, nn.Module)).to(DEVICE)
    runs = partial(run_in, parts, segments, **options), partial(run_in, parts, None)
    with forced_path("aten"):
        found = [step(partial(wrap, run), x, parameters=[*modules.parameters()]) for run in runs]
    assert_same(*found)


@pytest.mark.parametrize(("name", "segments"), WRITTEN)
def test_segments_of_what_writes_its_input(name, segments):
    assert_as_in_none(name, segments)
    assert_as_in_none(name, range(1, segments))


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
AROUND = {
    "debug": {"debug": True},
    "early_stop": {"early_stop": False},
    "context_fn": {"context_fn": SELECTIVE},
    "ours": {"wrap": fusedckpt.checkpoint},
    "torch": {"wrap": stock},
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", written())
def test_options_and_checkpoints_around_what_writes_its_input(name, around):
    assert_as_in_none(name, 4 if len(written()[name]) > 3 else 2, **AROUND[around])


def test_what_writes_its_input_runs_once_in_the_forward():
    """Its result, which it saves, is the next segment's input."""
    x, calls = randn(4, 6), []

    def counted(function, x):
        calls.append(function)
        return function(x)

    parts = [partial(counted, f) for f in (torch.sin, torch.relu_) * 3]
    with saved_tensors() as saved:
        y = checkpoint_sequential(parts, 6, x * 1)
    assert len(calls) == 6
    # of each sine: its input, and the ReLU's result, which is the next one's input
    assert saved.nbytes == 4 * x.nbytes
    y.sum().backward(retain_graph=True)
    # no function runs again: relu saves its result, sin its input
    assert len(calls) == 6
    first, x.grad = x.grad, None
    y.sum().backward()
    assert torch.equal(x.grad, first)


def test_what_passes_through_is_not_kept():
    """A mask goes through all functions: what the functions save is dropped after the first."""
    x, mask = randn(1 << 12), torch.ones(1 << 12, device=DEVICE)

    def part(both):
        return both[0].sin().sin().sin() * both[1], both[1]

    def run():
        checkpoint_sequential([part] * 8, 1, (x * 1, mask))

    run()
    # 8 functions save 32
    assert peak_bytes(run, DEVICE) < 7 * x.nbytes


def test_what_was_saved_and_written_since_raises():
    """As without a checkpoint."""
    x, w = randn(4, 6), randn(4, 6)

    def multiply(x):
        x.mul_(w)
        y = x * w
        x.add_(1)
        return y

    y = checkpoint_sequential([torch.sin, multiply], 2, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("segments", [3, "sqrt", "recursive"])
def test_without_gradients(segments):
    model, x = chain(), randn(4, 6)
    with torch.no_grad():
        y = checkpoint_sequential(model.eval(), segments, x)
    assert torch.equal(y, model(x))
    found = torch.func.vmap(partial(checkpoint_sequential, model, segments))(x[:, None])
    torch.testing.assert_close(found[:, 0], model(x))
    if isinstance(segments, str):
        assert checkpoint_sequential([], segments, x) is x


@pytest.mark.parametrize(
    "segments", [0, 8, 2.0, "cubic", [0, 2], [3, 2], [7], [False], None, ["1"]]
)
def test_refuses(segments):
    with pytest.raises(ValueError, match="segments must be an integer from 1 to 7, ascending"):
        checkpoint_sequential(chain(), segments, randn(4, 6))


def test_refuses_what_cannot_be_called():
    with pytest.raises(TypeError, match=r"functions\[1\] must be callable, got int"):
        checkpoint_sequential([torch.sin, 3], 1, randn(4))
    with pytest.raises(
        TypeError, match=r"functions must be an nn\.Sequential or a list, got Linear"
    ):
        checkpoint_sequential(torch.nn.Linear(4, 4), 1, randn(4))
