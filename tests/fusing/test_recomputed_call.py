"""Modules with a state, which the recompute finds as the forward found it."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn
from torch.nn.utils import parametrizations

from fusedckpt import fuse, report, unfuse
from fusedckpt.layers.fallbacks import take_fallback
from fusedckpt.memory import saved_tensors

D, BIG = 4, 1 << 15


class AttentionAround(nn.Module):
    """Calls attention between what a test adds."""

    def __init__(self, after):
        super().__init__()
        self.q, self.out, self.after = nn.Linear(D, D), nn.Linear(D, D), after
        self.n, self.scale, self.seen, self.memory = 0, 1.0, [], None
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("table", torch.zeros(BIG))

    def forward(self, x):
        q = k = self.q(x)
        if self.memory is not None:
            k = torch.cat([self.memory, q], 1)
        return self.out(self.after(self, F.scaled_dot_product_attention(q, k, k), q))


def count(self, y, q):
    self.n += 1
    return y * self.n


def append(self, y, q):
    self.seen.append(len(self.seen) + 1.0)
    return y * sum(self.seen)


def remember(self, y, q):
    self.memory = q.detach()
    return y


def track(self, y, q):
    self.mean.mul_(0.5).add_(y.detach().mean())
    return y * (1 + self.mean.clone())


class LargeTable(AttentionAround):
    def forward(self, x):
        self.table.add_(1.0)
        return super().forward(x) * self.table[0].clone()


AFTER = {
    "nothing": lambda self, y, q: y,
    "counter": count,
    "list": append,
    "memory": remember,
    "running mean": track,
    "python random": lambda self, y, q: y * random.random(),
    "numpy random": lambda self, y, q: y * float(np.random.rand()),
    "scale": lambda self, y, q: y * self.scale,
    "dropout of its mode": lambda self, y, q: F.dropout(y, 0.0 if self.training else 0.5),
}


def models(after="nothing", kind=AttentionAround):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.LayerNorm(D), kind(AFTER[after])).double().to(DEVICE)
    fused = copy.deepcopy(eager)
    assert "recomputed but for attention" in fuse(fused).swapped["1"]
    return eager, fused


def step(model, between=len):
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    x = torch.randn(2, 3, D, dtype=torch.float64, device=DEVICE, requires_grad=True)
    loss = (model(x) + model(2 * x)).square().sum()
    between([*model.children()])
    loss.backward()
    draws = random.random(), np.random.rand(), torch.rand(())
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers(), *draws]


def scale(layers):
    layers[1].scale = 3.0


def freeze(layers):
    layers[1].q.requires_grad_(False)


def evaluate(layers):
    layers[1].eval()


def replace(layers):
    layers[1].mean = torch.full_like(layers[1].mean, 7.0)


BETWEEN = {"nothing": len, "scale": scale, "freeze": freeze, "eval": evaluate, "buffer": replace}


def assert_same(eager, fused):
    torch.testing.assert_close(fused, eager)


@pytest.mark.parametrize("after", AFTER)
def test_of_its_own(after):
    eager, fused = models(after)
    assert_same(step(eager), step(fused))
    assert_same(step(eager), step(fused))
    states = [(m[1].n, m[1].seen, m[1].scale, m[1].training) for m in (eager, fused)]
    assert states[0] == states[1]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("after", ["scale", "running mean", "dropout of its mode"])
def test_between_forward_and_backward(after, between):
    eager, fused = models(after)
    assert_same(*(step(model, BETWEEN[between]) for model in (eager, fused)))
    assert [p.requires_grad for p in fused.parameters()] == [
        p.requires_grad for p in eager.parameters()
    ]
    assert fused[1].training == eager[1].training


def test_a_large_buffer_that_its_code_writes():
    eager, fused = models(kind=LargeTable)
    assert_same(step(eager), step(fused))


def test_functional_call():
    grads = []
    for model in models():
        given = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        torch.manual_seed(0)
        x = torch.randn(2, 3, D, dtype=torch.float64, device=DEVICE)
        torch.func.functional_call(model, given, (x,)).square().sum().backward()
        grads.append([p.grad for p in given.values()])
    assert_same(*grads)


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_power_iteration(norm):
    eager, fused = models()
    unfuse(fused)
    for model in (eager, fused):
        torch.manual_seed(1)
        norm(model[1].q)
    fuse(fused)
    assert_same(step(eager), step(fused))


def test_a_result_in_an_attribute_has_its_gradient():
    def store(self, y, q):
        self.last = y
        return y

    found = []
    for model in models():
        model[1].after = store
        y = model(
            torch.randn(2, 3, D, dtype=torch.float64, generator=torch.manual_seed(2)).to(DEVICE)
        )
        model[1].last.retain_grad()
        y.square().sum().backward()
        found.append([model[1].last.grad])
    assert_same(*found)


def test_arguments_named_as_a_checkpoints():
    class NamedDebug(AttentionAround):
        def forward(self, x, debug=1.0):
            return super().forward(x) * debug

    eager, fused = models(kind=NamedDebug)
    x = torch.randn(2, 3, D, dtype=torch.float64, device=DEVICE)
    grads = [
        torch.autograd.grad(m[1](x, debug=2.0).square().sum(), [*m[1].parameters()])
        for m in (eager, fused)
    ]
    assert_same(*grads)


class Counts(nn.Linear):
    """Changes its attributes and buffers."""

    def __init__(self):
        super().__init__(D, D)
        self.n = 0
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("cache", None)

    def forward(self, y):
        self.n += 1
        self.mean.mul_(0.5).add_(y.detach().mean())
        if self.cache is None:
            self.register_buffer("cache", torch.full_like(self.mean, 2.0))
        return super().forward(y) * self.n * (1 + self.mean.clone()) * self.cache


class Passes(nn.Module):
    """Passes a module to attention."""

    def __init__(self, given):
        super().__init__()
        self.attention, self.given = TakesModule(lambda self, y, q: self.call(y)), given

    def forward(self, x):
        return self.attention(x, self.given)


class TakesModule(AttentionAround):
    def forward(self, x, given):
        # a module would become a child
        self.call = getattr(given, "mix", given.__call__)
        return super().forward(x)


GIVEN = {
    "counter": Counts,
    "batch norm": lambda: nn.Sequential(
        nn.Flatten(0, 1), nn.BatchNorm1d(D), nn.Unflatten(0, (2, 3))
    ),
    "dropout": lambda: nn.Dropout(0.5),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(D, D)),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_module_among_the_arguments(given):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.LayerNorm(D), Passes(GIVEN[given]())).double().to(DEVICE)
    fused = copy.deepcopy(eager)
    assert "recomputed but for attention" in fuse(fused).swapped["1.attention"]
    for _ in range(2):
        assert_same(step(eager), step(fused))
        assert take_fallback(fused[1].attention) is None
    assert getattr(fused[1].given, "n", 0) == getattr(eager[1].given, "n", 0)


def test_a_module_that_holds_the_one_it_is_passed_to():
    """Its state is that of all modules beside: it is left, and named."""

    class PassesItself(Passes):
        def forward(self, x):
            return self.attention(x, self)

        def mix(self, y):
            return y * 2

    eager = nn.Sequential(nn.LayerNorm(D), PassesItself(None)).double().to(DEVICE)
    fused = copy.deepcopy(eager)
    fuse(fused)
    assert_same(step(eager), step(fused))
    assert take_fallback(fused[1].attention).key == "module"


class OddMLP(nn.Module):
    """An MLP that no program computes."""

    def __init__(self):
        super().__init__()
        self.q, self.out, self.scale = nn.Linear(D, 16 * D), nn.Linear(16 * D, D), 1.0

    def forward(self, x):
        h = self.q(x)
        return self.out((h.sin() * h.cos().tanh()).cumsum(-1) * 0.1) * self.scale


@pytest.mark.parametrize("between", ["scale", "freeze"])
def test_a_recomputed_mlp(between):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.LayerNorm(D), OddMLP()).double().to(DEVICE)
    fused = copy.deepcopy(eager)
    assert fuse(fused).swapped["1"] == "OddMLP -> recomputed"
    assert_same(*(step(model, BETWEEN[between]) for model in (eager, fused)))


class OddScaled(OddMLP):
    """With a buffer: as one of several numbers, one of one number on a GPU never met meta."""

    def __init__(self):
        super().__init__()
        # so narrow that the comparison does not shrink it
        self.q, self.out = nn.Linear(D, 8 * D), nn.Linear(8 * D, D)
        self.register_buffer("gains", torch.linspace(0.5, 1.5, 8 * D))

    def forward(self, x):
        h = self.q(x) * self.gains
        return self.out((h.sin() * h.cos().tanh()).cumsum(-1) * 0.1)


def test_a_recomputed_mlp_with_a_buffer():
    """Its bytes are counted on meta tensors, where its buffers must be, too."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.LayerNorm(D), OddScaled()).double().to(DEVICE)
    fused = copy.deepcopy(eager)
    said = fuse(fused)
    assert said.swapped["1"] == "OddScaled -> recomputed"
    before, after = said.saved["1"]
    assert after < before / 2
    assert_same(*(step(model) for model in (eager, fused)))


