"""fuse: what is left of unknown classes and why, and the check of numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from own_classes import LoraLinear
from support import DEVICE, randn, saved_bytes
from swap_cases import assert_equal, kinds
from test_chosen import sequential
from test_found import Split
from test_swap_mlps import Conv1D, D, Gated, H, Packed, Plain
from test_swap_norms import Llama
from torch import nn
from torch.nn.utils import parametrize

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.fusing import verification
from fusedckpt.fusing.forwards import FusedMLP


class Quantised(nn.Linear):
    """As libraries of quantised layers have them."""

    def forward(self, input):
        return F.linear(input, self.weight.round(decimals=1), self.bias)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


class Scaled(Plain):
    def forward(self, x):
        return super().forward(x) * 1.01


class Inlined(Plain):
    """OPT's layer: the MLP's linears beside a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        return x + super().forward(self.norm(x))


class Own(Plain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return super().forward(x) * self.scale


class Noisy(Plain):
    """Something else while training, and no dropout to blame."""

    def forward(self, x):
        y = super().forward(x)
        return y * 1.5 if self.training else y


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, H, D))
        self.down = nn.Parameter(torch.randn(2, D, H))
        self.act_fn = nn.SiLU()

    def forward(self, x, index):
        return F.linear(self.act_fn(F.linear(x, self.up[index])), self.down[index])


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.relu()

    @staticmethod
    def backward(ctx, dh):
        return dh


class PassesGradients(nn.Module):
    """relu's value, another gradient."""

    def forward(self, z):
        return StraightThrough.apply(z)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
        return weights @ self.v(x)


def with_hook(register):
    module = Plain()
    getattr(module.first, register)(lambda *_: None)
    return module


def with_forward():
    module = Plain()
    module.forward = module.forward
    return module


def with_lora(count):
    module = Gated()
    for name in ("w", "v", "o")[:count]:
        setattr(module, name, LoraLinear(getattr(module, name)))
    return module


def with_parametrization():
    module = Plain()
    parametrize.register_parametrization(module.first, "weight", Double())
    return module


def with_two_dtypes():
    module = Plain()
    module.second.bfloat16()
    return module


def with_save():
    module = Plain()
    module.save = "mine"
    return module


WATCHED = "first: it has a hook, or its forward was replaced"
LEFT = {
    "hook": (lambda: with_hook("register_forward_hook"), WATCHED),
    "pre-hook": (lambda: with_hook("register_forward_pre_hook"), WATCHED),
    "backward hook": (lambda: with_hook("register_full_backward_hook"), WATCHED),
    "forward replaced": (with_forward, "the forward of the Plain was replaced"),
    "LoRA on one": (
        lambda: with_lora(1),
        "w is a LoraLinear: only peft's plain LoRA is fused",
    ),
    "LoRA on all": (
        lambda: with_lora(3),
        "w is a LoraLinear: only peft's plain LoRA is fused",
    ),
    "parametrized": (with_parametrization, "first: its weights are parametrized"),
    "quantised": (
        lambda: Plain(linear=Quantised),
        "second is a Quantised, a linear with its own forward",
    ),
    "ELU": (lambda: Plain(nn.ELU(0.2)), "act: ELU(alpha=0.2) is no activation that can be fused"),
    "Softplus": (lambda: Plain(nn.Softplus(beta=2)), "act: Softplus(beta=2, threshold=20.0) is"),
    "threshold": (lambda: Plain(nn.Softplus(threshold=9)), "is no activation that can be fused"),
    "ReLU6": (lambda: Plain(nn.ReLU6()), "act: ReLU6() is no activation that can be fused"),
    "RReLU": (lambda: Plain(nn.RReLU()), "its forward draws random numbers"),
    "dtypes": (with_two_dtypes, "its weights have several dtypes: torch.bfloat16, torch.float32"),
    "scaled": (Scaled, "after its last linear it computes mul"),
    "inlined": (
        Inlined,
        "its linears and activation are written inside this layer's forward (beside norm)",
    ),
    "own parameter": (Own, "its forward computes mul of scale"),
    "in training": (Noisy, "Noisy computes something else while training"),
    "experts": (Experts, "its weights are 3-dimensional: experts have gate_up_proj and down_proj"),
    "attribute": (with_save, "the Plain has an attribute save already"),
    "gradient": (lambda: Plain(PassesGradients()), "its forward uses an autograd.Function"),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=list(LEFT))
def test_left_with_a_reason(make, reason):
    model = nn.Module()
    model.mlp = make().to(DEVICE)
    before = kinds(model)
    # at this level nothing is recomputed
    report = fuse(model, norm=False, save="preact")
    assert report.swapped == {}
    assert reason in report.left["mlp"]
    assert list(report.left) == ["mlp"]
    assert kinds(model) == before
    assert f"left 1 x {type(model.mlp).__name__}: " in str(report)


# of these, the ones whose forward can be run again
AGAIN = ("ELU", "Softplus", "threshold", "ReLU6", "scaled", "inlined", "own parameter")


@pytest.mark.parametrize("name", LEFT)
def test_some_are_recomputed_where_only_inputs_are_saved(name):
    model = nn.Module()
    model.mlp = LEFT[name][0]().to(DEVICE, torch.float64 if name in AGAIN else None)
    eager = copy.deepcopy(model)
    report = fuse(model, norm=False)
    change = f"{type(eager.mlp).__name__} -> recomputed"
    assert report.swapped == ({"mlp": change} if name in (*AGAIN, "in training") else {})
    if name in AGAIN:
        x = randn(3, 4, D, dtype=torch.float64)
        assert_equal(model.mlp, eager.mlp, x, tol=0)
        assert saved_bytes(lambda x: model.mlp(x * 1), [x]) == 8 * 3 * 4 * D
        assert report.fallbacks == {}


