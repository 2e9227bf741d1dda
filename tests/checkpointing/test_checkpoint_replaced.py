"""Parameters that are replaced between a checkpoint's forward and its backward raise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from checkpoints import assert_as_plain, assert_same, linears, same, step
from support import DEVICE, randn
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointError
from zoo import Checkpointed

import fusedckpt
from fusedckpt import checkpoint
from fusedckpt.autograd.dispatch import forced_path

MODELS = {
    "linears": lambda: linears(6, 6, 6),
    "relu": lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 6)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.SiLU(), nn.LayerNorm(6)),
    "fused": lambda: nn.Sequential(fusedckpt.MLP(6, 8), nn.Tanh(), fusedckpt.MLP(6, 8)),
    "fused norms": lambda: nn.Sequential(fusedckpt.RMSNorm(6), nn.Tanh(), fusedckpt.RMSNorm(6)),
}
OTHERS = {
    "leaves": lambda p: (p * 2).detach().requires_grad_(),
    "parameters": lambda p: nn.Parameter(p.detach() * 2),
    "frozen": lambda p: p.detach() * 2,
    "computed": lambda p: p * 2,
}
checkpointed = partial(Checkpointed, run=checkpoint)
REPLACED = "replaced between forward and backward"


@pytest.fixture(autouse=True)
def on_aten():
    with forced_path("aten"):
        yield


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]().to(DEVICE)


@pytest.mark.parametrize("needs_dx", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_functional_call(model, kind, needs_dx):
    """Its values are gone when the recompute runs."""
    model = checkpointed(model)
    others = {name: OTHERS[kind](p) for name, p in model.named_parameters()}
    x = randn(4, 6, requires_grad=needs_dx or kind == "frozen")
    # what is frozen saves fewer tensors
    with pytest.raises(CheckpointError, match=None if kind == "frozen" else REPLACED):
        functional_call(model, others, (x,)).square().sum().backward()


@pytest.mark.parametrize("needs_dx", [False, True])
@pytest.mark.parametrize("wraps", [1, 2])
def test_a_replaced_parameter(model, wraps, needs_dx):
    whole = checkpointed(model) if wraps == 1 else checkpointed(checkpointed(model))
    y = whole(randn(4, 6, requires_grad=needs_dx))
    layer = next(
        layer
        for layer in model.modules()
        if isinstance(getattr(layer, "weight", None), nn.Parameter)
    )
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    with pytest.raises(CheckpointError, match=REPLACED):
        y.square().sum().backward()


def in_another_thread(loss):
    """Each thread counts its own nodes; on a GPU each backward has another thread."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()