def test_a_recomputed_mlp_in_a_full_graph():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.LayerNorm(D), OddMLP()).to(DEVICE)
    fused = copy.deepcopy(eager)
    fuse(fused)
    x = torch.randn(2, 3, D, device=DEVICE)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    grads = [
        torch.autograd.grad(run(x).square().sum(), [*model.parameters()])
        for run, model in ((compiled, fused), (eager, eager))
    ]
    assert_same(*grads)


@pytest.mark.parametrize("attention", [True, False])
def test_nothing_but_saved_tensors_lives_on(attention):
    """Neither a norm's output nor q, k and v: autograd keeps pack hooks, which must hold none."""
    width, rows = 64, 256

    class BareAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)

        def forward(self, x):
            q, k, v = self.qkv(x).view(2, rows, 3, 2, -1).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model = nn.Sequential(
        nn.LayerNorm(width), BareAttention(), nn.LayerNorm(width), BareAttention()
    )
    fuse(model, attention=attention)
    found = report(model, torch.randn(2, rows, width))
    # states of random number generators
    assert sum(found.held.values()) < 2 * 16384 < 2 * rows * width * 4


class WritesParameter(AttentionAround):
    """Writes one of its own parameters before it reads it, every so many calls."""

    every = 1

    def __init__(self, after):
        super().__init__(after)
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x):
        self.n += 1
        if self.n % self.every == 0:
            self.write()
        return super().forward(x * self.gain)

    def write(self):
        with torch.no_grad():
            self.gain.mul_(1.5)
            self.out.weight.clamp_(-0.1, 0.1)


