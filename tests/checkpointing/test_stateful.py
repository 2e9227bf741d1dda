"""Errors of recomputes that find an argument as the forward left it, such as a cache."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError

from fusedckpt import checkpoint, checkpoint_sequential

LINEAR = nn.Linear(6, 6).to(DEVICE)


class Cache:
    """Keys of layers, as transformers' DynamicCache has them."""

    def __init__(self):
        self.layers = [SimpleNamespace(keys=None)]

    def update(self, keys):
        (layer,) = self.layers
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys])
        return layer.keys


def attend(x, keys, bias):
    # the scores' bias is of the forward's length
    return (LINEAR(x) @ keys.t() + bias).softmax(-1) @ keys


def of_object(x, bias, past=None):
    return attend(x.sin(), past.update(x.cos()), bias)


def of_dict(x, bias, past=None):
    past["keys"] = torch.cat([past["keys"], x.cos()]) if "keys" in past else x.cos()
    return attend(x.sin(), past["keys"], bias)


def of_list(x, bias, past=None):
    past.append(x.cos())
    return attend(x.sin(), torch.cat(past), bias)


CACHES = {
    "object": (of_object, Cache, "Cache"),
    "dict": (of_dict, dict, "dict"),
    "list": (of_list, list, "list"),
    "nested": (lambda x, bias, past: of_object(x, bias, past[0]), lambda: (Cache(),), "Cache"),
}


@pytest.mark.parametrize("debug", [False, True, "samples"])
@pytest.mark.parametrize("is_keyword", [False, True])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_grew_is_named(name, is_keyword, debug):
    fn, make, kind = CACHES[name]
    x, bias, past = randn(3, 6), torch.zeros(3, 3, device=DEVICE), make()
    run = partial(checkpoint, fn, x, bias, debug=debug)
    y = run(past=past) if is_keyword else run(past)
    place = "past" if is_keyword else "argument 2"
    with pytest.raises(CheckpointError, match=rf"{place} \({kind}\) holds tensors.*cache"):
        y.sum().backward()


def test_a_cache_that_grew_in_a_mismatch_is_named():
    """No operation fails, and the saved tensors have other shapes."""
    past = Cache()
    y = checkpoint(lambda x, past: past.update(x.sin()).cos().sum(), randn(3, 6), past)
    with pytest.raises(CheckpointError, match=r"different metadata.*argument 1 \(Cache\)"):
        y.backward()


def test_a_cache_that_no_argument_holds():
    past, bias = Cache(), torch.zeros(3, 3, device=DEVICE)
    y = checkpoint(lambda x: of_object(x, bias, past), randn(3, 6))
    with pytest.raises(CheckpointError, match="recompute raised RuntimeError: The size of tensor"):
        y.sum().backward()


def test_other_errors_are_as_ever():
    failing, x = [], randn(3, 6)

    def fail(x, config):
        if failing:
            raise failing[0]
        return x.sin().cos()

    config = SimpleNamespace(width=6, names=["a"], tensor=x)
    for error in (TypeError("no"), torch.OutOfMemoryError("no"), KeyError("no")):
        failing.clear()
        y = checkpoint(fail, x, config)
        failing.append(error)
        with pytest.raises(type(error), match="no") as caught:
            y.sum().backward()
        assert caught.value is error


def test_in_a_chain():
    past = Cache()
    bias = torch.zeros(3, 3, device=DEVICE)
    fns = [torch.sin, lambda x: of_object(x, bias, past), torch.cos]
    y = checkpoint_sequential(fns, 1, randn(3, 6))
    with pytest.raises(CheckpointError, match="recompute raised RuntimeError"):
        y.sum().backward()
