"""fuse: what is left as it is, with the reason."""

import types
from collections import OrderedDict

import pytest
import torch
from support import DEVICE
from swap_cases import D, kinds, rows
from torch import nn
from torch.nn.utils import parametrize

import fusedckpt
from fusedckpt import fuse, unfuse


class MyLinear(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class MyGELU(nn.GELU):
    def forward(self, input):
        return super().forward(input) * 2


class MySequential(nn.Sequential):
    def forward(self, input):
        return super().forward(input) * 2


class MyRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) * 2


class MyLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input) * 2


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Computing(nn.Module):
    """Layers of a list and an activation, and what a function makes of these and the input."""

    def __init__(self, compute, *linears):
        super().__init__()
        self.fcs, self.act, self.compute = nn.ModuleList(linears), nn.GELU(), compute

    def forward(self, x):
        return self.compute(x, self.act, *self.fcs)


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(D, D) for _ in range(count)]


def outer_thirds(x, act, packed, down):
    gate, _, up = packed(x).chunk(3, -1)
    return down(act(gate) * up)


def many(x, act, *linears):
    for linear in linears:
        x = act(linear(x))
    return x


def scaled() -> nn.Module:
    model = Computing(lambda x, act, a, b: b(act(a(x))), *linears(2))
    model.scale = nn.Parameter(torch.ones(()))
    return model


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


def parametrized(model: nn.Module, name: str = "") -> nn.Module:
    parametrize.register_parametrization(model.get_submodule(name), "weight", Double())
    return model


def with_attribute_save() -> nn.Sequential:
    model = pair()
    model.save = "mine"  # type: ignore[assignment]
    return model


def with_child_save() -> nn.Sequential:
    return nn.Sequential(OrderedDict(fc=nn.Linear(D, D), act=nn.GELU(), save=nn.Tanh()))


def with_offset() -> nn.Module:
    model = nn.RMSNorm(D)
    model.offset = 1.0  # type: ignore[assignment]
    return model


def sparse() -> nn.Sequential:
    weight = nn.Parameter(torch.eye(D, dtype=torch.float64).to_sparse_csr(), requires_grad=False)
    model = pair(nn.Linear(D, D, bias=False))
    model[0].weight = weight
    return model


