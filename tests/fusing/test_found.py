"""fuse: what only inherits, spells otherwise or nests the layers of a block is found."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn
from swap_cases import assert_equal
from test_swap_mlps import is_fused
from torch import nn

from fusedckpt import fuse, unfuse

D, H = 12, 20


class Inheriting(nn.Linear):
    """As libraries have them, to build it from a configuration."""

    def reset_parameters(self):
        nn.init.normal_(self.weight)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = Inheriting(D, H, bias=False), Inheriting(D, H, bias=False)
        self.w2 = Inheriting(H, D, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Sequential):
    def __init__(self, p=0.0):
        layers = nn.Linear(D, H), nn.GELU(), nn.Dropout(p), nn.Linear(H, D), nn.Dropout(p)
        super().__init__(*layers)


class QuickGELU(nn.Module):
    def forward(self, z):
        return z * torch.sigmoid(1.702 * z)


class SquaredReLU(nn.Module):
    def forward(self, z):
        return F.relu(z, inplace=True) ** 2


class GEGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(D, 2 * H)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


class InList(nn.Module):
    """The layers in a list, the activation in the first of them."""

    def __init__(self, p=0.0):
        super().__init__()
        self.net = nn.ModuleList([GEGLU(), nn.Dropout(p), nn.Linear(H, D)])

    def forward(self, x, *args, **kwargs):
        for layer in self.net:
            x = layer(x)
        return x


class Raw(nn.Module):
    """No linears: weights as [in, out] and [out, in], a bias that is added."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(D, H))
        self.b1 = nn.Parameter(torch.randn(H))
        self.w2 = nn.Parameter(torch.randn(D, H))

    def forward(self, x):
        return torch.tanh(x @ self.w1 + self.b1) @ self.w2.t()


class Split(nn.Module):
    """It knows its sizes by number."""

    def __init__(self, features=96, hidden=120):
        super().__init__()
        self.features, self.hidden = features, hidden
        self.up, self.down = nn.Linear(features, 2 * hidden), nn.Linear(hidden, features)

    def forward(self, x):
        rows = x.reshape(-1, self.features)
        gate, up = self.up(rows).split([self.hidden, self.hidden], dim=-1)
        return self.down(F.silu(gate.float()).to(up.dtype) * up).view(x.shape)


FOUND = {
    "inherited forward": (FeedForward, "FeedForward -> gated_mlp (silu)"),
    "inherited from Sequential": (Block, "Block -> mlp (gelu)"),
    "in a Sequential": (
        lambda: nn.Sequential(nn.Linear(D, H), QuickGELU(), nn.Linear(H, D)),
        "Sequential -> mlp (quick_gelu)",
    ),
    "squared": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(D, H), SquaredReLU()), nn.Linear(H, D)),
        "Sequential -> mlp (relu2)",
    ),
    "in a list": (InList, "InList -> gated_mlp (gelu, packed, up first)"),
    "no linears": (Raw, "Raw -> mlp (tanh, weights as [in, out])"),
    "sizes by number": (Split, "Split -> gated_mlp (silu, packed, gate first)"),
}


@pytest.mark.parametrize(("make", "change"), FOUND.values(), ids=list(FOUND))
def test_found_and_the_same(make, change):
    module = make().to(DEVICE, torch.float32 if make is Split else torch.float64)
    eager = copy.deepcopy(module)
    x = randn(2, 3, 96 if make is Split else D, dtype=next(module.parameters()).dtype)
    assert fuse(module).swapped == {"": change}
    assert is_fused(module, x)
    if make is not Split:
        assert_equal(module, eager, x)
    torch.testing.assert_close(module(x), eager(x))
    assert type(unfuse(module)) is type(eager)
    assert [type(m) for m in module.modules()] == [type(m) for m in eager.modules()]


class OwnNorm(nn.Module):
    """nanoGPT's way."""

    def __init__(self, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.bias = nn.Parameter(torch.randn(D)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class Casting(nn.LayerNorm):
    """It leaves x's dtype, whatever autocast does."""

    def forward(self, input):
        y = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return y.to(input.dtype)


class Switched(nn.LayerNorm):
    is_fast = False

    def forward(self, input):
        y = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return y * 2 if self.is_fast else y


class Normalize(nn.Module):
    def __init__(self, offset=0.0):
        super().__init__()
        self.scale, self.offset = D**0.5, offset
        self.g = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * (self.g + self.offset)


NORMS = {
    "function": (OwnNorm, "OwnNorm -> layer_norm"),
    "function without bias": (lambda: OwnNorm(False), "OwnNorm -> layer_norm"),
    "subclass that casts": (lambda: Casting(D), "Casting -> layer_norm"),
    "subclass with a flag": (lambda: Switched(D), "Switched -> layer_norm"),
    "normalize": (Normalize, "Normalize -> rms_norm (llama cast)"),
    "normalize, offset": (lambda: Normalize(1.0), "Normalize -> rms_norm (llama cast, offset 1)"),
}


@pytest.mark.parametrize(("make", "change"), NORMS.values(), ids=list(NORMS))
def test_norms_of_other_classes(make, change):
    module, x = make().to(DEVICE), randn(4, 5, D)
    eager = copy.deepcopy(module)
    assert fuse(module).swapped == {"": change}
    y = module(x)
    assert "Block" in y.grad_fn.name()
    torch.testing.assert_close(y, eager(x))
    grads = [torch.autograd.grad(m(x).cos().sum(), [x, *m.parameters()]) for m in (module, eager)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    half = x.detach().bfloat16()
    assert torch.equal(module.bfloat16()(half), eager.bfloat16()(half))


def test_a_norm_whose_flag_changes_runs_the_original():
    module, x = Switched(D).to(DEVICE), randn(4, D)
    eager = copy.deepcopy(module)
    fuse(module)
    module.is_fast = eager.is_fast = True
    assert torch.equal(module(x), eager(x))


def test_what_runs_once_for_all_is_the_same_for_all(monkeypatch):
    """Identical modules are checked once, others each."""
    from fusedckpt.fusing import verification

    real, calls = verification.difference, []
    monkeypatch.setattr(verification, "difference", lambda *a: calls.append(a) or real(*a))
    model = nn.ModuleList([FeedForward(), FeedForward(), Split(), Split(), Split(96, 128)])
    assert len(fuse(model.to(DEVICE)).swapped) == 5
    assert len(calls) == 3


@pytest.mark.parametrize(("make", "expected"), [(lambda: Casting(D), True), (OwnNorm, False)])
def test_a_norm_casts_back_what_autocast_widens_if_it_did(make, expected):
    module = make().to(DEVICE)
    fuse(module)
    assert module._fusedckpt_match.casts_back is expected
