"""fuse: modules that hold a norm or an activation and are left, each with a reason."""

import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from own_mlps import Conv1D, Gated, Inlined, Plain
from support import DEVICE
from swap_cases import kinds
from torch import nn
from torch.nn.utils import parametrize
from zoo import XIELU, Doubled, LoraLinear

from fusedckpt import fuse

D, H = 12, 20


class Snake(nn.Module):
    def forward(self, z):
        return z + torch.sin(z) ** 2


class Computing(nn.Module):
    """Layers of a list and an activation, and what a function makes of these and the input."""

    def __init__(self, compute, *linears, **parts):
        super().__init__()
        self.fcs, self.act, self.compute = nn.ModuleList(linears), nn.GELU(), compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.compute(x, self.act, *self.fcs)


class MaskedResult(Plain):
    def forward(self, x, mask):  # pyright: ignore[reportIncompatibleMethodOverride]  # on purpose
        return super().forward(x) * mask


class CumulativeRaw(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(D, H)), nn.Parameter(torch.randn(H, D))

    def forward(self, x, mask=None):
        return F.gelu(x @ self.w1).cumsum(-1) @ self.w2


class ReadsTensor(nn.Module):
    """A norm with a bias that is a tensor, and no parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.shift, self.eps = (
            nn.Parameter(torch.ones(D)),
            nn.Buffer(torch.ones(D)),
            1e-6,
        )

    def forward(self, x):
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) + self.shift
        )


class RoutedOnce(nn.Module):
    """Experts with transformers' parameters, and a forward of two arguments."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 2 * H, D))
        self.down_proj, self.act_fn = nn.Parameter(torch.randn(2, D, H)), nn.SiLU()

    def forward(self, x, index):
        return x


class IndexedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = (nn.Parameter(torch.randn(4, D, n)) for n in (2 * D, D))

    def forward(self, x, index):
        gate, up = (x @ self.both[index]).chunk(2, dim=-1)
        return (up * gate * torch.sigmoid(gate)) @ self.down[index]


class Products(nn.Module):
    """The experts' matrices of JetMoe, in a module of their own."""

    def __init__(self, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, out, D))

    def forward(self, x, index):
        return torch.einsum("end,btd->btn", self.weight[index], x)


class Splines(nn.Module):
    """A layer of a Kolmogorov-Arnold network: a weight of three dimensions, and no experts."""

    def __init__(self):
        super().__init__()
        self.base, self.coef = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D, 4))

    def forward(self, x):
        basis = torch.exp(-((x[..., None] - torch.arange(4)) ** 2))
        return F.linear(F.silu(x), self.base) + torch.einsum("...ik,oik->...o", basis, self.coef)


class OwnConv(nn.Conv1d):
    """As Whisper's encoder has two of them, before its blocks."""


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = OwnConv(D, D, 3), OwnConv(D, D, 3)

    def forward(self, x):
        return F.gelu(self.second(F.gelu(self.first(x))))


class GroupNorm32(nn.GroupNorm):
    """Computes in float32 alone, so that it does not run in the dtype of a check."""

    def forward(self, input):
        return super().forward(input.float()).type(input.dtype)


class ResNet(nn.Module):
    """Its activation follows a convolution; its linear is the classifier."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, D, 3), nn.BatchNorm2d(D), nn.ReLU()
        self.fc = nn.Linear(D, 10)

    def forward(self, x):
        return self.fc(self.relu(self.bn1(self.conv1(x))).mean((-1, -2)))


def doubling(kind):
    """Return a subclass that returns twice as much."""

    def forward(self, input):
        return kind.forward(self, input) * 2

    return type(f"My{kind.__name__}", (kind,), {"forward": forward})


KINDS = nn.Linear, nn.GELU, nn.Sequential, nn.RMSNorm
MyLinear, MyGELU, MySequential, MyRMSNorm = map(doubling, KINDS)


def linears(count):
    return [nn.Linear(D, D) for _ in range(count)]


def many(x, act, *linears):
    for linear in linears:
        x = act(linear(x))
    return x


def in_single(x, act, first, second):
    if x.dtype == torch.float64:
        raise TypeError("float32 alone")
    return second(act(first(x)))


def outer_thirds(x, act, packed, down):
    gate, _, up = packed(x).chunk(3, -1)
    return down(act(gate) * up)


def pair(linear=None, activation=None):
    return nn.Sequential(linear or nn.Linear(D, D), activation or nn.GELU())


def changed(module, change, name=""):
    change(module.get_submodule(name))
    return module


def hooked(register, module, name):
    return changed(module, lambda layer: getattr(layer, register)(lambda *_: None), name)


def replaced(module, name=""):
    def forward(self, x):
        return type(self).forward(self, x) * 2

    return changed(module, lambda m: setattr(m, "forward", types.MethodType(forward, m)), name)


def parametrized(module, name=""):
    def change(layer):
        parametrize.register_parametrization(layer, "weight", Doubled())

    return changed(module, change, name)


def with_lora(*names):
    module = Gated()
    for name in names:
        setattr(module, name, LoraLinear(getattr(module, name)))
    return module


def partitioned():
    """A module as DeepSpeed's ZeRO-3 leaves it: parameters are empty between forwards."""
    module = Plain()
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
        parameter.ds_id = 1  # pyright: ignore[reportAttributeAccessIssue]  # DeepSpeed's
    return module