def test_what_looks_like_no_mlp_is_not_mentioned():
    for module in (Attention(), nn.Linear(D, D), Conv1D(D, D), nn.MultiheadAttention(D, 2)):
        assert fuse(module) == fusedckpt.FuseReport()


def test_a_wrong_rule_is_named(monkeypatch):
    """Every kind of swap is really checked: ours is broken on purpose."""
    model = nn.Sequential(Llama(), Plain(), Packed(), nn.LayerNorm(D), nn.RMSNorm(D), sequential())
    model.to(DEVICE)
    real = verification.results

    def off(module, wanted, dout):
        found = real(module, wanted, dout)
        ours = "_fusedckpt_original" in module.__dict__
        return [found[0] * 1.001, *found[1:]] if ours else found

    monkeypatch.setattr(verification, "results", off)
    before = kinds(model)
    report = fuse(model)
    assert report.swapped == {}
    assert sorted(report.left) == ["0", "1", "2", "3", "4", "5.0"]
    assert all(reason.startswith("output: error") for reason in report.left.values())
    assert kinds(model) == before


def test_a_module_that_knows_its_sizes_is_checked(monkeypatch):
    """Ours is run on a smaller copy of it, though that holds other numbers."""
    real = FusedMLP._fused
    monkeypatch.setattr(FusedMLP, "_fused", lambda self, x: real(self, x) * 1.001)
    for module in (Split(), Plain(linear=Conv1D)):
        assert fuse(module.to(DEVICE)).left[""].startswith("output: error")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_passes_its_check(dtype):
    model = nn.Sequential(Plain(), Gated(), Packed(), nn.LayerNorm(D), sequential())
    report = fuse(model.to(DEVICE, dtype))
    assert len(report.swapped) == 5
    assert report.left == {}


def test_nothing_is_touched(monkeypatch):
    model = nn.Sequential(Plain(p=0.5), Llama(), nn.BatchNorm1d(D), sequential()).to(DEVICE)
    x = randn(3, D)
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: pytest.fail("a gradient came"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    grads = [p.grad.clone() for p in model.parameters()]
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state()] if DEVICE.type == "cuda" else []
    with torch.no_grad():
        assert len(fuse(model).swapped) == 3
    assert torch.equal(states[0], torch.get_rng_state())
    if DEVICE.type == "cuda":
        assert torch.equal(states[1], torch.cuda.get_rng_state())
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert versions == [p._version for p in model.parameters()]
    pairs = zip(grads, model.parameters(), strict=True)
    assert all(torch.equal(grad, p.grad) for grad, p in pairs)
    assert model[0].training
    assert model[0].drop.p == 0.5


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model = nn.Sequential(Plain(), Llama(), nn.LayerNorm(D)).to(DEVICE)
    before, attributes = kinds(model), [set(m.__dict__) for m in model.modules()]
    real, calls = verification.difference, []

    def fails(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no more")
        return real(*args)

    monkeypatch.setattr(verification, "difference", fails)
    with pytest.raises(MemoryError, match="no more"):
        fuse(model)
    assert kinds(model) == before
    assert [set(m.__dict__) for m in model.modules()] == attributes


def test_layers_without_shapes_are_left():
    model = nn.ModuleList([nn.LazyConv2d(3, 1), nn.LazyLinear(4), nn.LazyBatchNorm1d()])
    model.append(Plain(linear=lambda i, o: nn.LazyLinear(o)))
    why = "its parameters are not initialised: call the model once before"
    assert fuse(model).left == {"2": why, "3": why}


def test_shared_and_fused_already():
    mlp = Plain().to(DEVICE, torch.float64)
    model = nn.Sequential(mlp, nn.Tanh(), mlp)
    eager, x = copy.deepcopy(model), randn(3, D, dtype=torch.float64)
    assert list(fuse(model).swapped) == ["0"]
    again = fuse(model, save="preact")
    assert again.swapped == again.left == {}
    assert again.already == {"0": "Plain -> mlp (gelu)"}
    assert mlp.save == "inputs"
    assert_equal(model, eager, x)
    unfuse(model)
    assert kinds(model) == kinds(eager)


def test_tied_weights_within_one_block():
    module = Plain().to(DEVICE, torch.float64)
    module.second.weight = nn.Parameter(torch.randn(H, D, dtype=torch.float64, device=DEVICE).t())
    other = Gated().to(DEVICE, torch.float64)
    other.w.weight = other.v.weight
    for each in (module, other):
        eager = copy.deepcopy(each)
        assert fuse(each).swapped
        assert_equal(each, eager, randn(3, D, dtype=torch.float64))


def test_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(Plain(), Llama(), Packed())
    report = fuse(model)
    assert len(report.swapped) == 3
    assert model(torch.empty(2, D, device="meta")).shape == (2, D)


def test_bytes_in_the_report_are_those_of_a_call():
    from fusedckpt.memory import saved_tensors

    eager = Gated().to(DEVICE)
    model = copy.deepcopy(eager)
    report = fuse(model)
    found = []
    for each in (eager, model):
        x = randn(8, D)
        with saved_tensors() as saved:
            y = each(x * 1)
        found.append(saved.nbytes / 8)
        del y
    assert report.saved[""] == tuple(found) == (4 * (D + 4 * H), 4 * D)
