"""fuse: what looks like an MLP and is none is left, and what changes later runs as it did."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from own_mlps import Plain, is_fused
from support import DEVICE, randn
from torch import nn
from zoo import GatedMLP, OwnSequential

from fusedckpt import fuse, unfuse

D, H = 12, 20


class Computed(GatedMLP):
    """SwiGLU's parts, and the function that computes with them."""

    def __init__(self, compute=lambda m, x: m.down_proj(m.hidden(x)), **parts):
        # its activation is a child, so that it is named whatever it computes
        super().__init__(D, H)
        self.limit, self.compute = 7.0, compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.compute(self, x)


class Halving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx / 2


class Doubling(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


def clamped_before(m, x):
    gate, up = m.gate_proj(x).clamp(max=m.limit), m.up_proj(x).clamp(-m.limit, m.limit)
    return m.down_proj(F.silu(gate) * up)


def clamped_after(m, x):
    return m.down_proj(F.silu(m.gate_proj(x)).clamp(max=m.limit) * m.up_proj(x))


def clamped_hidden(m, x):
    return m.down_proj(m.hidden(x).clamp(-m.limit, m.limit))


def clamped_result(m, x):
    return m.down_proj(m.hidden(x)).clamp(-m.limit, m.limit)


def by_value(m, x):
    h = m.hidden(x)
    return m.down_proj(h / h.abs().max() if h.abs().max() > m.limit else h)


def noisy(m, x):
    return x if m.training and torch.rand(()) < 1e-3 else m.down_proj(m.hidden(x))


def noisy_in_python(m, x):
    return x if m.training and random.random() < 1e-3 else m.down_proj(m.hidden(x))


def watching(m, x):
    m.seen = m.hidden(x).detach().mean()
    return m.down_proj(m.hidden(x))


def logging(m, x):
    m.shapes.append(x.shape)
    return m.down_proj(m.hidden(x))


def counting(m, x):
    m.calls.add_(1)
    return m.down_proj(m.hidden(x))


def without_gradient(m, x):
    with torch.no_grad():
        gate = F.silu(m.gate_proj(x))
    return m.down_proj(gate * m.up_proj(x))


@torch.no_grad()
def never_a_gradient(m, x):
    return m.down_proj(m.hidden(x))


def hooking(m, x):
    h = m.hidden(x)
    if h.requires_grad:
        h.register_hook(lambda dh: dh * 2)
    return m.down_proj(h)


def in_full(m, x):
    with torch.autocast(x.device.type if x.device.type == "cuda" else "cpu", enabled=False):
        return m.down_proj(m.hidden(x.float()))


def doubled(condition):
    """Return a forward that computes something else under a condition."""

    def compute(m, x):
        y = m.down_proj(m.hidden(x))
        return y * 2 if condition(m, x) else y

    return compute


# the forward, the module's parts, the reason's key
GUARDS = {
    "clamped before": (clamped_before, {}, "ops"),
    "clamped after": (clamped_after, {}, "ops"),
    "clamped hidden": (clamped_hidden, {}, "ops"),
    "clamped result": (clamped_result, {}, "ops"),
    "by value": (by_value, {}, "values"),
    "by row": (
        lambda m, x: m.down_proj(m.hidden(x) - m.hidden(x).mean(-1, keepdim=True) * 1e-7),
        {},
        "ops",
    ),
    "noisy": (noisy, {}, "random"),
    "noisy in Python": (noisy_in_python, {}, "random"),
    "attribute": (watching, {"seen": None}, "sets"),
    "list": (logging, {"shapes": []}, "writes"),
    "buffer": (counting, {"calls": nn.Buffer(torch.zeros(()))}, "writes"),
    "long": (doubled(lambda m, x: x.shape[1] > 1000), {}, "varies"),
    "first token": (
        lambda m, x: m.down_proj(m.hidden(x[:, 0])),
        {},
        "result",
    ),
    "without a gradient": (without_gradient, {}, "function"),
    "never a gradient": (
        never_a_gradient,
        {},
        "function",
    ),
    "its own gradient": (lambda m, x: m.down_proj(Halving.apply(m.hidden(x))), {}, "function"),
    "detached": (
        lambda m, x: m.down_proj(F.silu(F.linear(x, m.gate_proj.weight.detach())) * m.up_proj(x)),
        {},
        "ops",
    ),
    "hook on a tensor": (hooking, {}, "tensor hooks"),
    "its own call": (clamped_hidden, {"gate_proj": Doubling(D, H)}, "hook"),
    "without autocast": (in_full, {}, "function"),
    "rounding": (lambda m, x: m.down_proj(m.hidden(x.bfloat16().to(x.dtype))), {}, "ops"),
    "a buffer": (
        lambda m, x: m.down_proj(m.hidden(x) * m.scale),
        {"scale": nn.Buffer(torch.ones(H))},
        "ops",
    ),
    "a tensor": (
        lambda m, x: m.down_proj(m.hidden(x) * m.scale),
        {"scale": torch.ones((), device=DEVICE)},
        "state",
    ),
    "in place": (lambda m, x: m.down_proj(m.hidden(x.mul_(1.0))), {}, "writes"),
    "grad mode": (doubled(lambda m, x: torch.is_grad_enabled()), {}, "varies"),
    "autocast": (
        doubled(lambda m, x: torch.is_autocast_enabled("cpu")),
        {},
        "varies",
    ),
    "strides": (
        doubled(lambda m, x: not x.is_contiguous()),
        {},
        "varies",
    ),
    "dimensions": (doubled(lambda m, x: x.dim() == 2), {}, "varies"),
    "one token": (doubled(lambda m, x: x.numel() == D), {}, "varies"),
    "many rows": (doubled(lambda m, x: x.shape[0] > 1000), {}, "sizes"),
    "rows of a hidden tensor": (doubled(lambda m, x: m.up_proj(x).size(0) + 1 > 1000), {}, "sizes"),
    "a length": (doubled(lambda m, x: len(x) == 64), {}, "sizes"),
    "a sum of sizes": (doubled(lambda m, x: (x.numel() - 1) % 7 == 6), {}, "sizes"),
    "five dimensions": (doubled(lambda m, x: len(x.shape) > 4), {}, "varies"),
    "one dimension": (doubled(lambda m, x: x.ndim == 1), {}, "varies"),
    "a frozen weight": (
        doubled(lambda m, x: not m.gate_proj.weight.requires_grad),
        {},
        "state",
    ),
    "a leaf": (doubled(lambda m, x: m.hidden(x).is_leaf and m.training), {}, "state"),
    "its dict": (doubled(lambda m, x: m.__dict__["scale"] > 1), {"scale": 1.0}, "state"),
    "all attributes": (doubled(lambda m, x: "late" in vars(m)), {}, "state"),
    "a child's mode": (doubled(lambda m, x: m.gate_proj.training), {}, "varies"),
}


@pytest.mark.parametrize(("compute", "parts", "key"), GUARDS.values(), ids=list(GUARDS))
def test_a_forward_that_is_no_block(compute, parts, key):
    module = Computed(compute, **copy.deepcopy(parts)).to(DEVICE)
    before, states = copy.deepcopy(module), (random.getstate(), torch.get_rng_state())
    # at this level nothing is recomputed
    report = fuse(module, verify=False, save="preact")
    assert report.swapped == {}
    assert report.left[""].key == key
    assert vars(module).keys() == vars(before).keys()
    assert getattr(module, "shapes", []) == []
    assert all(map(torch.equal, module.state_dict().values(), before.state_dict().values()))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_sizes_that_do_not_change_the_function_cost_no_swap():
    """Those that it passes on, sizes of weights, and comparisons of two of them."""

    def compute(m, x):
        rows, *sizes = x.shape
        assert x.shape[:-1] == m.hidden(x).shape[:-1]
        assert x.size(-1) == m.gate_proj.weight.shape[1] == D
        assert m.gate_proj.weight.shape[0] > 1
        return m.down_proj(m.hidden(x.reshape(rows, -1, D))).view(rows, *sizes)

    module = Computed(compute).to(DEVICE)
    assert fuse(module).swapped == {"": "Computed -> gated_mlp (silu)"}


@pytest.mark.parametrize("name", GUARDS)
def test_it_is_recomputed_only_with_the_same_results(name):
    compute, parts, _ = GUARDS[name]
    module = Computed(compute, **copy.deepcopy(parts)).to(DEVICE, torch.float64)
    eager, x = copy.deepcopy(module), 10 * randn(2, 3, D, dtype=torch.float64)
    swapped = fuse(module, verify=False).swapped
    assert swapped in ({}, {"": "Computed -> recomputed"})
    assert swapped or not name.startswith("clamped")
    for training in (True, False) if swapped else ():
        ours, theirs = (
            torch.autograd.grad(m.train(training)(x).sum(), [x, *m.parameters()], allow_unused=True)
            for m in (module, eager)
        )
        assert all(a is b or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("limit", [5.0, 20.0, 1e4])
@pytest.mark.parametrize("compute", [clamped_before, clamped_after, clamped_hidden, clamped_result])
def test_a_limit_is_seen_wherever_it_is(compute, limit):
    assert fuse(Computed(compute, limit=limit).to(DEVICE), save="preact").swapped == {}


class ClampedInHalf(Computed):
    """As T5's: another function in one dtype."""

    def hidden(self, x):
        h = super().hidden(x)
        return h.clamp(-0.1, 0.1) if h.dtype == torch.bfloat16 else h


class Widening(Computed):
    def forward(self, x):
        return super().forward(x).float()


@pytest.mark.parametrize("kind", [ClampedInHalf, Widening])
def test_fused_in_the_dtypes_that_were_seen_to_be_the_same(kind):
    module, x = kind().to(DEVICE), randn(2, 3, D)
    eager = copy.deepcopy(module)
    assert fuse(module).swapped == {"": f"{kind.__name__} -> gated_mlp (silu)"}
    assert is_fused(module, x)
    x = x.bfloat16()
    assert torch.equal(module.bfloat16()(x), eager.bfloat16()(x))
    assert not is_fused(module, x)
    assert fuse(eager, save="preact").swapped == {}


class Config:
    is_double = False


class Tuned(Computed):
    """A number, a flag, a function, a class's number and a configuration's."""

    factor = 1.0

    def __init__(self):
        super().__init__(scale=1.0, bypass=False, fn=F.silu, config=Config())

    def hidden(self, x):
        h = self.fn(self.gate_proj(x)) * self.up_proj(x)
        h = h * 2 if self.config.is_double or hasattr(self, "late") else h
        h = h * 2 if getattr(self.config, "late", False) else h
        return h if self.scale == 1.0 and self.factor == 1.0 else h * self.scale * self.factor

    def forward(self, x):
        return x if self.bypass else super().forward(x)


CHANGES = {
    "number": lambda m: setattr(m, "scale", 0.5),
    "number of the class": lambda m: setattr(m, "factor", 0.5),
    "flag": lambda m: setattr(m, "bypass", True),
    "function": lambda m: setattr(m, "fn", F.gelu),
    "configuration": lambda m: setattr(m.config, "is_double", True),
    "was not there": lambda m: setattr(m, "late", 1),
    "was not in the configuration": lambda m: setattr(m.config, "late", True),
    "bias": lambda m: setattr(m.gate_proj, "bias", nn.Parameter(torch.ones(H, device=DEVICE))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_its_forward_reads_must_still_hold(change):
    module, x = Tuned().to(DEVICE), randn(2, 3, D)
    eager = copy.deepcopy(module)
    assert fuse(module, verify=False).swapped == {"": "Tuned -> gated_mlp (silu)"}
    assert is_fused(module, x)
    twin = copy.deepcopy(module)
    change(module)
    change(eager)
    torch.testing.assert_close(module(x), eager(x), rtol=0, atol=0)
    assert is_fused(twin, x)


def test_a_layer_that_came_later_runs():
    module, x = (
        OwnSequential(nn.Linear(D, H), nn.SiLU(), nn.Dropout(0.0), nn.Linear(H, D)),
        randn(3, D),
    )
    fuse(module.to(DEVICE))
    assert is_fused(module, x)
    module.append(nn.Tanh())
    assert module(x).abs().max() <= 1


class Halved(torch.Tensor):
    """A weight that stands for half of what it holds, as quantized ones do."""

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
    eager = unfuse(copy.deepcopy(module))
    with torch.no_grad():
        eager.first.weight.div_(2)
    weight = nn.Parameter(module.first.weight.detach().as_subclass(Halved))
    module.first.weight = weight
    assert not is_fused(module, x)
    torch.testing.assert_close(module(x), eager(x))
    # and is left where it is there from the beginning
    other = Plain().to(DEVICE)
    other.first.weight = weight
    assert fuse(other).swapped == {}
