"""A Sequential whose layers were hooked, replaced or edited."""

from __future__ import annotations

import pytest
import torch
from sequentials import assert_as_torch, kinds, mlp, sequential
from support import DEVICE, saved_bytes
from swap_cases import D, F, assert_equal, rows
from torch import nn
from torch.nn.utils import parametrize

from fusedckpt import Sequential

HOOKS = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("index", range(4))
def test_hooks_on_a_child_fire(index, register):
    model, seen = sequential(nn.LayerNorm(D), *mlp()), []
    handle = getattr(model[index], register)(lambda *_: seen.append(index))
    expected = [
        "layer mlp",
        "layer layer layer layer",
        "norm_linear layer layer",
        "layer linear_act layer",
    ]
    assert kinds(model) == expected[index]
    assert_as_torch(model)
    # ours and nn.Sequential's
    assert seen == [index] * 2
    handle.remove()
    assert kinds(model) == "mlp"
    assert_as_torch(model)
    assert len(seen) == 2
    # and change results
    model[index].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model[index].register_forward_hook(lambda _, args, y: y * 3)
    model[index].register_full_backward_hook(lambda _, dx, dy: (dx[0] / 2,))
    assert_as_torch(model)


def test_hooks_on_all_modules_change_nothing():
    model, seen = sequential(*mlp(), nn.Dropout(0.0)), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        assert saved_bytes(model, [rows()]) == 8 * 5 * D
    finally:
        handle.remove()
    assert seen == [model[3], model]


@pytest.mark.parametrize("index", range(4))
def test_changed_child(index):
    """By a forward or a parametrization of its own, or by a hook that makes its weight."""

    class Double(nn.Module):
        def forward(self, w):
            return w * 2

    model, x = sequential(nn.LayerNorm(D), *mlp()), rows()
    expected = model(x)
    model[index].forward = lambda x, child=model[index]: type(child).forward(child, x) * 2
    assert_as_torch(model, x)
    assert not torch.allclose(model(x), expected)
    del model[index].forward
    if index == 2:
        index = 1
    parametrize.register_parametrization(model[index], "weight", Double())
    assert kinds(model) != "mlp"
    assert_as_torch(model)
    parametrize.remove_parametrizations(model[index], "weight")
    assert kinds(model) == "mlp"
    assert_as_torch(model)


def test_child_replaced_after_construction():
    model, x = sequential(*mlp()), rows()
    before = model(x)
    model[1].approximate = "tanh"
    assert_as_torch(model, x)
    assert not torch.equal(model(x), before)
    for activation, runs_as in {
        nn.SiLU(): "mlp",
        nn.Softmax(-1): "layer layer layer",
        nn.LeakyReLU(0.3): "layer layer layer",
        nn.LeakyReLU(): "mlp",
        type("MyGELU", (nn.GELU,), {})(): "layer layer layer",
    }.items():
        model[1] = activation
        assert kinds(model) == runs_as
        assert_as_torch(model)
    model[1].forward = None
    model[1], model[2] = nn.Tanh(), type("MyLinear", (nn.Linear,), {})(F, 3)
    model.to(DEVICE, torch.float64)
    assert kinds(model) == "linear_act layer"
    assert_as_torch(model)


def test_edited_like_a_list():
    model = sequential(*mlp())
    model.append(nn.Tanh()).insert(0, nn.RMSNorm(D))
    model.extend([nn.LayerNorm(D), nn.Linear(D, 3)]).to(DEVICE, torch.float64)
    assert kinds(model) == "mlp layer norm_linear"
    assert_as_torch(model)
    del model[2]
    model[1] = nn.Linear(D, F)
    model.to(DEVICE, torch.float64)
    assert kinds(model) == "norm_linear linear_act norm_linear"
    assert_as_torch(model)
    model.pop(0)
    assert_as_torch(model)


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_slices_and_single_layers(save):
    model = sequential(nn.LayerNorm(D), *mlp(), save=save)
    for part in (slice(1, 3), slice(1, None), slice(None, 2), slice(None), slice(0, 0)):
        assert type(model[part]) is Sequential
        assert model[part].save == save
        assert list(model[part]) == list(model)[part]
        assert_as_torch(model[part])
    for index, kind in enumerate((nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear)):
        assert type(model[index]) is kind
    assert_equal(model + nn.Sequential(nn.Tanh()), nn.Sequential(*model, nn.Tanh()), rows())


def test_none_child():
    model = sequential(*mlp())
    model.add_module("absent", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        model(rows())
