"""fuse: F.dropout on an MLP's result trains fused; another one is named, with its bytes."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from own_mlps import DropsAfter, Gated, Plain, Rate, is_fused
from support import DEVICE, randn, saved_bytes
from swap_cases import results
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusedckpt import fuse, report
from fusedckpt.layers.fallbacks import NotFused

T, D, H, P = 5, 12, 20, 0.4


class SeedOss(Gated):
    def __init__(self, p=P):
        super().__init__(bias=True)
        self.residual_dropout = p

    def forward(self, x):
        y = super().forward(x)
        return F.dropout(y, p=self.residual_dropout, training=self.training)


class DropsResult(Plain):
    """Drops its result by a function of that, a rate and its mode."""

    def __init__(self, drop, p=P):
        super().__init__()
        self.drop_rate, self.drop = p, drop

    def forward(self, x):
        return self.drop(super().forward(x), self.drop_rate, self.training)


def in_place(y, p, training):
    return F.dropout(y, p, training, True) if p > 0 else y


MAKES = {
    "SeedOss": (SeedOss, "residual_dropout"),
    # positional, by torch's own function
    "torch's": (partial(DropsResult, torch.dropout), "drop_rate"),
    "in place": (partial(DropsResult, in_place), "drop_rate"),
    "module": (DropsAfter, "drop.p"),
}


class WrittenByModule(DropsAfter):
    def __init__(self, p=P):
        super().__init__()
        self.drop = nn.Dropout(p, inplace=True)


DRAWS = {name: (make, name == "in place") for name, (make, _) in MAKES.items()}
DRAWS["module in place"] = (WrittenByModule, True)
MAKES["module in place"] = (WrittenByModule, "drop.p")


class DropsBoth(Plain):
    """A module on the hidden layer, a number on the result."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop_rate = nn.Dropout(P), P

    def forward(self, x):
        y = self.second(self.inner(self.act(self.first(x))))
        return F.dropout(y, self.drop_rate, self.training)


def pair(make, dtype=torch.float64, **options):
    module = make(**options).to(DEVICE, dtype)
    return module, copy.deepcopy(module)


def seeded(fn, *args):
    torch.manual_seed(3)
    return fn(*args)


@pytest.mark.parametrize(("make", "rate"), MAKES.values(), ids=list(MAKES))
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_it_trains_fused_and_draws_what_it_did(make, rate, p):
    module, eager = pair(make, p=0.1)
    x = randn(T, D, dtype=torch.float64)
    said = fuse(module)
    assert said.swapped
    assert "not run fused" not in str(said)
    # the rate is that of the call
    for model in (module, eager):
        owner, _, name = rate.rpartition(".")
        setattr(model.get_submodule(owner), name, p)
    for training in (True, False):
        ours, theirs = (seeded(results, m.train(training), x) for m in (module, eager))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert is_fused(module, x)
    module.train()(x)
    assert said.fallbacks == {}
    [found] = report(module, x.detach()).fused
    assert (found.reason, found.extra_bytes) == (None, 0)


class Drawing(TorchDispatchMode):
    """Notes the operations of a dropout: the first draw, and products behind it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        is_draw = name in ("bernoulli_", "native_dropout")
        if is_draw or (self.names and name in ("mul", "mul_")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("make", "is_in_place"), DRAWS.values(), ids=list(DRAWS))
def test_it_draws_by_the_same_operations(make, is_in_place):
    """A GPU's dropout draws other numbers in place than out of place."""
    module, eager = pair(make, p=P)
    assert fuse(module).swapped
    x, names = randn(T, D, dtype=torch.float64), []
    for model in (module, eager):
        with Drawing() as drawing:
            model(x)
        names.append(drawing.names)
    assert names[0] == names[1]
    assert ("mul_" in names[0]) == is_in_place
    assert is_fused(module.eval(), x)


def test_it_saves_the_input_and_a_mask():
    module, x = SeedOss().to(DEVICE), randn(T, D)
    mask = saved_bytes(lambda y: F.dropout(y, P), [randn(T, D)])
    said = fuse(module)
    assert saved_bytes(module, [x]) == 4 * T * D + mask
    before, after = said.saved[""]
    assert (before, after) == (4 * (D + 4 * H) + mask / T, 4 * D + mask / T)


