"""The arguments of checkpoint: all of torch's newest, the decorator, hooks around."""

import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import assert_same, counted, step, stock
from support import DEVICE, randn
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as any_stock
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fusedckpt import checkpoint, checkpoint_module

EMPTY = inspect.Parameter.empty


def test_has_all_arguments_of_this_torch():
    ours, theirs = (inspect.signature(fn).parameters for fn in (checkpoint, any_stock))
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind
        # the function has a default in new versions alone
        assert parameter.default in (EMPTY, ours[name].default)
    # in any torch
    assert {"function", "preserve_rng_state", "respect_saved_tensors_hooks"} < {*ours}


@pytest.mark.parametrize("respects", [None, True, False])
def test_is_not_passed_to_the_function(respects):
    fn = lambda x, **kwargs: x.sin() * (1 + len(kwargs))  # noqa: E731
    x = randn(3)
    run = partial(checkpoint, fn, respect_saved_tensors_hooks=respects)
    assert_same(step(run, x), step(fn, x))


@pytest.mark.parametrize("options", [{}, {"use_reentrant": False}, {"debug": True}], ids=str)
def test_decorates_functions(options):
    def double(x, debug=1, use_reentrant=1):
        """Return a multiple."""
        return x.sin().sin() * debug * use_reentrant

    fn, calls = counted(double)
    run, x = checkpoint(**options)(fn), randn(3)
    # its own keywords have names of options
    found = step(partial(run, debug=2, use_reentrant=3), x)
    assert_same(found, step(partial(double, debug=2, use_reentrant=3), x))
    assert len(calls) == 2
    assert checkpoint(**options)(double).__doc__ == double.__doc__
    assert checkpoint(**options)(double).__wrapped__ is double


def test_decorates_methods():
    class DecoratedNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), []

        @checkpoint(use_reentrant=False)
        def forward(self, x, scale=1.0):
            self.calls.append(1)
            return self.linear(x.sin()).tanh() * scale

        @checkpoint(early_stop=False)
        @staticmethod
        def still(x):
            return x.sin().cos()

    net, x = DecoratedNet().to(DEVICE), randn(3, 4)
    found = step(partial(net, scale=2.0), x, parameters=net.parameters())
    assert len(net.calls) == 2
    run = lambda x: net.linear(x.sin()).tanh() * 2.0  # noqa: E731
    assert_same(found, step(run, x, parameters=net.parameters()))
    assert_same(step(net.still, x), step(lambda x: x.sin().cos(), x))


def test_decorates_modules():
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(DEVICE), randn(3, 4)
    run = checkpoint(save_regions="attention", preserve_rng_state=False)(layers)
    parameters = [*layers.parameters()]
    assert_same(step(run, x, parameters=parameters), step(layers, x, parameters=parameters))


def test_a_decorated_function_is_compiled():
    @checkpoint(use_reentrant=False)
    def run(x, debug=1):
        return x.sin().cos() * debug

    x = randn(3)
    compiled = torch.compile(lambda x: run(x, debug=2).cos(), backend="aot_eager", fullgraph=True)
    found, expected = step(compiled, x), step(lambda x: (x.sin().cos() * 2).cos(), x)
    torch.testing.assert_close(found, expected)


NUMBERS: Any = {"save_regions": [3]}
BAD = {
    "no function": (
        lambda: checkpoint(scale=2),
        ValueError,
        "or only options of checkpoint, got scale",
    ),
    "reentrant": (lambda: checkpoint(use_reentrant=True), ValueError, "use_reentrant=True"),
    "of a number": (lambda: checkpoint()(3), TypeError, "function"),
    "nothing": (lambda: checkpoint(None, 3), TypeError, "function"),
    "regions": (lambda: checkpoint(**NUMBERS), TypeError, "save_regions"),
    "wrapper": (lambda: checkpoint_module(nn.ReLU(), respect_hooks=1), TypeError, "respect_hooks"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    call, error, match = BAD[name]
    with pytest.raises(error, match=match):
        call()


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
NEWEST = "respect_saved_tensors_hooks" in inspect.signature(any_stock).parameters
# torch's first, as the one to compare with
SELECTIVES = {
    "alone": lambda wrap, **options: partial(wrap, context_fn=SELECTIVE, **options),
    "inside": lambda wrap, **options: (
        lambda fn, x: wrap(lambda x: wrap(fn, x.sin(), context_fn=SELECTIVE, **options).cos(), x)
    ),
    "inside ours": lambda wrap, **options: (
        lambda fn, x: checkpoint(
            lambda x: wrap(fn, x.sin(), context_fn=SELECTIVE, **options).cos(), x
        )
    ),
    "inside torch's": lambda wrap, **options: (
        lambda fn, x: stock(lambda x: wrap(fn, x.sin(), context_fn=SELECTIVE, **options).cos(), x)
    ),
}


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("respects", [None, True, False])
@pytest.mark.parametrize("name", SELECTIVES)
def test_selective_tensors_and_hooks_around(name, respects, hooked):
    """What torch's own selective checkpoints give to hooks around them, and warn of, ours do."""
    fn = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)).to(DEVICE)
    x, options = randn(3, 4), {"respect_saved_tensors_hooks": respects} if NEWEST else {}
    results = []
    for wrap in (stock, checkpoint):
        shapes = []

        def pack(tensor, shapes=shapes):
            shapes.append(tensor.shape)
            return tensor.clone()

        run = SELECTIVES[name](wrap, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if hooked:
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    y = run(fn, x * 2)
            else:
                y = run(fn, x * 2)
            grads = torch.autograd.grad(y.square().sum(), [x, *fn.parameters()])
        products = sum(shape in [(3, 5)] for shape in shapes)
        results.append((grads, products, {w.category for w in caught}))
    (expected, *theirs), (found, *ours) = results
    assert_same(found, expected)
    assert ours == theirs
    if not hooked:
        assert ours == [0, set()]