WATCHED = "it has a hook, or its forward was replaced"
OWN = "is a subclass of torch's with its own forward"
NO_ACTIVATION = "is no activation that can be fused"
DECLINED = {
    "forward hook on the linear": (lambda: hooked(0, "register_forward_hook"), WATCHED),
    "backward hook on the linear": (lambda: hooked(0, "register_full_backward_hook"), WATCHED),
    "backward pre-hook": (lambda: hooked(0, "register_full_backward_pre_hook"), WATCHED),
    "forward hook on the activation": (lambda: hooked(1, "register_forward_hook"), WATCHED),
    "pre-hook on the activation": (lambda: hooked(1, "register_forward_pre_hook"), WATCHED),
    "backward hook on the activation": (lambda: hooked(1, "register_full_backward_hook"), WATCHED),
    "pre-hook on the linear": (lambda: hooked(0, "register_forward_pre_hook"), WATCHED),
    "subclass of Linear": (
        lambda: pair(MyLinear(D, D)),
        "0 is a MyLinear, a linear with its own forward",
    ),
    "subclass of an activation": (lambda: pair(None, MyGELU()), "MyGELU(approximate='none') is no"),
    "subclass of Sequential": (lambda: MySequential(*pair()), "a subclass of nn.Sequential"),
    "subclass of RMSNorm": (lambda: MyRMSNorm(D), f"MyRMSNorm {OWN}"),
    "subclass of LayerNorm": (lambda: MyLayerNorm(D), f"MyLayerNorm {OWN}"),
    "parametrized linear": (
        lambda: parametrized(pair(), "0"),
        "0: its weights are parametrized",
    ),
    "parametrized norm": (
        lambda: parametrized(nn.RMSNorm(D)),
        "ParametrizedRMSNorm: its weights are parametrized",
    ),
    "LeakyReLU(0.2)": (lambda: pair(None, nn.LeakyReLU(0.2)), NO_ACTIVATION),
    "Softplus(beta=2)": (lambda: pair(None, nn.Softplus(beta=2)), NO_ACTIVATION),
    "Softplus(threshold=1)": (lambda: pair(None, nn.Softplus(threshold=1)), NO_ACTIVATION),
    "Softmax": (lambda: pair(None, nn.Softmax(-1)), NO_ACTIVATION),
    "replaced forward of the linear": (lambda: replaced(pair(), "0"), WATCHED),
    "of the activation": (lambda: replaced(pair(), "1"), WATCHED),
    "of the Sequential": (lambda: replaced(pair()), "the forward of the Sequential was replaced"),
    "of a norm": (lambda: replaced(nn.LayerNorm(D)), "the forward of the LayerNorm was replaced"),
    "attribute in the way": (with_attribute_save, "Sequential has an attribute save already"),
    "child in the way": (with_child_save, "the Sequential has an attribute save already"),
    "norm's attribute": (with_offset, "the RMSNorm has an attribute offset already"),
    "input as it is": (lambda: Computing(lambda x, *_: x, *linears(2)), "it returns its input"),
    "no activation": (
        lambda: Computing(lambda x, _, a, b: b(a(x)), *linears(2)),
        "it has no activation between its linears",
    ),
    "thirds of a weight": (
        lambda: Computing(outer_thirds, nn.Linear(D, 3 * D), nn.Linear(D, D)),
        "its gate and up are not consecutive halves of one weight",
    ),
    "five linears": (
        lambda: Computing(many, *linears(5)),
        "its layers and parameters do not form an MLP: fcs.0, fcs.1, fcs.2, fcs.3, fcs.4",
    ),
    "two linears and a scale": (
        scaled,
        "its layers and parameters do not form an MLP: fcs.0, fcs.1, scale",
    ),
    "sparse weight": (sparse, "weight must be a dense tensor, got layout torch.sparse_csr"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("make", "reason"), DECLINED.values(), ids=list(DECLINED))
def test_left_with_a_reason(make, reason):
    model = make().to(DEVICE, torch.float64)
    before, x = kinds(model), rows()
    expected = model(x)
    # at this level nothing is recomputed
    report = fuse(model, save="preact")
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
    assert fuse(lazy).left == {
        "0": "its parameters are not initialised: call the model once before"
    }


def test_one_misfit_keeps_its_sequential_but_no_other():
    good = pair(nn.Linear(4, 4))
    misfit = pair(nn.Linear(D, D, dtype=torch.complex64), nn.Tanh())
    bad = nn.Sequential(*misfit, nn.Dropout(), *pair())
    report = fuse(nn.ModuleList([good, bad, nn.Sequential(nn.RMSNorm(D), *bad[:2])]))
    assert sorted(report.swapped) == ["0.0", "2.0"]
    assert list(report.left) == ["1.0", "1.3", "2.1"]
    assert len(set(report.left.values())) == 1
    assert type(bad) is nn.Sequential


def test_norm_is_swapped_where_its_block_is_not():
    model = MySequential(nn.LayerNorm(D), *pair(), nn.Linear(D, D))
    report = fuse(model)
    assert report.swapped == {"0": "nn.LayerNorm -> LayerNorm"}
    assert report.left == {"1": "MySequential is a subclass of nn.Sequential with its own forward"}


def test_what_lies_apart_is_not_mentioned():
    layers = (nn.Conv1d(D, D, 1), nn.GELU(), nn.Flatten(), nn.Linear(D, D), nn.ModuleList(pair()))
    model = nn.Sequential(*layers)
    model.add_module("absent", None)
    assert fuse(model) == fusedckpt.FuseReport()
