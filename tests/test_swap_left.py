"""fuse: what is left as it is, with the reason."""

import types

import pytest
import torch
from support import DEVICE
from swap_cases import D, kinds, rows
from torch import nn
from torch.nn.utils import parametrize

import fusedckpt
from fusedckpt import fuse, unfuse


class MyLinear(nn.Linear):
    pass


class MyGELU(nn.GELU):
    pass


class MySequential(nn.Sequential):
    pass


class MyRMSNorm(nn.RMSNorm):
    pass


class MyLayerNorm(nn.LayerNorm):
    pass


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def ignore(*_):
    return None


def pair(linear: nn.Module | None = None, activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(linear or nn.Linear(D, D), activation or nn.GELU())


def hooked(index: int, register: str) -> nn.Sequential:
    model = pair()
    getattr(model[index], register)(ignore)
    return model


def replaced(model: nn.Module, name: str = "") -> nn.Module:
    def forward(self, x):
        return type(self).forward(self, x) * 2

    module = model.get_submodule(name)
    module.forward = types.MethodType(forward, module)
    return model


def used_twice() -> nn.Sequential:
    linear = nn.Linear(D, D)
    return nn.Sequential(nn.Sequential(linear, nn.GELU()), linear)


def parametrized(model: nn.Module, name: str = "") -> nn.Module:
    parametrize.register_parametrization(model.get_submodule(name), "weight", Double())
    return model


def with_own_attribute() -> nn.Sequential:
    model = pair()
    model[0].activation = "mine"
    return model


def sparse() -> nn.Sequential:
    weight = nn.Parameter(torch.eye(D, dtype=torch.float64).to_sparse_csr(), requires_grad=False)
    model = pair(nn.Linear(D, D, bias=False))
    model[0].weight = weight
    return model


BETWEEN = "a hook watches what lies between it and its activation"
NO_ACTIVATION = "is no activation that can be fused"
REPLACED = "its forward was replaced"
DECLINED = {
    "forward hook on the linear": (lambda: hooked(0, "register_forward_hook"), BETWEEN),
    "backward hook on the linear": (lambda: hooked(0, "register_full_backward_hook"), BETWEEN),
    "backward pre-hook": (lambda: hooked(0, "register_full_backward_pre_hook"), BETWEEN),
    "forward hook on the activation": (lambda: hooked(1, "register_forward_hook"), BETWEEN),
    "pre-hook on the activation": (lambda: hooked(1, "register_forward_pre_hook"), BETWEEN),
    "backward hook on the activation": (lambda: hooked(1, "register_full_backward_hook"), BETWEEN),
    "linear in two places": (used_twice, "it is used in several places"),
    "subclass of Linear": (lambda: pair(MyLinear(D, D)), "MyLinear is a subclass of nn.Linear"),
    "subclass of an activation": (lambda: pair(None, MyGELU()), "MyGELU(approximate='none') is no"),
    "subclass of Sequential": (lambda: MySequential(*pair()), "a subclass of nn.Sequential"),
    "subclass of RMSNorm": (lambda: MyRMSNorm(D), "MyRMSNorm is a subclass of nn.RMSNorm"),
    "subclass of LayerNorm": (lambda: MyLayerNorm(D), "MyLayerNorm is a subclass of nn.LayerNorm"),
    "parametrized linear": (lambda: parametrized(pair(), "0"), "ParametrizedLinear is a subclass"),
    "parametrized norm": (lambda: parametrized(nn.RMSNorm(D)), "ParametrizedRMSNorm is a subclass"),
    "LeakyReLU(0.2)": (lambda: pair(None, nn.LeakyReLU(0.2)), NO_ACTIVATION),
    "Softplus(beta=2)": (lambda: pair(None, nn.Softplus(beta=2)), NO_ACTIVATION),
    "Softplus(threshold=1)": (lambda: pair(None, nn.Softplus(threshold=1)), NO_ACTIVATION),
    "Softmax": (lambda: pair(None, nn.Softmax(-1)), NO_ACTIVATION),
    "replaced forward of the linear": (lambda: replaced(pair(), "0"), REPLACED),
    "of the activation": (lambda: replaced(pair(), "1"), "or of its activation was replaced"),
    "of the Sequential": (lambda: replaced(pair()), "the forward of its Sequential"),
    "of a norm": (lambda: replaced(nn.LayerNorm(D)), REPLACED),
    "attribute in the way": (with_own_attribute, "it has an attribute activation of its own"),
    "sparse weight": (sparse, "weight must be a dense tensor, got layout torch.sparse_csr"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("make", "reason"), DECLINED.values(), ids=list(DECLINED))
def test_left_with_a_reason(make, reason):
    model = make().to(DEVICE, torch.float64)
    before, x = kinds(model), rows()
    expected = model(x)
    report = fuse(model)
    assert report.swapped == {}
    assert [reason in found for found in report.left.values()] == [True]
    assert kinds(model) == before
    assert torch.equal(model(x), expected)
    unfuse(model)
    assert kinds(model) == before


def test_dtypes_that_are_not_ours_are_left():
    model = pair(nn.Linear(D, D, dtype=torch.complex64), nn.Tanh())
    assert "must be floating point, got torch.complex64" in fuse(model).left["0"]
    lazy = pair(nn.LazyLinear(D))
    assert fuse(lazy).left == {"0": "LazyLinear is a subclass of nn.Linear"}


def test_what_lies_apart_is_not_mentioned():
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.0), nn.GELU(), nn.ModuleList(pair()))
    model.add_module("absent", None)
    assert fuse(model) == fusedckpt.FuseReport()
