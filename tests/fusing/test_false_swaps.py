"""fuse: what looks like an MLP and is none is left, and what changes later runs as it did."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn
from test_swap_mlps import Plain, is_fused
from torch import nn

from fusedckpt import fuse
from fusedckpt.fusing.match_mlps import mlp_swap

D, H = 12, 20


class Gated(nn.Module):
    """SwiGLU with a slot for what differs."""

    def __init__(self, limit=7.0):
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False)
        self.w2 = nn.Linear(H, D, bias=False)
        self.limit = limit

    def hidden(self, x):
        return F.silu(self.w1(x)) * self.w3(x)

    def forward(self, x):
        return self.w2(self.hidden(x))


class ClampedBefore(Gated):
    def hidden(self, x):
        gate, up = self.w1(x).clamp(max=self.limit), self.w3(x).clamp(-self.limit, self.limit)
        return F.silu(gate) * up


class ClampedAfter(Gated):
    def hidden(self, x):
        return F.silu(self.w1(x)).clamp(max=self.limit) * self.w3(x)


class ClampedHidden(Gated):
    def hidden(self, x):
        return super().hidden(x).clamp(-self.limit, self.limit)


class ClampedResult(Gated):
    def forward(self, x):
        return super().forward(x).clamp(-self.limit, self.limit)


class ClampedInHalf(Gated):
    """As T5's: another function in one dtype."""

    def hidden(self, x):
        h = super().hidden(x)
        return h.clamp(-self.limit, self.limit) if h.dtype == torch.bfloat16 else h


class ByValue(Gated):
    def hidden(self, x):
        h = super().hidden(x)
        return h / h.abs().max() if h.abs().max() > self.limit else h


class Normed(Gated):
    def hidden(self, x):
        h = super().hidden(x)
        return h - h.mean(-1, keepdim=True) * 1e-7


class Noisy(Gated):
    def forward(self, x):
        if self.training and torch.rand(()) < 1e-3:
            return x
        return super().forward(x)


class NoisyInPython(Gated):
    def forward(self, x):
        return x if self.training and random.random() < 1e-3 else super().forward(x)


class Watching(Gated):
    sparsity = None

    def hidden(self, x):
        h = super().hidden(x)
        self.sparsity = (h.detach() == 0).double().mean()
        return h


class Logging(Gated):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, x):
        self.shapes.append(x.shape)
        return super().forward(x)


class Counting(Gated):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class InPieces(Gated):
    """Of long inputs, something else."""

    def forward(self, x):
        return super().forward(x) if x.shape[1] < 1000 else super().forward(x) * 2


class FirstToken(Plain):
    def forward(self, x):
        return super().forward(x[:, 0])


LEFT = {
    "clamped before": (ClampedBefore, "clamp, silu, mul is no activation"),
    "clamped after": (ClampedAfter, "silu, clamp, mul is no activation"),
    "clamped hidden": (ClampedHidden, "silu, mul, clamp is no activation"),
    "clamped result": (ClampedResult, "after its last linear it computes clamp"),
    "by value": (ByValue, "its forward depends on the values of tensors"),
    "by row": (Normed, "its forward computes mean"),
    "noisy": (Noisy, "its forward draws random numbers while training"),
    "noisy in Python": (NoisyInPython, "its forward draws random numbers in Python while training"),
    "attribute": (Watching, "its forward sets sparsity"),
    "list": (Logging, "its forward writes to shapes"),
    "buffer": (Counting, "its forward writes to a tensor that it did not create"),
    "long": (InPieces, "InPieces computes something else for long inputs"),
    "first token": (FirstToken, "its result has the shape"),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=list(LEFT))
def test_left_untouched_with_a_reason(make, reason):
    module = make().to(DEVICE)
    # known to hold an activation, so that it is named whatever it does
    module.act = nn.SiLU()
    before = copy.deepcopy(module)
    states = random.getstate(), torch.get_rng_state()
    # at this level nothing is recomputed
    report = fuse(module, verify=False, save="preact")
    assert report.swapped == {}
    assert reason in report.left[""]
    assert vars(module).keys() == vars(before).keys()
    assert getattr(module, "shapes", []) == []
    for name, value in before.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("limit", [5.0, 7.0, 10.0, 20.0, 1e4])