def one_call(model):
    x = torch.ones(2, 3, D, dtype=torch.float64, device=DEVICE, requires_grad=True)
    model.zero_grad()
    model(x).square().sum().backward()
    return [
        x.grad,
        *(p.grad for p in model.parameters()),
        *(p.detach() for p in model.parameters()),
    ]


@pytest.mark.parametrize("is_read_again", [False, True])
def test_a_module_that_writes_its_own_parameter(is_read_again):
    """Runs as eager in its first call and in all later ones, and a norm of it, too."""
    eager, fused = models(kind=WritesParameter)
    if is_read_again:
        eager.append(nn.LayerNorm(D).double().to(DEVICE))
        fused.append(copy.deepcopy(eager[2]))
        fuse(fused)
    for _ in range(3):
        assert_same(one_call(eager), one_call(fused))
    assert str(take_fallback(fused[1])).startswith("its forward writes its parameter gain")
    unfuse(fused)
    assert not [name for name in vars(fused[1]) if name.startswith("_fusedckpt")]


def test_a_parameter_that_is_written_for_the_first_time_later(monkeypatch):
    monkeypatch.setattr(WritesParameter, "every", 2)
    eager, fused = models(kind=WritesParameter)
    assert_same(one_call(eager), one_call(fused))
    one_call(eager)
    with pytest.raises(RuntimeError, match=r"its forward wrote its parameter (gain|out.weight)"):
        one_call(fused)
    fused.load_state_dict(eager.state_dict())
    assert_same(one_call(eager), one_call(fused))


def test_a_batch_writes_no_parameter():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(D), WritesParameter(AFTER["nothing"])).to(DEVICE)
    before = copy.deepcopy(model.state_dict())
    fuse(model, batch=torch.ones(2, 3, D, device=DEVICE))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


class ByTable(AttentionAround):
    """Is called with a parameter of the module around it, as DeBERTa's attention is."""

    def __init__(self):
        super().__init__(AFTER["nothing"])
        self.project = nn.Linear(D, D)

    def forward(self, x, table):
        return super().forward(x + self.project(table))


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), ByTable()
        self.table = nn.Parameter(torch.ones(3, D))

    def forward(self, x):
        return self.attention(self.norm(x), self.table)


def test_a_parameter_among_the_arguments():
    """Hooks that save the recipe of the input return it as a tensor: it has to stay a leaf."""
    torch.manual_seed(0)
    eager = WithTable().to(DEVICE)
    fused = copy.deepcopy(eager)
    fuse(fused)
    for _ in range(3):
        found = []
        for model in (fused, eager):
            model.zero_grad()
            model(
                torch.linspace(-1, 1, 6 * D, device=DEVICE).view(2, 3, D)
            ).square().sum().backward()
            found.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*found)


class OwnCheckpoint(torch.autograd.Function):
    """Runs a function again in backward: a checkpoint as projects write it for themselves."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, *grads):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), grads, allow_unused=True)


class OwnCheckpointed(AttentionAround):
    def forward(self, x):
        return OwnCheckpoint.apply(super().forward, x, *self.parameters())


def test_a_checkpoint_of_its_own_saves_no_more():
    """Its input is saved by its own checkpoint, which autograd's hooks do not see."""
    eager, fused = models(kind=OwnCheckpointed)
    for _ in range(2):
        assert_same(one_call(eager), one_call(fused))
    x = torch.ones(2, 3, D, dtype=torch.float64, device=DEVICE, requires_grad=True)
    saved = []
    for model in (eager, fused):
        with saved_tensors() as log:
            model(x)
        saved.append(log.nbytes)
    assert saved[1] <= saved[0]
    assert str(take_fallback(fused[1])).startswith("autograd saves nothing")
