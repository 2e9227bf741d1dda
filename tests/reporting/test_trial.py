"""A trial leaves no trace: values, gradients, buffers, optimizer, random state, containers."""

import copy
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from support import DEVICE, randn
from torch import nn

from fusedckpt.reporting import trial as trials
from fusedckpt.reporting.trial import Copies, aliased, trial


class ChangesEverything(nn.Module):
    """Everything that a step changes without being asked to."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.again = self.body[0]
        self.unused = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.calls = 0

    def forward(self, x):
        y = self.again(self.body(x)) * random.random() * np.random.rand()
        self.steps += 1
        # another tensor than before
        self.mean = self.mean + y.detach().mean(0)
        self.calls += 1
        self.activation = y
        self.train(False)
        return y


def noisy():
    """Return a model in the middle of its training: some gradients, others None."""
    model = ChangesEverything().to(DEVICE)
    model(randn(16, 8)).square().sum().backward()
    model.train()
    del model.activation
    return model


def contents(model):
    """Return all that must be the same object, and all that must have the same value."""
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer for module in model.modules() for buffer in module._buffers.values()]
    tensors = [*model.parameters(), *gradients, *buffers]
    objects = [*tensors, *(value for module in model.modules() for value in vars(module).values())]
    names = [list(vars(module)) for module in model.modules()]
    values = [None if x is None else x.detach().clone() for x in tensors]
    return names, list(map(id, objects)), values, [module.training for module in model.modules()]


def same(before, after):
    names, objects, values, flags = before
    assert (names, objects, flags) == (after[0], after[1], after[3])
    for old, new in zip(values, after[2], strict=True):
        assert (old is None) == (new is None)
        assert old is None or same_bits(old, new)


def same_bits(old, new):
    """Compare NaN and signed zeros too."""
    return torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8))


def same_state(old, new):
    """Compare what an optimizer holds, in any nesting."""
    if torch.is_tensor(old):
        return same_bits(old, new)
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(same_state(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(map(same_state, old, new))
    # NaN is the same number, but not equal
    return old is new or old == new


def draws():
    """Draw from every random stream, and put the streams back."""
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()
    found = [random.random(), np.random.rand(), torch.rand(()).item()]
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    torch.set_rng_state(streams[2])
    if DEVICE.type == "cuda":
        state = torch.cuda.get_rng_state()
        found.append(torch.rand((), device=DEVICE).item())
        torch.cuda.set_rng_state(state)
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=torch.tensor(0.1), weight_decay=0.1)


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("make", [sgd, adam, torch.optim.LBFGS])
def test_everything_is_put_back(make, used):
    model = noisy()
    optimizer = make(model.parameters())
    x = randn(16, 8)

    def step():
        def closure():
            value = model(x).square().sum()
            value.backward()
            return value

        optimizer.step(closure)
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.stepped = True

    if used:
        step()
        model.train()
        del model.activation, optimizer.stepped
    before, state = contents(model), copy.deepcopy(optimizer.state_dict())
    streams, held = draws(), id(optimizer.param_groups[0])
    with trial(model, optimizer):
        assert all(parameter.grad is None for parameter in model.parameters())
        step()
        assert not torch.equal(before[2][0], model.again.weight)
        assert draws() != streams
    same(before, contents(model))
    assert draws() == streams
    assert same_state(state, optimizer.state_dict())
    assert not hasattr(optimizer, "stepped")
    assert id(optimizer.param_groups[0]) == held


def test_everything_is_put_back_after_an_exception():
    model = noisy()
    optimizer = adam(model.parameters())
    before, streams = contents(model), draws()

    def fail():
        model(randn(16, 8)).sum().backward()
        optimizer.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), trial(model, optimizer):
        fail()
    same(before, contents(model))
    assert draws() == streams
    assert not optimizer.state


def test_only_what_can_change_is_copied(monkeypatch):
    model = noisy()
    copied = []
    to = torch.Tensor.to

    def counted(self, *args, **kwargs):
        if kwargs.get("copy"):
            copied.append(tuple(self.shape))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    buffers = sorted(tuple(buffer.shape) for buffer in model.buffers())
    with trial(model):
        model(randn(16, 8)).sum().backward()
    assert sorted(copied) == buffers
    copied.clear()
    with trial(model, sgd([model.unused.bias])):
        pass
    assert sorted(copied) == sorted([*buffers, (8,)])


def test_what_did_not_change_is_not_written_to():
    model = nn.BatchNorm1d(8).to(DEVICE).eval()
    optimizer, x = sgd(model.parameters()), randn(4, 8)
    tensors = [x, *model.parameters(), *model.buffers()]
    versions = [tensor._version for tensor in tensors]
    with trial(model, optimizer, x):
        model(aliased(x)).sum().backward()
    assert [tensor._version for tensor in tensors] == versions


def test_a_buffer_gets_its_memory_back():
    class AveragedBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.data = self.mean + x.detach().mean(0)
            return x * self.mean

    model = AveragedBuffer().to(DEVICE)
    place = model.mean.data_ptr()
    with trial(model):
        model(randn(2, 4)).sum().backward()
        assert model.mean.any()
    assert model.mean.data_ptr() == place
    assert not model.mean.any()


def test_a_parameter_that_a_hook_writes_to_is_reported():
    """A module's own code would tell that it writes to parameters, which are copied then."""

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fast, self.slow = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.fast(x)

    @torch.no_grad()
    def move(module, _args):
        module.slow.weight.lerp_(module.fast.weight, 0.1)

    model = Momentum().to(DEVICE)
    model.register_forward_pre_hook(move)
    streams = draws()
    lost = pytest.raises(
        RuntimeError, match=r"the step changed slow\.weight, which no optimizer= has"
    )
    with lost, trial(model):
        model(randn(2, 4)).sum().backward()
    assert model.fast.weight.grad is None
    assert draws() == streams
    # not where the optimizer has it: then it is copied
    before = model.slow.weight.clone()
    with trial(model, sgd(model.parameters())):
        model(randn(2, 4)).sum().backward()
    assert torch.equal(model.slow.weight, before)