@pytest.mark.parametrize("kind", [ClampedBefore, ClampedAfter, ClampedHidden, ClampedResult])
def test_a_limit_is_seen_wherever_it_is(kind, limit):
    module = kind(limit).to(DEVICE, torch.float64)
    eager, x = copy.deepcopy(module), 10 * randn(2, 3, D, dtype=torch.float64)
    assert fuse(module, save="preact").swapped == {}
    assert fuse(module).swapped == {"": f"{kind.__name__} -> recomputed"}
    found = [torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (module, eager)]
    assert all(map(torch.equal, *found))


def test_fused_in_the_dtypes_that_were_seen_to_be_the_same():
    module, x = ClampedInHalf(0.1).to(DEVICE), randn(2, 3, D)
    eager = copy.deepcopy(module)
    assert fuse(module).swapped == {"": "ClampedInHalf -> gated_mlp (silu)"}
    assert is_fused(module, x)
    x = x.bfloat16()
    assert torch.equal(module.bfloat16()(x), eager.bfloat16()(x))
    assert not is_fused(module, x)
    assert fuse(eager, save="preact").swapped == {}


class Tuned(Gated):
    """A number, a flag, a function, a class's number and a configuration's."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.scale, self.bypass, self.act = 1.0, False, F.silu
        self.config = Config()

    def hidden(self, x):
        h = self.act(self.w1(x)) * self.w3(x)
        h = h * 2 if self.config.is_double or hasattr(self, "late") else h
        h = h * 2 if getattr(self.config, "late", False) else h
        return h if self.scale == 1.0 and self.factor == 1.0 else h * self.scale * self.factor

    def forward(self, x):
        return x if self.bypass else super().forward(x)


class Config:
    is_double = False


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", 0.5),
        lambda m: setattr(m, "factor", 0.5),
        lambda m: setattr(m, "bypass", True),
        lambda m: setattr(m, "act", F.gelu),
        lambda m: setattr(m.config, "is_double", True),
        lambda m: setattr(m, "late", 1),
        lambda m: setattr(m.config, "late", True),
        lambda m: setattr(m.w1, "bias", nn.Parameter(torch.ones_like(m.w1.weight[:, 0]))),
    ],
    ids=[
        *("number", "number of the class", "flag", "function", "configuration"),
        *("was not there", "was not in the configuration", "bias"),
    ],
)
def test_what_its_forward_reads_must_still_hold(change):
    module, x = Tuned().to(DEVICE), randn(2, 3, D)
    eager = copy.deepcopy(module)
    assert fuse(module).swapped == {"": "Tuned -> gated_mlp (silu)"}
    assert is_fused(module, x)
    twin = copy.deepcopy(module)
    change(module)
    change(eager)
    torch.testing.assert_close(module(x), eager(x), rtol=0, atol=0)
    assert is_fused(twin, x)


class Grown(nn.Sequential):
    pass


def test_a_layer_that_came_later_runs():
    module, x = Grown(nn.Linear(D, H), nn.SiLU(), nn.Dropout(0.0), nn.Linear(H, D)), randn(3, D)
    module.to(DEVICE)
    fuse(module)
    assert is_fused(module, x)
    module.append(nn.Tanh())
    assert module(x).abs().max() <= 1


class Halved(torch.Tensor):
    """A weight that stands for half of what it holds, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                return F.linear(args[0], args[1].as_subclass(torch.Tensor) / 2, *args[2:])
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(cls) if func is torch.Tensor.detach else found


def test_a_weight_of_another_class_runs_the_original():
    module, x = Plain().to(DEVICE), randn(3, D)
    fuse(module)
    weight = module.first.weight
    eager = copy.deepcopy(module)
    with torch.no_grad():
        eager.first.weight.div_(2)
    module.first.weight = nn.Parameter(weight.detach().as_subclass(Halved))
    assert not is_fused(module, x)
    torch.testing.assert_close(module(x), eager(x))
    # and is left where it is there from the beginning
    other = Plain().to(DEVICE)
    other.first.weight = nn.Parameter(other.first.weight.detach().as_subclass(Halved))
    assert fuse(other).swapped == {}


class Widening(Gated):
    def forward(self, x):
        return super().forward(x).float()


def test_a_result_of_another_dtype_is_no_block():
    module = Widening().to(DEVICE)
    assert fuse(module).swapped == {"": "Widening -> gated_mlp (silu)"}
    x = randn(2, 3, D).bfloat16()
    assert module.bfloat16()(x).dtype == torch.float32
    module = Widening().to(DEVICE, torch.bfloat16)
    assert fuse(module, save="preact").swapped == {}
    assert "is torch.float32 for an input of torch.bfloat16" in str(mlp_swap(module, "inputs"))
