"""Containers with a behavior of their own are put back by a trial, and are left alone if equal."""

import copy
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass

import pytest
import torch
from support import DEVICE, randn
from torch import nn

import fusedckpt
from fusedckpt.reporting.trial import aliased, tensors_of, trial


def refuse(self, *args, **kwargs):
    raise TypeError("read-only")


_NAMES = """
    __setitem__ __delitem__ __ior__ __iadd__ add append appendleft clear difference_update discard
    extend insert move_to_end pop popitem remove reverse setdefault sort subtract update
"""
WRITES = _NAMES.split()


def read_only(base):
    """Return a subclass that refuses every write, as diffusers' FrozenDict does."""
    return type(f"ReadOnly{base.__name__}", (base,), dict.fromkeys(WRITES, refuse))


def telling(base, calls):
    """Return a subclass that notes every write."""

    def noted(name):
        def write(self, *args, **kwargs):
            calls.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return write

    names = [name for name in WRITES if hasattr(base, name)]
    return type(f"Telling{base.__name__}", (base,), {name: noted(name) for name in names})


def filled(kind):
    """Return a container of a class with three items, without calling the class's own methods."""
    base = next(
        x for x in (OrderedDict, defaultdict, dict, list, deque, set) if issubclass(kind, x)
    )
    made = base.__new__(kind)
    if base is defaultdict:
        defaultdict.__init__(made, list)
    for i in (3, 1, 2):
        if issubclass(base, dict):
            base.__setitem__(made, i, str(i))
        else:
            (base.add if base is set else base.append)(made, i)
    return made


BASES = [dict, OrderedDict, defaultdict, Counter, list, deque, set]


class Keeper(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held, self.body = held, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        return self.body(x) * len(self.held)


def contents(container):
    return list(container.items()) if isinstance(container, dict) else list(container)


@pytest.mark.parametrize("base", BASES)
def test_equal_containers_are_not_touched(base):
    calls = []
    for kind in (read_only(base), telling(base, calls)):
        held = filled(kind)
        model, x, before = Keeper(held).to(DEVICE), randn(2, 4), contents(held)
        calls.clear()
        fusedckpt.report(model, x)
        fusedckpt.plan(model, x, policy="memory", progress=False)
        assert model.held is held
        assert contents(held) == before
        assert not calls


@pytest.mark.parametrize("base", BASES)
def test_changed_containers_are_put_back_without_their_own_methods(base):
    calls = []
    for kind in (read_only(base), telling(base, calls)):
        held = filled(kind)
        held.note = "mine"
        model, before = Keeper(held), contents(held)
        with trial(model):
            # in place, in order, and beside the items
            base.clear(held)
            held.note = "other"
            held.more = 1
            calls.clear()
        assert contents(held) == before
        assert vars(held) == {"note": "mine"}
        assert not calls
        with trial(model):
            if issubclass(base, dict):
                base.__setitem__(held, 3, base.pop(held, 3))
        assert contents(held) == before


def test_a_trial_that_raises_has_changed_nothing():
    held = {"a": filled(read_only(OrderedDict)), "b": [filled(read_only(list))]}
    model, before = Keeper(held), copy.copy(held)

    def fail():
        OrderedDict.clear(held["a"])
        list.append(held["b"][0], 5)
        del held["b"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), trial(model):
        fail()
    assert held == before
    assert contents(held["a"]) == [(3, "3"), (1, "1"), (2, "2")]
    assert held["b"][0] == [3, 1, 2]


def test_weak_containers_are_put_back_and_hold_nothing():
    class Thing:
        pass

    stays, goes, late = Thing(), Thing(), Thing()
    values = weakref.WeakValueDictionary(stays=stays, goes=goes)
    keys = weakref.WeakKeyDictionary({stays: 1, goes: 2})
    things = weakref.WeakSet([stays, goes])
    model = Keeper([])
    model.values, model.keys, model.things = values, keys, things
    reference = weakref.ref(goes)
    with trial(model):
        del goes
        assert reference() is None
        values["late"] = late
        del values["stays"]
        keys[late] = 3
        keys[stays] = 4
        things.add(late)
    assert dict(values) == {"stays": stays}
    assert dict(keys) == {stays: 1}
    assert set(things) == {stays}


def test_user_dicts_in_attributes_are_put_back():
    class Shared(UserDict):
        pass

    model = Keeper(Shared(a=1))
    with trial(model):
        model.held["b"] = 2
        del model.held["a"]
    assert model.held == {"a": 1}


@dataclass
class Batch:
    x: torch.Tensor
    names: list


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Slotted:
    __slots__ = ("unset", "x")

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    "make", [lambda x: Batch(x, [x]), Frozen, Slotted], ids=["batch", "frozen", "slots"]
)
def test_objects_among_inputs_are_aliased_and_put_back(make):
    leaf = randn(4, 8)
    x = leaf.sin()
    batch, value = make(x), x.detach().clone()
    assert [*tensors_of(batch)] == [x]
    with trial(nn.Identity(), None, batch):
        alias = aliased(batch)
        assert type(alias) is type(batch)
        assert alias is not batch
        assert alias.x.requires_grad
        assert alias.x.is_leaf
        alias.x.sum().backward()
        with torch.no_grad():
            alias.x.mul_(2)
        object.__setattr__(batch, "x", None)
        if isinstance(batch, Batch):
            alias.names.append(3)
            batch.names.clear()
    assert batch.x is x
    assert torch.equal(x, value)
    assert leaf.grad is None
    if isinstance(batch, Batch):
        assert batch.names == [x]
    # the caller's graph lives
    x.sum().backward()


@pytest.mark.parametrize("base", [dict, OrderedDict, defaultdict, list, deque])
def test_read_only_inputs_are_aliased(base):
    held = base.__new__(read_only(base))
    x = randn(4)
    if issubclass(base, dict):
        base.__setitem__(held, "x", x)
    else:
        base.append(held, x)
    alias = aliased(held)
    assert type(alias) is type(held)
    assert alias is not held
    ((*_, tensor),) = contents(alias) if issubclass(base, dict) else [contents(alias)]
    assert tensor is not x
    assert tensor.data_ptr() == x.data_ptr()
    assert contents(held) in ([("x", x)], [x])


def test_an_object_inside_itself_is_looked_into_once():
    batch = Batch(randn(3), [])
    batch.names.append(batch)
    assert [*tensors_of(batch)] == [batch.x]
    with trial(nn.Identity(), None, batch):
        assert aliased(batch).x.is_leaf


def test_bytes_of_objects_among_inputs_are_counted():
    class ReadsBatch(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, batch):
            return self.body(batch.x)

    model, x = ReadsBatch().to(DEVICE), randn(64, 8, requires_grad=False)
    assert fusedckpt.report(model, Frozen(x)).input_bytes == x.nbytes