def sparse():
    weight = torch.eye(D).to_sparse_csr()
    model = pair(nn.Linear(D, D, bias=False))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    return model


# modules, the names of what is left in them, and the reason's key
LEFT = {
    **{
        f"{register} of the {name}": (partial(hooked, register, pair(), name), "0", "hook")
        for register in ("register_forward_hook", "register_full_backward_hook")
        for name in ("0", "1")
    },
    "hook on an MLP's": (
        lambda: hooked("register_forward_pre_hook", Plain(), "first"),
        "",
        "hook",
    ),
    "forward of a linear": (lambda: replaced(pair(), "0"), "0", "hook"),
    "forward of a Sequential": (lambda: replaced(pair()), "0", "forward"),
    "forward of a norm": (lambda: replaced(nn.LayerNorm(D)), "", "forward"),
    "forward of an MLP": (lambda: replaced(Plain()), "", "forward"),
    "parametrized": (lambda: parametrized(pair(), "0"), "0", "parametrized"),
    "parametrized norm": (lambda: parametrized(nn.RMSNorm(D)), "", "parametrized"),
    "subclass of Linear": (lambda: pair(MyLinear(D, D)), "0", "linear"),
    "subclass of an activation": (lambda: pair(None, MyGELU()), "0", "apart"),
    "subclass of Sequential": (lambda: MySequential(*pair()), "0", "sequential"),
    "subclass of RMSNorm": (lambda: MyRMSNorm(D), "", "rule"),
    "LoRA on all": (lambda: with_lora("w", "v", "o"), "", "adapter"),
    "LeakyReLU(0.2)": (lambda: pair(None, nn.LeakyReLU(0.2)), "0", "apart"),
    "Softplus(beta=2)": (lambda: Plain(nn.Softplus(beta=2)), "", "ops"),
    "Softmax": (lambda: pair(None, nn.Softmax(-1)), "0", "apart"),
    "ELU": (lambda: Plain(nn.ELU(0.2)), "", "ops"),
    "RReLU": (lambda: Plain(nn.RReLU()), "", "random"),
    "dropped": (
        lambda: nn.Sequential(nn.Linear(D, H), nn.Dropout(0.1), nn.ELU(), nn.Linear(H, D)),
        "0",
        "apart",
    ),
    "unknown": (lambda: Plain(Snake()), "", "ops"),
    "unknown function": (
        lambda: Computing(lambda x, _, a, b: b(a(x).sin()), *linears(2)),
        "",
        "ops",
    ),
    "learnt": (lambda: Plain(XIELU()), "", "ops"),
    "weight of PReLU": (lambda: MaskedResult(nn.PReLU()), "", "inputs"),
    "attribute": (lambda: MaskedResult(torch.sigmoid), "", "inputs"),
    "no activation": (
        lambda: Computing(lambda x, _, a, b: b(a(x)), *linears(2)),
        "",
        "ops",
    ),
    "thirds of a weight": (
        lambda: Computing(outer_thirds, nn.Linear(D, 3 * D), nn.Linear(D, D)),
        "",
        "ops",
    ),
    "five linears": (lambda: Computing(many, *linears(5)), "", "beside"),
    "a tensor of its own": (ReadsTensor, "", "foreign"),
    "raises": (lambda: Computing(lambda x, *_: x.no_such_method(), *linears(2)), "", "raised"),
    "two results": (
        lambda: Computing(lambda x, act, a, b: (b(act(a(x))), x), *linears(2)),
        "",
        "returns",
    ),
    "no float64": (lambda: Computing(in_single, *linears(2)), "", "check dtype"),
    "experts with two arguments": (RoutedOnce, "", "signature"),
    "DeepSpeed": (partitioned, "", "deepspeed"),
    "a scale": (
        lambda: Computing(many, *linears(2), scale=nn.Parameter(torch.ones(()))),
        "",
        "beside",
    ),
    "written inside": (Inlined, "", "ops"),
    "raw weights": (CumulativeRaw, "", "ops"),
    "experts": (IndexedExperts, "", "experts"),
    "experts' products": (lambda: Computing(many, Products(D), Products(D)), "", "experts"),
    "pooler": (
        lambda: Computing(lambda x, act, dense: act(dense(x[:, 0])), nn.Linear(D, D)),
        "",
        "result",
    ),
    "convolutional net": (ResNet, "bn1", "other norm"),
    "splines": (Splines, "", "beside"),
    "group norm in float32": (lambda: GroupNorm32(2, D), "", "other norm"),
    "group norm": (lambda: nn.GroupNorm(2, D), "", "other norm"),
    "batch norm": (lambda: nn.BatchNorm2d(D), "", "other norm"),
    "several dtypes": (
        lambda: changed(Plain(), lambda m: m.to(torch.bfloat16), "second"),
        "",
        "dtypes",
    ),
    "complex": (
        lambda: pair(nn.Linear(D, D, dtype=torch.complex64), nn.Tanh()),
        "0",
        "dense",
    ),
    "sparse": (sparse, "0", "weight"),
    "lazy norm": (nn.LazyBatchNorm1d, "", "lazy"),
    "lazy linear": (
        lambda: pair(nn.LazyLinear(D)),
        "0",
        "lazy",
    ),
    "attribute in the way": (
        lambda: changed(pair(), lambda m: setattr(m, "save", "mine")),
        "0",
        "attribute",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("make", "name", "key"), LEFT.values(), ids=list(LEFT))
def test_left_with_a_reason(make, name, key):
    model = make().to(DEVICE)
    before = kinds(model)
    # at this level nothing is recomputed
    report = fuse(model, save="preact", norm=type(model) is not Inlined)
    assert report.swapped == {}
    assert list(report.left) == [name]
    reason = report.left[name]
    assert reason.key == key
    parent = model if name in ("0", "fc") else model.get_submodule(name)
    assert report.classes[name] == type(parent).__name__
    line = f"left 1 x {report.classes[name]}: {reason}; {reason.remedy} ({name or 'root'})"
    assert line in str(report)
    assert kinds(model) == before


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_what_torchscript_compiled_is_named():
    mine = Plain(torch.jit.script(nn.GELU()))
    scripted = torch.jit.script(nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)))
    model = nn.Sequential(scripted, nn.LayerNorm(D), mine)
    report = fuse(model)
    assert list(report.swapped) == ["1"]
    assert report.left == {"0": ("scripted", ""), "2": ("scripted", "")}
    assert report.classes == {"0": "Sequential", "2": "Plain"}
    assert model(torch.randn(2, D)).shape == (2, D)


