"""Gradients where a private name of torch is missing: a process for each name, forked with torch.

Prints a line for each name of the command line: the name, and "right" or an error.
"""

import contextlib
import importlib.util
import operator
import os
import sys
import traceback
from functools import partial
from pathlib import Path

# imported once, before the forks
import numpy.random  # noqa: F401  # pyright: ignore
import torch
import torch._dynamo
import torch.distributed.tensor
import torch.fx.experimental.proxy_tensor
import torch.nn.functional as F
import torch.utils.flop_counter
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint as stock

with contextlib.suppress(ImportError):
    import triton.tools.tensor_descriptor  # noqa: F401

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


def gradients(model, x, run, how="plain"):
    """Return result and gradients, then buffers."""
    given = [x, *(p for n, p in model.named_parameters() if not n.startswith("apart."))]
    y = run(model, x)
    if how == "reentrant":
        # it takes no torch.autograd.grad
        y.square().sum().backward()
        found = [p.grad for p in given]
    elif how == "batched":
        dys = torch.linspace(-1, 1, 3 * y.numel(), dtype=y.dtype).view(3, *y.shape)
        found = torch.autograd.grad(y, given, dys, is_grads_batched=True)
    elif how == "twice":
        first = torch.autograd.grad(y.square().sum(), given, retain_graph=True)
        found = (*first, *torch.autograd.grad(y.sin().sum(), given))
    elif how == "second":
        first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        found = torch.autograd.grad(sum(g.square().sum() for g in first), given)
    else:
        found = torch.autograd.grad(y.square().sum(), given)
    buffers = model.buffers() if how in ("plain", "batched") else ()
    return [y.detach(), *found, *buffers]


def check(library):
    """Compare every way to run and to differentiate with eager, in float64."""
    ways = {
        "plain": once,
        "ours": library.checkpoint,
        "debug": lambda m, x: library.checkpoint(m, x, debug=True),
        "stock": lambda m, x: stock(m, x, use_reentrant=False),
        "reentrant": lambda m, x: stock(m, x, use_reentrant=True),
        "nested": lambda m, x: library.checkpoint(partial(library.checkpoint, m), x),
        "wrapped": lambda m, x: library.Checkpoint(m)(x),
        "ahead": ahead(library),
    }
    if not issubclass(library.Checkpoint, CheckpointWrapper.__bases__):
        # it raises where torch has no distributed package
        del ways["wrapped"]
    for save, is_apart in (("inputs", True), ("preact", False)):
        # of checkpoints, each at one level
        chosen = [way for i, way in enumerate(ways) if i < 2 or i % 2 == is_apart]
        for way in chosen:
            run = ways[way]
            hows = ("plain", "batched", "twice", "second") if way in ("plain", "ours") else (way,)
            for how in hows:
                found = []
                for model, call in zip(models(library, save, is_apart), (once, run), strict=True):
                    x = torch.linspace(-1, 1, 5 * D).view(5, D).requires_grad_()
                    found.append(gradients(model, x, call, how))
                expected, mine = found
                torch.testing.assert_close(
                    mine,
                    expected,
                    msg=lambda text: f"{way} {how} {save}: {text}",  # noqa: B023
                )


def ahead(library):
    def run(model, x):
        y = library.checkpoint(model, x)
        library.prefetch_recompute(y)
        return y

    return run


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

    ours, theirs = (gradients(model, x, run, "cast") for model in (fused, eager))
    truth = gradients(eager.double(), x.detach().double().requires_grad_(), once, "cast")
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        errors = Errors(torch.bfloat16)
        errors.add(mine.double(), other.double(), true)
        assert errors.problem(floor=2.0**16) is None, errors.problem()


def run(name):
    torch.set_default_dtype(torch.float64)
    library = remove(name)
    check(library)
    check_autocast(library)


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
