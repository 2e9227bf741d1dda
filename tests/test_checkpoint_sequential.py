"""checkpoint_sequential cuts a chain anywhere, and checkpoints every segment."""

import copy

import pytest
import torch
from checkpoints import same, step
from support import DEVICE, randn
from torch import nn

from fusedckpt import checkpoint_sequential
from fusedckpt.memory import saved_tensors
from fusedckpt.policies import balanced


def chain(count=7):
    parts = [nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU()]
    return nn.Sequential(*(copy.deepcopy(parts[i % 5]) for i in range(count))).to(DEVICE)


@pytest.mark.parametrize("segments", [1, 2, 3, 7, "sqrt", [], [2], [1, 2, 6], range(1, 7), (3,)])
def test_sequential(segments):
    model, x = chain(), randn(4, 6)
    found, expected = (
        [*step(call, x * 1, parameters=model.parameters()), *copy.deepcopy(model).buffers()]
        for call in (lambda x: checkpoint_sequential(model, segments, x), model)
        if model.apply(lambda m: m.reset_running_stats() if hasattr(m, "momentum") else None)
    )
    assert all(map(same, found, expected))


@pytest.mark.parametrize(
    ("segments", "lengths"), [(1, [7]), (3, [2, 2, 3]), ([1, 5], [1, 4, 2]), (7, [1] * 7)]
)
def test_sequential_checkpoints_every_segment(segments, lengths):
    x = randn(4, 6)
    with saved_tensors() as saved:
        checkpoint_sequential([lambda x: x.sin().sin()] * 7, segments, x * 1)
    assert saved.nbytes == len(lengths) * x.nbytes


def test_sequential_balances_bytes():
    small, large = (lambda x: x.sin()), (lambda x: x.sin().sin().sin().sin().sin().sin())
    x = randn(4, 6)
    with saved_tensors() as saved:
        checkpoint_sequential([large, *[small] * 8], "sqrt", x * 1)
    assert saved.nbytes == len(balanced([6, *[1] * 8])) * x.nbytes
    assert balanced([6, *[1] * 8]) == [0, 1, 7]


def test_sequential_hands_on_anything():
    def split(x):
        return {"a": x.sin(), "b": (x.cos(), None, "s")}

    def merge(parts):
        assert parts["b"][1:] == (None, "s")
        return (parts["a"] * parts["b"][0]).sin()

    def run(x):
        return checkpoint_sequential([split, merge, split, merge], 4, x)

    x = randn(4)
    assert all(map(same, step(run, x), step(lambda x: merge(split(merge(split(x)))), x)))


def test_sequential_cut_before_what_writes_its_input():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)).to(DEVICE)
    checkpoint_sequential(model, [2], randn(4, 6)).sum().backward()
    y = checkpoint_sequential(model, [1], randn(4, 6))
    with pytest.raises(RuntimeError, match="an argument was changed in place"):
        y.sum().backward()


def test_sequential_without_gradients():
    model, x = chain(), randn(4, 6)
    with torch.no_grad():
        y = checkpoint_sequential(model.eval(), "sqrt", x)
    assert torch.equal(y, model(x))


@pytest.mark.parametrize("segments", [0, 8, -1, 2.0, "cubic", [0, 2], [3, 2], [7], None, ["1"]])
def test_sequential_refuses(segments):
    with pytest.raises(ValueError, match="checkpoint_sequential: segments must be 1 to 7"):
        checkpoint_sequential(chain(), segments, randn(4, 6))


def test_sequential_refuses_what_cannot_be_called():
    with pytest.raises(
        TypeError, match="checkpoint_sequential: expected something to call, got int"
    ):
        checkpoint_sequential([torch.sin, 3], 1, randn(4))