# what takes the place of a layer, or of a leaf of no module, and how backward runs
CHANGED = {
    "a layer": ("layer", lambda _: nn.Linear(6, 6).to(DEVICE), torch.Tensor.backward),
    "a leaf": ("leaf", lambda _: randn(6, 6), torch.Tensor.backward),
    "computed now": ("leaf", lambda leaf: leaf * 2, torch.Tensor.backward),
    "computed now, another thread": ("leaf", lambda leaf: leaf * 2, in_another_thread),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_replaced_layer_or_leaf(name):
    kind, other, backward = CHANGED[name]
    parts = linears(6, 6, 6) if kind == "layer" else [randn(6, 6), randn(6, 6)]
    call = parts if kind == "layer" else lambda x: (x @ parts[0]).sin() @ parts[1]
    y = checkpoint(call, randn(4, 6)).sum()
    parts[0] = other(parts[0])
    with pytest.raises(CheckpointError, match=REPLACED):
        backward(y)


@pytest.mark.parametrize(
    "options", [{"debug": True}, {"early_stop": False}, {"determinism_check": "none"}]
)
def test_options(options):
    model = checkpointed(linears(6, 6, 6), **options)
    others = {name: OTHERS["leaves"](p) for name, p in model.named_parameters()}
    y = functional_call(model, others, (randn(4, 6),)).sum()
    if "determinism_check" in options:
        y.backward()
        assert all(other.grad is not None for other in others.values())
    else:
        with pytest.raises(CheckpointError, match=REPLACED):
            y.backward()


def with_copies(model):
    """Give equal parameters to a model, as loading it does."""
    for layer in model[::2]:
        layer.weight = nn.Parameter(layer.weight.detach().clone())


def with_other_memory(model):
    for p in model.parameters():
        p.data = p.data.clone()


def with_another_last(model):
    """Replace a parameter behind all that is recomputed: gradients are of the one before."""
    model[2].weight = nn.Parameter(model[2].weight.detach() * 2)


@pytest.mark.parametrize("between", [with_copies, with_other_memory, with_another_last])
def test_changes_that_do_not_raise(between):
    model, x = linears(6, 6, 6), randn(4, 6)
    wanted = [x, *model.parameters()]
    expected = step(model, x, parameters=model.parameters())
    y = checkpoint(model, x)
    between(model)
    assert_same(torch.autograd.grad(y.square().sum(), wanted), expected[1:-2])


SHARED = nn.Parameter(torch.randn(6, 6, device=DEVICE))


def tied(layer):
    layer.weight = SHARED


PARAMETRIZATIONS = [parametrizations.weight_norm, parametrizations.orthogonal]


@pytest.mark.parametrize("change", [*PARAMETRIZATIONS, torch.nn.utils.weight_norm, tied])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_tied_and_computed_weights_do_not_raise(change):
    model, x = linears(6, 6, 6), randn(4, 6)
    for layer in model[::2]:
        change(layer)
    assert_as_plain(model, x, parameters=model.parameters())
    expected = step(model, x, parameters=model.parameters())
    with parametrize.cached():
        y = checkpoint(model, x)
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    assert_same(found, expected[1:-2])


def flat(weight, x):
    """Weights are views of one parameter, made anew for each call."""
    first, second = weight.split([36, 36])
    return (x @ first.view(6, 6)).sin() @ second.view(6, 6).T


def making(weight, x):
    """Parameters and other leaves are made anew in each call."""
    weight = weight[:36].view(6, 6)
    made = nn.Parameter(weight.detach() * 2)
    scale = torch.full((6,), 2.0, device=DEVICE, requires_grad=True)
    drawn = torch.rand(6, device=DEVICE).requires_grad_()
    return ((x @ weight).sin() @ made * scale * drawn).sin()


@pytest.mark.parametrize("fn", [flat, making])
def test_leaves_that_the_function_makes_do_not_raise(fn):
    weight = nn.Parameter(torch.randn(72, device=DEVICE))
    assert_as_plain(partial(fn, weight), randn(4, 6), parameters=[weight])
    assert_as_plain(lambda x: fn(weight, x), randn(4, 6), parameters=[weight])


def test_what_has_no_memory_does_not_raise():
    model, x = linears(6, 6, 6), randn(4, 6)
    expected = step(model, x, parameters=[model[2].weight])
    y, weight, freed = checkpoint(model, x), model[2].weight, model[0].weight
    with_copies(model)
    freed.untyped_storage().resize_(0)
    assert same(torch.autograd.grad(y.square().sum(), weight)[0], expected[2])
    x = torch.ones(6, device="meta", requires_grad=True)
    fn = lambda x: (x * torch.ones_like(x, requires_grad=True)).sin().sin()  # noqa: E731
    checkpoint(fn, x).sum().backward()


def test_weights_that_are_elsewhere_between_do_not_raise():
    """As sharding and offloading do: memory is freed and filled again, or parameters are new."""
    model, x = linears(6, 6, 6), randn(4, 6)
    expected = step(model, x, parameters=model.parameters())
    full = [p.detach().clone() for p in model.parameters()]

    def gather():
        for p, value in zip(model.parameters(), full, strict=True):
            p.untyped_storage().resize_(value.nbytes)
            with torch.autograd._unsafe_preserve_version_counter(p):
                p.data.copy_(value)

    y = checkpoint(model, x)
    for p in model.parameters():
        p.untyped_storage().resize_(0)
    y.register_hook(lambda _: gather())
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    assert_same(found, expected[1:-2])

    def load(layer, _):
        layer.weight = nn.Parameter(values[layer].clone(), requires_grad=False)

    def drop(layer, *_):
        layer.weight = nn.Parameter(values[layer].to("meta"), requires_grad=False)

    values = {layer: layer.weight.detach() for layer in model[::2]}
    for layer in values:
        layer.register_forward_pre_hook(load)
        layer.register_forward_hook(drop)
    assert same(step(partial(checkpoint, model), x)[1], expected[1])


@pytest.mark.parametrize("pack", [lambda t: t.cpu(), lambda t: t.bfloat16()])
def test_hooks_around_do_not_raise(pack):
    """They may return another tensor than the leaf that was an argument."""
    model, x, w = linears(6, 6, 6), randn(4, 6), randn(6, 6)

    def run(x, w):
        return model((x @ w).sin())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(DEVICE, torch.float32)):
        y = checkpoint(run, x, w)
    found = torch.autograd.grad(y.square().sum(), [x, w])
    expected = torch.autograd.grad(run(x, w).square().sum(), [x, w])
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


def test_functional_call_inside_does_not_raise():
    layer, x, w = nn.Linear(6, 6).to(DEVICE), randn(4, 6), randn(6, 6)

    def run(x, w):
        return functional_call(layer, {"weight": w}, (x.sin(),)).sin()

    assert_as_plain(run, x, w)
    found = torch.func.grad(lambda w: checkpoint(run, x, w).square().sum())(w)
    assert same(found, step(run, x, w)[2])
