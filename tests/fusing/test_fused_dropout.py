"""fuse: MLPs with dropout inside, whose hidden layer is dropped by a seed while they train."""

import copy
import math
from functools import partial

import pytest
import torch
from own_mlps import (
    DroppingSequential,
    DropsBefore,
    DropsInside,
    Gated,
    InList,
    Plain,
    Rate,
    is_fused,
)
from support import DEVICE, compare, randn, saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import fuse, reference, unfuse

T, D, H, P, Q = 7, 12, 20, 0.4, 0.25


class DropsGated(Gated):
    """As T5's, which casts to the last weight's dtype."""

    def __init__(self, p=P):
        super().__init__(bias=True)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        h = self.drop(self.act(self.v(x)) * self.w(x))
        if h.dtype != self.o.weight.dtype:
            h = h.to(self.o.weight.dtype)
        return self.o(h)


class DropsTwice(DropsInside):
    """One dropout for both, in place."""

    def __init__(self, p=P):
        super().__init__(p=p)
        self.drop.inplace = True

    def forward(self, x):
        return self.drop(super().forward(x))


def both():
    module = DroppingSequential(P)
    module[4].p = Q
    return module


def of_mlp(drops, first, second):
    """Return the reference of an MLP, of x and the parameters of these modules."""

    def fn(x, *weights):
        return reference.mlp(x, *weights, **drops)

    return fn, lambda module: [
        p for n in (first, second) for p in module.get_submodule(n).parameters()
    ]


def _gated(x, gate, gate_bias, up, up_bias, down, down_bias):
    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    return reference.gated_mlp(x, gate, up, down, **biases, dropout=P)


def _packed(x, both, bias, down, down_bias):
    (up, gate), (up_bias, gate_bias) = both.chunk(2), bias.chunk(2)
    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    return reference.gated_mlp(x, gate, up, down, "gelu", **biases, dropout=P)


# the module, how many dropouts it has, its reference and the parameters that this reads
CALLS = {
    "mlp": (partial(DropsInside, p=P), 1, *of_mlp({"dropout": P}, "first", "second")),
    "sequential": (both, 2, *of_mlp({"dropout": P, "output_dropout": Q}, "0", "3")),
    "twice": (DropsTwice, 2, *of_mlp({"dropout": P, "output_dropout": P}, "first", "second")),
    "gated": (
        DropsGated,
        1,
        _gated,
        lambda m: [*m.v.parameters(), *m.w.parameters(), *m.o.parameters()],
    ),
    "packed": (partial(InList, P), 1, _packed, lambda m: list(m.parameters())),
}


@pytest.fixture(params=CALLS)
def case(request):
    """The fused module in training, how often it drops, its reference, and what that reads."""
    make, count, fn, weights_of = CALLS[request.param]
    module = make().to(DEVICE)
    # checked once for each, below
    report = fuse(module, verify=False)
    assert report.swapped
    yield module, count, fn, weights_of(module)
    # of the last call
    assert report.fallbacks == {}


def seeded(fn, *given, seed=5):
    torch.manual_seed(seed)
    return fn(*given)


def gradients(fn, x, weights, seed=5):
    y = seeded(fn, x, seed=seed)
    return [y, *torch.autograd.grad(y.tanh().sum(), [x, *weights])]


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_equals_the_reference_of_the_same_seed(case, path, save):
    module, _, fn, weights = case
    module.save = save

    def fused(x, *weights):
        names = [next(n for n, p in module.named_parameters() if p is own) for own in parameters]
        call = torch.func.functional_call
        return seeded(partial(call, module, dict(zip(names, weights, strict=True))), (x,))

    parameters = weights

    def inputs():
        return [randn(T, D), *(p.detach().clone().requires_grad_() for p in parameters)]

    compare(fused, partial(seeded, fn), inputs)
    x = randn(T, D)
    ours, theirs = seeded(module, x), seeded(fn, x, *weights)
    assert torch.equal(ours == 0, theirs == 0)


def test_saved_is_the_input_and_a_seed_each(case):
    module, count, _, _ = case
    assert saved_bytes(module, [randn(T, D)]) == 4 * T * D + 8 * count
    # its numbers pass the check that the fixture leaves out
    assert fuse(unfuse(copy.deepcopy(module))).swapped


@pytest.mark.parametrize("p", [0.1, 1.0])
def test_share_of_zeros(p):
    module = DropsInside(nn.SiLU(), p=p, out=H).to(DEVICE)
    assert fuse(module).swapped
    with torch.no_grad():
        # what is read is shown as it is
        module.second.weight.copy_(torch.eye(H))
        module.second.bias.zero_()
    x = randn(300, D)
    y, h = module(x), module.eval()(x)
    share = (y == 0).double().mean().item()
    assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / y.numel())
    torch.testing.assert_close(y * (1 - p), torch.where(y == 0, 0.0, h))


