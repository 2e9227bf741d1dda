"""fuse: MLPs of any class, by their parts and what they compute."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from own_classes import LoraLinear
from support import DEVICE, randn
from swap_cases import assert_equal, results
from torch import nn

from fusedckpt import fuse, saving, unfuse
from fusedckpt.memory import saved_tensors

D, H = 12, 20
CONSTANT = math.sqrt(2 / math.pi)
ACTS = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "mish": nn.Mish,
}


class Written(nn.Module):
    """An activation of a class of its own, its constant to as many digits as it is given."""

    def __init__(self, constant=CONSTANT):
        super().__init__()
        self.constant = constant

    def forward(self, z):
        return 0.5 * z * (1 + torch.tanh(self.constant * z * (1 + 0.044715 * z * z)))


class Conv1D(nn.Module):
    def __init__(self, out, features):
        super().__init__()
        self.nf = out
        self.weight = nn.Parameter(torch.randn(features, out) * features**-0.5)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], self.nf)


class Plain(nn.Module):
    def __init__(self, act=None, linear=nn.Linear, p=None, out=D):
        super().__init__()
        make = linear if linear is not Conv1D else lambda i, o: Conv1D(o, i)
        # in an order that says nothing
        self.second = make(H, out)
        self.act = act or nn.GELU()
        self.first = make(D, H)
        if p is not None:
            self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


class Gated(nn.Module):
    """The activated half is `v`, which stands second."""

    def __init__(self, act=None, bias=False, features=D):
        super().__init__()
        self.w = nn.Linear(features, H, bias)
        self.v = nn.Linear(features, H, bias)
        self.o = nn.Linear(H, features, bias)
        self.act = act or nn.SiLU()

    def forward(self, x):
        return self.o(self.w(x) * self.act(self.v(x)))


class Functional(nn.Module):
    """The first Llama's: no activation module."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(D, H, bias=False)
        self.w2 = nn.Linear(H, D, bias=False)
        self.w3 = nn.Linear(D, H, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Packed(nn.Module):
    def __init__(self, first="gate", bias=True):
        super().__init__()
        self.wi = nn.Linear(D, 2 * H, bias)
        self.wo = nn.Linear(H, D, bias)
        self.act = nn.GELU(approximate="tanh")
        self.first = first

    def forward(self, x):
        a, b = self.wi(x).chunk(2, dim=-1)
        gate, up = (a, b) if self.first == "gate" else (b, a)
        return self.wo(self.act(gate) * up)


class Intermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(D, H)
        self.intermediate_act_fn = F.gelu

    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states))


class DropsInside(Plain):
    def forward(self, x):
        return self.second(self.drop(self.act(self.first(x))))


class DropsBefore(Plain):
    def forward(self, x):
        return self.second(self.act(self.drop(self.first(x))))


class DropsAfter(Plain):
    def forward(self, x):
        return self.drop(super().forward(x))


class Rate(Plain):
    """Whisper's way: a number and a function."""

    dropout = 0.0

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        h = F.dropout(self.act(self.first(x)), self.dropout, self.training)
        return self.second(h)


FOUND = {
    **{f"Plain-{n}": (partial(Plain, a()), f"Plain -> mlp ({n})") for n, a in ACTS.items()},
    "written": (partial(Plain, Written()), "Plain -> mlp (gelu_tanh)"),
    "transposed": (
        partial(Plain, linear=Conv1D),
        "Plain -> mlp (gelu, weights as [in, out])",
    ),
    "other width": (partial(Plain, out=5), "Plain -> mlp (gelu)"),
    "dropout unused": (partial(Plain, p=0.3), "Plain -> mlp (gelu)"),
    "gated": (Gated, "Gated -> gated_mlp (silu)"),
    "gated with biases": (partial(Gated, nn.GELU(), True), "Gated -> gated_mlp (gelu)"),
    "square": (partial(Gated, features=H), "Gated -> gated_mlp (silu)"),
    "no module": (Functional, "Functional -> gated_mlp (silu)"),
    "packed": (Packed, "Packed -> gated_mlp (gelu_tanh, packed, gate first)"),
    "packed, up first": (
        partial(Packed, "up", False),
        "Packed -> gated_mlp (gelu_tanh, packed, up first)",
    ),
    "one linear": (Intermediate, "Intermediate -> linear_act (gelu)"),
}


def is_fused(module, x):
    # torch 2.11 takes the name from a node whose output is gone
    y = module(x)
    name = y.grad_fn.name()
    return name.endswith("Backward") and "Block" in name


@pytest.mark.parametrize(("make", "change"), FOUND.values(), ids=list(FOUND))
@pytest.mark.parametrize("save", ["inputs", "gate", "preact"])
def test_found_and_the_same(make, change, save):
    module = make().to(DEVICE, torch.float64)
    eager = copy.deepcopy(module)
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    features = H if len({child.weight.shape for child in linears}) == 1 < len(linears) else D
    x = randn(2, 3, features, dtype=torch.float64)
    assert fuse(module, save=save).swapped == {"": change}
    assert is_fused(module, x)
    assert_equal(module, eager, x)
    assert type(unfuse(module)) is type(eager)


