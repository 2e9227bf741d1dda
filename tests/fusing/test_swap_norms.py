"""fuse: RMSNorms of any class, by what they compute; what differs stays."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, compare, randn
from torch import nn

import fusedckpt
from fusedckpt import fuse, unfuse

D = 12


class Norm(nn.Module):
    """RMSNorm with a slot for every way in which classes differ."""

    eps_name, weight_name = "eps", "weight"

    def __init__(self, eps=1e-6):
        super().__init__()
        setattr(self, self.eps_name, eps)
        setattr(self, self.weight_name, nn.Parameter(torch.randn(D)))

    @property
    def w(self):
        return getattr(self, self.weight_name)

    def rms(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + getattr(self, self.eps_name))


class Llama(Norm):
    eps_name = "variance_epsilon"

    def forward(self, hidden_states):
        return self.w * self.rms(hidden_states.float()).to(hidden_states.dtype)


class Gemma(Norm):
    def forward(self, x):
        return (self.rms(x.float()) * (1.0 + self.w.float())).type_as(x)


class Olmo(Norm):
    eps_name, weight_name = "epsilon", "scale"

    def forward(self, x):
        return (self.w * self.rms(x.float())).to(x.dtype)


class T5(Norm):
    def forward(self, x):
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.w.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.w.dtype)
        return self.w * x


class Pow(Norm):
    """Gemma3n's: a power instead of the root, which may round otherwise."""

    def forward(self, x):
        mean = x.float().pow(2).mean(-1, keepdim=True) + self.eps
        return (x.float() * torch.pow(mean, -0.5) * self.w.float()).type_as(x)


class Torch(Norm):
    def forward(self, x):
        return F.rms_norm(x, (D,), self.w, self.eps)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x)


FOUND = {
    Llama: "llama cast",
    Gemma: "gemma cast, offset 1",
    Olmo: "gemma cast",
    T5: "llama cast",
    Pow: "gemma cast",
    Torch: "torch cast",
}


@pytest.mark.parametrize("kind", FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rule_is_found_and_holds(kind, dtype, path):
    norm = kind().to(DEVICE, dtype)
    eager = copy.deepcopy(norm)
    assert fuse(norm).swapped == {"": f"{kind.__name__} -> rms_norm ({FOUND[kind]})"}
    assert isinstance(norm, kind)
    assert norm.rms(torch.ones(D)).shape == (D,)

    def at(module):
        return lambda x, w: torch.func.functional_call(module, {module.weight_name: w}, (x,))

    def make():
        return [randn(40, D, dtype=dtype), norm.w.detach().requires_grad_(True)]

    compare(at(norm), at(eager), make)
    y = norm(randn(3, D, dtype=dtype))
    assert "Block" in y.grad_fn.name()


def test_without_weights():
    norm, x = Bare().to(DEVICE), randn(4, D)
    expected = norm(x)
    assert fuse(norm).swapped == {"": "Bare -> rms_norm (llama cast)"}
    y = norm(x)
    assert "Block" in y.grad_fn.name()
    torch.testing.assert_close(y, expected)
    half = x.bfloat16()
    assert torch.equal(norm(half), unfuse(norm)(half))


@pytest.mark.parametrize("kind", [*FOUND, Bare])
def test_every_pair_of_dtypes_gives_what_it_did(kind):
    """Fused where that was seen to hold; else the old forward, with its dtype and its errors."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    norm = kind().to(DEVICE)
    eager = copy.deepcopy(norm)
    assert fuse(norm).swapped
    for weight in dtypes:
        for x in (randn(5, D, dtype=dtype) for dtype in dtypes):
            ours, theirs = norm.to(weight)(x), eager.to(weight)(x)
            assert ours.dtype == theirs.dtype
            tol = 1e-2 if theirs.dtype in dtypes[:2] else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)
            if kind in (Llama, Gemma) and x.dtype == torch.float64:
                # they compute float64 in float32, and still do
                assert torch.equal(ours, theirs)


def test_float64_in_float32_is_left():
    norm = Llama().double()
    assert fuse(norm).left == {"": "Llama is a known form of RMSNorm, but not in torch.float64"}


class Doubled(Llama):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class EpsOutside(Norm):
    def forward(self, x):
        return self.w * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps))


class OtherEps(Norm):
    """Seen only in rows of small numbers."""

    def forward(self, x):
        rms = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps * 1.5)
        return (self.w * rms).to(x.dtype)


class Half(Norm):
    """The same in float32, but it rounds everything to half precision."""

    def forward(self, x):
        return self.w * self.rms(x)


class Twice(Norm):
    def forward(self, x, scale):
        return self.w * self.rms(x) * scale


class Buffered(Llama):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states):
        self.calls += 1
        return super().forward(hidden_states)


class Broken(Norm):
    def forward(self, x):
        raise KeyError("no")


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        (Doubled, {"": "Doubled is not a known form of RMSNorm"}),
        (EpsOutside, {"": "EpsOutside is not a known form of RMSNorm"}),
        (OtherEps, {"": "OtherEps is not a known form of RMSNorm"}),
        (Broken, {"": "Broken is not a known form of RMSNorm"}),
        (Twice, {"": "its forward takes more than one tensor"}),
        (Buffered, {"": "Buffered: its forward writes to a tensor that it did not create"}),
    ],
)
def test_others_are_left(kind, left):
    norm = kind().to(DEVICE)
    report = fuse(norm)
    assert report.swapped == {}
    assert report.left == left
    assert type(norm) is kind
    assert not norm.state_dict().get("calls", torch.zeros(())).any()


@pytest.mark.parametrize("original", [nn.LayerNorm, nn.RMSNorm])
def test_subclass_that_inherits_its_forward(original):
    class Mine(original):
        tag = "mine"

        def extra_repr(self):
            return f"mine, {super().extra_repr()}"

    norm, x = Mine(D).to(DEVICE), randn(3, D)
    expected, shown = norm(x), repr(norm)
    assert fuse(norm).swapped == {"": f"Mine -> {original.__name__}"}
    assert isinstance(norm, (fusedckpt.LayerNorm, fusedckpt.RMSNorm))
    assert isinstance(norm, Mine)
    assert norm.tag == "mine"
    assert repr(norm) == f"Fused{shown}"
    torch.testing.assert_close(norm(x), expected)
    assert type(unfuse(norm)) is Mine


def test_fused_in_the_dtypes_that_were_seen_to_be_the_same():
    norm, x = Half().to(DEVICE), randn(4, D)
    eager = copy.deepcopy(norm)
    assert fuse(norm).swapped == {"": "Half -> rms_norm (llama cast)"}
    assert "Block" in norm(x).grad_fn.name()
    torch.testing.assert_close(norm(x), eager(x))
    half = x.bfloat16()
    assert torch.equal(norm.bfloat16()(half), eager.bfloat16()(half))
    otherwise = "Half is a known form of RMSNorm, but not in torch.bfloat16"
    assert fuse(eager).left == {"": otherwise}


def test_eps_is_read_when_called():
    norm, x = Llama().to(DEVICE), randn(3, D)
    fuse(norm)
    norm.variance_epsilon = 1.0
    eager = unfuse(copy.deepcopy(norm))
    torch.testing.assert_close(norm(x), eager(x))


def test_one_class_for_each():
    first, second = Llama(), Llama()
    fuse(first)
    fuse(second)
    assert type(first) is type(second) is not Llama
    assert type(first).__name__ == "FusedLlama"
    assert type(first).__module__ == Llama.__module__