WRAPS = {
    "torch": lambda fn: partial(checkpoint, fn, use_reentrant=False),
    "nested": lambda fn: partial(fusedckpt.checkpoint, partial(fusedckpt.checkpoint, fn)),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
def test_checkpoints_replay_it(case, wrap):
    module, _, _, weights = case

    def fn(x):
        # behind other draws, and before some
        return module(x + torch.rand_like(x)) + torch.rand_like(x)

    x = randn(T, D)
    assert equal(gradients(wrap(fn), x, weights), gradients(fn, x, weights))


@pytest.mark.parametrize("case", ["twice", "packed"], indirect=True)
def test_compiled_in_one_graph(case):
    module, _, _, weights = case
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = randn(T, D)
    found = gradients(compiled, x, weights)
    assert not torch.equal(found[0], gradients(compiled, x, weights, seed=6)[0])
    module.eval()
    torch.testing.assert_close(gradients(compiled, x, weights), gradients(module, x, weights))


def test_the_rate_is_that_of_the_call():
    module, x = DropsInside(p=P).to(DEVICE), randn(T, D)
    report = fuse(module)
    plain = module.eval()(x)
    module.train().drop.eval()
    assert torch.equal(module(x), plain)
    module.train().drop.p = 0.0
    assert torch.equal(module(x), plain)
    module.drop.p = 1.0
    torch.testing.assert_close(module(x), module.second.bias.expand(T, D))
    assert report.fallbacks == {}


CHANGES = {
    "hooked": (
        lambda m: m.drop.register_forward_hook(lambda *_: None),
        ("hook", "drop"),
    ),
    "replaced": (
        lambda m: setattr(m, "drop", nn.AlphaDropout(P)),
        ("child", "drop"),
    ),
    # it need not be called there
    "alone in training": (lambda m: m.eval().drop.train(), ("dropout", "drop")),
}


@pytest.mark.parametrize(("alter", "reason"), CHANGES.values(), ids=list(CHANGES))
def test_a_changed_dropout_runs_the_original(alter, reason):
    module, x = DropsInside(p=P).to(DEVICE), randn(T, D)
    report = fuse(module, save="preact")
    alter(module)
    eager = unfuse(copy.deepcopy(module))
    torch.testing.assert_close(seeded(module, x), seeded(eager, x))
    assert report.fallbacks == {"": reason}


class Again(DropsInside):
    def forward(self, x):
        return self.second(self.drop(self.drop(self.act(self.first(x)))))


class TwoDropouts(DropsInside):
    def __init__(self, p):
        super().__init__(p=p)
        self.more = nn.Dropout(p)

    def forward(self, x):
        return self.second(self.more(self.drop(self.act(self.first(x)))))


class OfOne(DropsGated):
    def forward(self, x):
        return self.o(self.drop(self.w(x)) * self.act(self.v(x)))


class Unread(Plain):
    """What it drops, nobody reads."""

    def forward(self, x):
        h = self.act(self.first(x))
        self.drop(h)
        return self.second(h)


ELSEWHERE = {
    "before the activation": (partial(DropsBefore, p=P), "drop"),
    "twice": (partial(Again, p=P), "drop"),
    "by two": (partial(TwoDropouts, P), "more"),
    "of a gate": (OfOne, "drop"),
    "for nothing": (partial(Unread, p=P), "drop"),
    "a number": (partial(Rate, P), "dropout"),
}


@pytest.mark.parametrize(("make", "name"), ELSEWHERE.values(), ids=list(ELSEWHERE))
def test_other_dropouts_run_the_original(make, name):
    module = make().to(DEVICE, torch.float64)
    eager, x = copy.deepcopy(module), randn(T, D, dtype=torch.float64)
    report = fuse(module)
    assert report.swapped
    for training in (True, False):
        ours, theirs = (seeded(m.train(training), x) for m in (module, eager))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert is_fused(module, x)
    # run again with the same masks, its input saved
    assert saved_bytes(module.train(), [x]) == 8 * T * D
    assert report.fallbacks == {}
    report = fuse(unfuse(module), save="preact")
    module(x)
    assert report.fallbacks == {"": ("dropout", name)}


def test_children_are_left_to_the_block():
    """Of a block that drops inside, none is looked at for itself."""
    report = fuse(nn.Sequential(InList(P)).to(DEVICE))
    assert (report.swapped.keys(), report.left) == ({"0"}, {})