class CappedLogits(nn.Module):
    """A model that caps its logits."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.final_logit_softcap = nn.Embedding(8, D), nn.Linear(D, 8), 3.0

    def forward(self, ids):
        logits = self.head(self.body(ids)) / self.final_logit_softcap
        return torch.tanh(logits) * self.final_logit_softcap


def apart():
    layers = (nn.Conv1d(D, D, 1), nn.GELU(), nn.Flatten(), nn.Linear(D, D), nn.ModuleList(pair()))
    model = nn.Sequential(*layers)
    model.add_module("absent", None)
    return model


@pytest.mark.parametrize(
    "make",
    [CappedLogits, Snake, XIELU, apart, Stem, lambda: nn.Linear(D, D)]
    + [lambda: Conv1D(D, D), lambda: nn.MultiheadAttention(D, 2), lambda: nn.ModuleList(pair())],
)
def test_what_has_none_is_not_mentioned(make):
    assert fuse(make().to(DEVICE)).left == {}


def test_one_misfit_keeps_its_sequential_but_no_other():
    good = pair(nn.Linear(4, 4))
    misfit = pair(nn.Linear(D, D, dtype=torch.complex64), nn.Tanh())
    bad = nn.Sequential(*misfit, nn.ELU(), *pair())
    report = fuse(nn.ModuleList([good, bad, nn.Sequential(nn.RMSNorm(D), *bad[:2])]))
    assert sorted(report.swapped) == ["0.0", "2.0"]
    assert list(report.left) == ["1.0", "1.3", "2.1"]
    assert len(set(report.left.values())) == 1
    assert type(bad) is nn.Sequential


def test_a_norm_is_swapped_where_its_block_is_not():
    model = MySequential(nn.LayerNorm(D), *pair(), nn.Linear(D, D))
    report = fuse(model)
    assert report.swapped == {"0": "nn.LayerNorm -> LayerNorm"}
    assert list(report.left) == ["1"]


def test_modules_that_take_vectors_alone_are_passed_over():
    class Sinusoids(nn.Module):
        """The embedding of times by frequencies, as diffusion models have."""

        def __init__(self):
            super().__init__()
            self.eps = 1e-6

        def forward(self, times):
            if len(times.shape) != 1:
                raise ValueError("expected times of one dimension")
            phases = times[:, None] * torch.arange(1, D, device=times.device)
            return torch.cat([phases.sin(), phases.cos()], -1)

    model = nn.Sequential(Sinusoids(), nn.Linear(2 * D - 2, D)).to(DEVICE)
    before = model(torch.ones(3, device=DEVICE))
    report = fuse(model)
    assert report.left == {}
    torch.testing.assert_close(model(torch.ones(3, device=DEVICE)), before)
