"""Gradients where a private name of torch is missing: a process for each name, forked with torch.

Prints a line for each name of the command line: the name, and "right" or an error.
"""

import contextlib
import importlib.util
import operator
import os
import sys
import traceback
from pathlib import Path

# imported once, before the forks
import numpy  # noqa: F401  # pyright: ignore
import torch
import torch.distributed.tensor
import torch.fx.experimental.proxy_tensor
import torch.nn.functional as F
import torch.utils.flop_counter
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint as stock

with contextlib.suppress(ImportError):
    import triton.language  # noqa: F401

WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
PRIVATE = Path(__file__).parents[2] / "fusedckpt" / "autograd" / "private.py"
D = 8


def remove(name):
    """Import the library as where torch has no such name."""
    real = operator.attrgetter

    def attrgetter(*paths):
        if name in paths:
            raise AttributeError(name)
        return real(*paths)

    spec = importlib.util.spec_from_file_location("fusedckpt.autograd.private", PRIVATE)
    private = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    module = sys.modules.get(name)
    if name == WRAPPER:
        sys.modules[name] = None
    operator.attrgetter = attrgetter
    spec.loader.exec_module(private)
    operator.attrgetter = real
    if name == WRAPPER:
        sys.modules[name] = module
        assert private.ActivationWrapper is nn.Module
    else:
        assert not private.PROBED[name]
    import fusedckpt
    from fusedckpt.autograd import backward

    assert backward.private is private
    return fusedckpt


class Eager(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(12, D)
        self.last, self.batch = nn.Linear(D, D), nn.BatchNorm1d(D)

    def block(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))

    def forward(self, x):
        return self.batch(F.silu(self.last(self.block(x))))


class Fused(Eager):
    """Ours, with a norm apart from its MLP and with one inside."""

    def __init__(self, library, save, is_apart):
        super().__init__()
        self.library, self.save = library, save
        self.apart = library.LayerNorm(D) if is_apart else None

    def block(self, x):
        mlp, weights = self.library.functional.mlp, (*self.fc1.parameters(), *self.fc2.parameters())
        if self.apart is None:
            spec = self.library.NormSpec("layer", self.norm.weight, self.norm.bias)
            return mlp(x, *weights, norm=spec, residual=True, save=self.save)
        self.apart.weight, self.apart.bias = self.norm.weight, self.norm.bias
        return x + mlp(self.apart(x), *weights, save=self.save)

    def forward(self, x):
        weight, bias = self.last.parameters()
        act = self.library.functional.linear_act
        return self.batch(act(self.block(x), weight, bias, "silu", save=self.save))


def once(model, x):
    return model(x)


def gradients(model, x, run=once, how="plain"):
    """Return result and gradients."""
    named = {n: p for n, p in model.named_parameters() if not n.startswith("apart.")}
    given = [x, *named.values()]
    y = run(model, x)
    if how == "batched":
        dys = torch.linspace(-1, 1, 3 * y.numel(), dtype=y.dtype).view(3, *y.shape)
        found = torch.autograd.grad(y, given, dys, is_grads_batched=True)
    elif how == "twice":
        first = torch.autograd.grad(y.square().sum(), given, retain_graph=True)
        second = torch.autograd.grad(y.sin().sum(), given)
        found = (*first, *second)
    elif how == "second":
        first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        found = torch.autograd.grad(sum(g.square().sum() for g in first), given)
    else:
        found = torch.autograd.grad(y.square().sum(), given, materialize_grads=True)
    return [y.detach(), *found]


def check(library):
    """Compare every way to run and to differentiate with eager, in float64."""
    ways = {
        "plain": once,
        "ours": library.checkpoint,
        "debug": lambda m, x: library.checkpoint(m, x, debug=True),
        "stock": lambda m, x: stock(m, x, use_reentrant=False),
        "reentrant": lambda m, x: stock(m, x, use_reentrant=True),
        "sequential": lambda m, x: library.checkpoint_sequential([m.block, m.last], 2, x),
        "nested": lambda m, x: library.checkpoint(lambda x: library.checkpoint(m, x).sin(), x),
        "wrapped": lambda m, x: library.Checkpoint(m)(x),
        "ahead": ahead(library),
    }
    if not issubclass(library.Checkpoint, CheckpointWrapper.__bases__):
        # it raises where torch has no distributed package
        del ways["wrapped"]
    for save, is_apart in (("inputs", True), ("preact", False)):
        for way, run in ways.items():
            hows = ("plain", "batched", "twice", "second")
            for how in hows if way in ("plain", "ours") else ("plain",):
                pair = models(library, save, is_apart)
                x = torch.randn(5, D, requires_grad=True)
                eager = {"nested": lambda m, x: m(x).sin(), "sequential": two}.get(way, once)
                if way == "reentrant":
                    # it takes no torch.autograd.grad
                    expected, found = by_backward(pair[0], x, once), by_backward(pair[1], x, run)
                else:
                    expected = gradients(pair[0], x, eager, how)
                    found = gradients(pair[1], x, run, how)
                if way in ("plain", "ours", "debug"):
                    expected += pair[0].buffers()
                    found += pair[1].buffers()
                assert_same(found, expected, f"{way} {how} {save}")


def assert_same(found, expected, name):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text: f"{name}: {text}")


def two(model, x):
    return model.last(model.block(x))


def ahead(library):
    def run(model, x):
        y = library.checkpoint(model, x)
        library.prefetch_recompute(y)
        return y

    return run


def by_backward(model, x, run):
    x = x.detach().requires_grad_()
    y = run(model, x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def models(library, save, is_apart):
    torch.manual_seed(0)
    eager, fused = Eager(), Fused(library, save, is_apart)
    fused.load_state_dict(eager.state_dict(), strict=False)
    if is_apart:
        fused.apart.weight, fused.apart.bias = fused.norm.weight, fused.norm.bias
    return eager, fused


def check_autocast(library):
    """Compare with eager by the error rule, under autocast."""
    from fusedckpt.fusing.accuracy import Errors

    eager, fused = (m.float() for m in models(library, "inputs", False))
    x = torch.randn(64, D, dtype=torch.float32, requires_grad=True)

    def run(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    ours, theirs = gradients(fused, x, run), gradients(eager, x, run)
    truth = gradients(eager.double(), x.detach().double().requires_grad_())
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        errors = Errors(torch.bfloat16)
        errors.add(mine.double(), other.double(), true)
        assert errors.problem(floor=2.0**16) is None, errors.problem()


def check_fuse(library):
    """A fused model has eager's gradients, whether fuse recognises it or not."""
    torch.manual_seed(0)
    eager, fused = Eager(), Eager()
    fused.load_state_dict(eager.state_dict())
    library.fuse(fused)
    x = torch.randn(5, D, requires_grad=True)
    for mine, theirs in zip(gradients(fused, x), gradients(eager, x), strict=True):
        torch.testing.assert_close(mine, theirs)


def run(name):
    torch.set_default_dtype(torch.float64)
    library = remove(name)
    check(library)
    check_autocast(library)
    if "_python_dispatch" in name:
        check_fuse(library)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        child = os.fork()
        if not child:
            try:
                run(name)
                print(name, "right", flush=True)
            except BaseException:
                print(name, repr(traceback.format_exc()), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
