"""Gradients where private names of torch are missing: a process for each group, forked with torch.

An argument is a group of names, joined by commas. Prints a line for each: the group, and "right"
or an error.
"""

import contextlib
import copy
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
from torch.utils.checkpoint import checkpoint as stock

with contextlib.suppress(ImportError):
    import triton.tools.tensor_descriptor  # noqa: F401

PRIVATE = Path(__file__).parents[2] / "fusedckpt" / "autograd" / "private.py"
D = 8


def remove(names):
    """Import the library as where torch has none of these names."""
    real = operator.attrgetter

    def attrgetter(*paths):
        for path in paths:
            if path in names:
                raise AttributeError(path)
        return real(*paths)

    spec = importlib.util.spec_from_file_location("fusedckpt.autograd.private", PRIVATE)
    private = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    operator.attrgetter = attrgetter
    spec.loader.exec_module(private)
    operator.attrgetter = real
    assert not any(private.PROBED[name] for name in names)
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
        "in place": lambda m, x: library.checkpoint_module(copy.copy(m))(x),
        "ahead": ahead(library),
    }
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
    exact = copy.deepcopy(eager).double()

    def run(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    sums = []
    # a norm's weight has eight elements, too few for one draw
    for _ in range(4):
        x = torch.randn(64, D, dtype=torch.float32, requires_grad=True)
        ours, theirs = (gradients(model, x, run, "cast") for model in (fused, eager))
        truth = gradients(exact, x.detach().double().requires_grad_(), once, "cast")
        sums = sums or [Errors(torch.bfloat16) for _ in truth]
        for errors, mine, other, true in zip(sums, ours, theirs, truth, strict=True):
            errors.add(mine.double(), other.double(), true)
    for errors in sums:
        assert errors.problem(floor=2.0**16) is None, errors.problem()


def run(names):
    torch.set_default_dtype(torch.float64)
    library = remove(names)
    check(library)
    check_autocast(library)


if __name__ == "__main__":
    for group in sys.argv[1:]:
        child = os.fork()
        if not child:
            try:
                run(group.split(","))
                print(group, "right", flush=True)
            except BaseException:
                print(group, repr(traceback.format_exc()), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
