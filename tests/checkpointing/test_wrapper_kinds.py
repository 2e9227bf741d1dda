"""Checkpoint around modules of any kind, and copies of it."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from checkpoints import same, step
from support import DEVICE, randn
from torch import nn

from fusedckpt import Checkpoint


class Child(nn.Module):
    """It knows its parent by a weak reference."""

    def __init__(self, parent):
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x):
        return x * self.parent().factor


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.child = 2.0, Child(self)

    def forward(self, x):
        return self.child(x)


class Locked(nn.Linear):
    """It copies without its lock."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.lock = threading.Lock()


def recompiled():
    graph = torch.fx.symbolic_trace(nn.Linear(6, 6))
    wrapped = Checkpoint(graph)
    wrapped.recompile()
    return wrapped


KINDS = {
    "parent": lambda: Checkpoint(Parent()),
    "locked": lambda: Checkpoint(Locked(6, 6)),
    "weight_norm": lambda: Checkpoint(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
    "fx": recompiled,
    "script": lambda: Checkpoint(torch.jit.script(nn.Linear(6, 6))),
    "forward replaced": lambda: Checkpoint(replaced()),
}


def replaced():
    block = nn.Linear(6, 6)
    block.forward = torch.sin
    return block


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_of_any_kind(kind):
    wrapped = KINDS[kind]().to(DEVICE)
    x = randn(4, 6)
    expected = step(wrapped._checkpoint_wrapped_module, x)
    for module in (wrapped, wrapped._replicate_for_data_parallel()):
        assert all(map(same, step(module, x), expected))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("parent", "script")])
def test_copies_of_any_kind(kind):
    wrapped = KINDS[kind]()
    other = torch.optim.swa_utils.AveragedModel(wrapped).module
    assert type(other) is Checkpoint
    kind = type(copy.deepcopy(wrapped._checkpoint_wrapped_module))
    assert type(other._checkpoint_wrapped_module).__name__ == kind.__name__
    x = randn(4, 6).cpu()
    assert all(map(same, step(other, x), step(wrapped, x)))