def test_two_dropouts_run_fused_by_seeds():
    module, x = DropsBoth().to(DEVICE), randn(T, D)
    said = fuse(module)
    assert torch.equal(seeded(module, x), seeded(module, x))
    assert saved_bytes(module, [x]) == 4 * T * D + 2 * 8
    assert said.fallbacks == {}
    share = (module(randn(400, D)) == 0).double().mean().item()
    assert abs(share - P) < 0.05


class Everywhere(Plain):
    """One number for the hidden layer and for the result."""

    def __init__(self, p):
        super().__init__()
        self.drop_rate = p

    def forward(self, x):
        h = F.dropout(self.act(self.first(x)), self.drop_rate, self.training)
        return F.dropout(self.second(h), self.drop_rate, self.training)


DROPS = {
    "squared": lambda y, p, training: F.dropout(y, p**2, training),
    "capped": lambda y, p, training: F.dropout(y, min(p, 0.5), training),
    "alpha": lambda y, p, training: F.alpha_dropout(y, p, training),
    "channels": lambda y, p, training: F.dropout1d(y, p, training),
    "twice": lambda y, p, training: F.dropout(F.dropout(y, p, training), p, training),
}
OTHERS = {name: (partial(DropsResult, drop), "drop_rate") for name, drop in DROPS.items()}
OTHERS |= {"inside, too": (Everywhere, "drop_rate"), "inside": (Rate, "dropout")}


@pytest.mark.parametrize(("make", "name"), OTHERS.values(), ids=list(OTHERS))
def test_others_are_named_with_their_bytes_before_and_after_a_step(make, name):
    module = make(P).to(DEVICE)
    eager, x = copy.deepcopy(module), randn(1, T, D)
    said = fuse(module, save="preact")
    assert said.swapped
    assert said.fallbacks == {}
    before, after = said.saved[""]
    more = round(before - after)
    assert more >= 4 * H
    reason = NotFused("dropout", name)
    line = f"1 x {said.swapped['']}: {reason}; {reason.remedy} (root): up to {more:,} bytes"
    assert f"not run fused in training: 1 of 1\n  {line}" in str(said)
    for training in (True, False):
        ours, theirs = (seeded(m.train(training), x) for m in (module, eager))
        torch.testing.assert_close(ours, theirs)
    module.train()(x)
    assert said.fallbacks == {"": ("dropout", name)}
    assert f"not run fused: 1 of 1\n  {line}" in str(said)
    [found] = report(module, x.detach()).fused
    assert found.reason == str(said.fallbacks[""])
    assert found.extra_bytes is not None
    assert 0 < found.extra_bytes <= T * more
    setattr(module, name, 0.0)
    assert "not run fused" not in str(fuse(module, save="preact"))


class Config:
    rate = 0.0


class OfConfig(Plain):
    def __init__(self, p):
        super().__init__()
        self.config = Config()
        self.config.rate = p

    def forward(self, x):
        return F.dropout(super().forward(x), self.config.rate, self.training)


@pytest.mark.parametrize("make", [partial(DropsResult, lambda y, p, _: F.dropout(y, p)), OfConfig])
def test_what_draws_by_another_rule_is_left(make):
    assert fuse(make(P).to(DEVICE)).left[""].key == "random"


def test_parts_in_different_modes_run_the_original():
    """Whose mode decides, the recording did not see."""

    class OfChild(DropsResult):
        def forward(self, x):
            return F.dropout(Plain.forward(self, x), self.drop_rate, self.second.training)

    module, eager = pair(OfChild, drop=None)
    said, x = fuse(module, save="preact"), randn(T, D, dtype=torch.float64)
    torch.testing.assert_close(seeded(module, x), seeded(eager, x), rtol=1e-12, atol=1e-12)
    assert said.fallbacks == {}
    module.second.eval()
    eager.second.eval()
    assert torch.equal(seeded(module, x), seeded(eager, x))
    assert said.fallbacks == {"": ("dropout", "drop_rate")}