def test_a_rounded_constant_counts_in_the_modules_own_dtype():
    module = Plain(Written(0.7978845608))
    assert fuse(module).swapped == {"": "Plain -> mlp (gelu_tanh)"}
    report = fuse(unfuse(module).double())
    assert report.swapped == {}
    assert report.left[""].startswith("output: error")


def test_float32_on_every_path(path):
    for make, _ in (FOUND["transposed"], FOUND["packed, up first"], FOUND["gated with biases"]):
        module = make().to(DEVICE)
        eager, x = copy.deepcopy(module), randn(33, D)
        fuse(module)
        assert is_fused(module, x)
        for ours, theirs in zip(results(module, x), results(eager, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def kept(module, x):
    with saved_tensors(exclude=[x]) as saved:
        y = module(x)
    del y
    return saved.nbytes // 8 // x.shape[0]


@pytest.mark.parametrize("make", [FOUND["transposed"][0], FOUND["packed, up first"][0]])
def test_levels_and_transposed_views_keep_what_they_say(make):
    module, x = make().to(DEVICE, torch.float64), randn(4, D, dtype=torch.float64).detach()
    wide = 2 if isinstance(module, Packed) else 1
    report = fuse(module)
    assert kept(module, x) == 0
    with saving("preact"):
        assert kept(module, x) == wide * H
    with saving("gate"):
        assert kept(module, x) == (H if isinstance(module, Packed) else 0)
    assert report.saved[""][1] == 8 * D
    module.save = "preact"
    assert kept(module, x) == wide * H


def test_a_transposed_weight_is_not_copied():
    module, x = FOUND["transposed"][0]().to(DEVICE, torch.float64), randn(4, D, dtype=torch.float64)
    fuse(module)
    with torch.profiler.profile(record_shapes=True) as profiler:
        module(x).sum().backward()
    shapes = {(D, H), (H, D)}
    copies = [
        event.name
        for event in profiler.events()
        if event.name in ("aten::clone", "aten::contiguous", "aten::_to_copy")
        and event.input_shapes
        and tuple(event.input_shapes[0]) in shapes
    ]
    # .grad takes the layout of its weight: that copies each gradient once
    assert len(copies) <= 2


@pytest.mark.parametrize("kind", [DropsBefore, DropsInside, DropsAfter])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_dropout_draws_what_it_did(kind, p):
    module = kind(p=p).to(DEVICE, torch.float64)
    eager, x = copy.deepcopy(module), randn(5, D, dtype=torch.float64)
    assert fuse(module).swapped
    for training in (True, False):
        found = []
        for each in (module.train(training), eager.train(training)):
            torch.manual_seed(3)
            found.append(results(each, x))
        # what the last linear reads is dropped by a seed
        if kind is DropsInside and p and training:
            continue
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # before the activation it is recomputed with its masks
    module.train()
    keeps = kept(module, x.detach())
    if kind is DropsAfter:
        # the mask alone
        assert keeps < H
    else:
        assert keeps == 0


def test_dropout_by_a_number():
    module = Rate(0.4).to(DEVICE, torch.float64)
    eager, x = copy.deepcopy(module), randn(5, D, dtype=torch.float64)
    assert fuse(module).swapped
    for training in (True, False):
        found = []
        for each in (module.train(training), eager.train(training)):
            torch.manual_seed(3)
            found.append(results(each, x))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert is_fused(module, x) == (not training)
    module.train().dropout = 0.0
    assert is_fused(module, x)


def hook(module):
    module.first.register_forward_hook(lambda *_: None)


def replace_linear(module):
    module.second = nn.Sequential(module.second)


def replace_activation(module):
    module.act = nn.ReLU()


def replace_forward(module):
    forward = module.first.forward
    module.first.forward = lambda x: forward(x) * 2


def make_lora(module):
    module.first = LoraLinear(module.first)


@pytest.mark.parametrize(
    "edit", [hook, replace_linear, replace_activation, replace_forward, make_lora]
)
def test_children_changed_after_fuse(edit):
    module = Plain().to(DEVICE, torch.float64)
    eager, x = copy.deepcopy(module), randn(5, D, dtype=torch.float64)
    fuse(module)
    for each in (module, eager):
        torch.manual_seed(0)
        edit(each)
    assert not is_fused(module, x)
    module.requires_grad_(True)
    eager.requires_grad_(True)
    assert_equal(module, eager, x)
    assert type(unfuse(module)) is Plain


def test_other_calls_raise_what_they_did():
    module = Plain().to(DEVICE)
    eager = copy.deepcopy(module)
    fuse(module)
    for args in ((torch.ones(2, D, device=DEVICE).double(),), (None,), (), (1, 2)):
        errors = []
        for each in (module, eager):
            with pytest.raises((RuntimeError, TypeError)) as error:
                each(*args)
            errors.append(type(error.value))
        assert errors[0] is errors[1]
    x = randn(2, D)
    torch.testing.assert_close(module(x=x), eager(x=x))