def test_a_write_without_a_version_is_reported():
    model = nn.Linear(4, 4).to(DEVICE)
    lost = pytest.raises(RuntimeError, match=r"the step changed weight, which no optimizer= has")
    with lost, trial(model):
        model.weight.data.mul_(2.0)
        model(randn(2, 4)).sum().backward()


def test_updates_in_backward_are_put_back():
    """Those of an optimizer of other code, which no argument tells."""

    def update(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model = nn.Linear(4, 4, device=DEVICE)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    before = copy.deepcopy(model.state_dict())
    with trial(model):
        model(randn(2, 4)).sum().backward()
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_replaced_memory_is_put_back():
    model = nn.Linear(4, 4, device=DEVICE)
    address, before = model.weight.data_ptr(), model.weight.detach().clone()
    with trial(model):
        model.weight.data = torch.zeros(4, 4, device=DEVICE)
    assert model.weight.data_ptr() == address
    assert torch.equal(model.weight, before)


def test_inputs_are_put_back():
    expanded = randn(1, 8, requires_grad=False).expand(16, 8)
    weight = nn.Parameter(randn(8))
    inputs = ([randn(4, 8, requires_grad=False)], {"mask": expanded, "weight": weight})
    before = copy.deepcopy(inputs)
    with trial(nn.Identity(), None, inputs):
        (first,), options = aliased(inputs)
        assert options["weight"] is weight
        assert options["mask"].stride() == expanded.stride()
        first.mul_(2)
        options.pop("mask")
        inputs[1]["mask"][:, 0].data[0] = 7.0
        (options["weight"] * 2).sum().backward()
    assert inputs[1].keys() == before[1].keys()
    assert torch.equal(inputs[0][0], before[0][0])
    assert torch.equal(inputs[1]["mask"], before[1]["mask"])
    assert weight.grad is None


def test_aliased_inputs_reach_no_graph_of_the_caller():
    Pair = namedtuple("Pair", "left right")
    x = randn(4)
    y = x.exp()
    left, right = aliased(Pair(y, 3))
    assert right == 3
    assert left.requires_grad
    assert left.is_leaf
    left.sum().backward()
    assert x.grad is None
    # y's graph is still there
    y.sum().backward()
    assert x.grad is not None


def test_copies_stay_on_the_device_while_they_fit(monkeypatch):
    rooms, pinned = [], []
    monkeypatch.setattr(trials, "room_of", lambda *args: rooms.append(args) or 100)
    monkeypatch.setattr(trials, "pinned_copy", lambda tensor: pinned.append(tensor.nbytes))
    copies = Copies(budget=5)
    # of any device but a CPU
    made = [copies.copy(torch.empty(count, device="meta")) for count in (10, 20, 15, 1)]
    assert [copy is not None and copy.device.type for copy in made] == [
        "meta",
        False,
        "meta",
        False,
    ]
    # the device is asked once, for all copies
    assert rooms == [(torch.device("meta"), 5)]
    assert pinned == [80, 4]
    x = torch.randn(3)
    assert torch.equal(copies.copy(x), x)
    assert copies.copy(x).data_ptr() != x.data_ptr()


def test_copies_leave_a_budget_its_room(monkeypatch):
    device = torch.device("cuda", 0)
    sizes = {"memory_allocated": 20, "memory_reserved": 30}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90, 120))
    assert trials.room_of(device, 0) == 20
    # of 80 bytes that may be used, the steps take 50 beyond those in use
    assert trials.room_of(device, 70) == 30
    assert trials.room_of(device, 1000) == 0
    assert trials.room_of(torch.device("cpu"), 0) == 0


def test_copies_fall_back_to_pageable_memory(monkeypatch):
    def refuse(*args, **kwargs):
        assert kwargs["pin_memory"]
        raise RuntimeError("out of pinned memory")

    x = torch.randn(3)
    monkeypatch.setattr(torch, "empty", refuse)
    assert torch.equal(trials.pinned_copy(x), x)
