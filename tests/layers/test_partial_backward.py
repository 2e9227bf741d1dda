"""Backward for some inputs computes their gradients alone, at the cost of these alone."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from adapted_cases import ALL
from cases import CASES, loss_of
from support import (
    DEVICE,
    Watched,
    as_tuple,
    flops,
    gemm_flops,
    leaves_of,
    randn,
    saved_bytes,
    splits_backward,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fusedckpt
from fusedckpt import functional
from fusedckpt.autograd import private
from fusedckpt.blocks import run

D, F, ROWS, LAYERS = 12, 20, 6, 3
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
on_aten = pytest.mark.usefixtures("on_aten")


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_gradients_of_some_inputs(case, path):
    """Each alone, and each left out."""
    if path == "triton" and ALL.index(case) % 2:
        pytest.skip("its kernels are those of other cases")
    inputs = case.inputs((5,), 6, 10)
    leaves, loss = leaves_of(inputs), loss_of(case, inputs)
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    count = range(len(leaves))
    for wanted in [[i] for i in count] + [[j for j in count if j != i] for i in count]:
        given = [leaves[i] for i in wanted]
        found = torch.autograd.grad(loss, given, retain_graph=True) if given else ()
        torch.testing.assert_close(list(found), [expected[i] for i in wanted])


@EACH
@on_aten
def test_costs_what_it_costs_where_all_else_is_frozen(case):
    """GEMMs of every gradient alone, as `autograd.grad` and as `backward(inputs=...)`."""
    inputs = case.inputs((ROWS,), D, F)
    for index in (i for i, x in enumerate(inputs) if x is not None):
        mask = tuple(i == index for i in range(len(inputs)))
        alone = ran = flops(loss_of(case, case.inputs((ROWS,), D, F, mask=mask)).backward)
        if case.name.startswith("experts"):
            # rows of no expert are not multiplied
            ran = gemm_flops(loss_of(case, case.inputs((ROWS,), D, F, mask=mask)).backward)
        for step in (
            lambda loss: torch.autograd.grad(loss, inputs[index]),  # noqa: B023  # called at once
            lambda loss: loss.backward(inputs=[inputs[index]]),  # noqa: B023
        ):
            assert flops(partial(step, loss_of(case, inputs))) == alone
            # and not only by the formulas of our ops
            if DEVICE.type == "cpu":
                assert gemm_flops(partial(step, loss_of(case, inputs))) == ran <= alone


class Cut(torch.autograd.Function):
    """Its inputs, for which it has no gradients."""

    @staticmethod
    def forward(ctx, *xs):
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(ctx, *grads):
        return (None,) * len(grads)


@pytest.mark.parametrize("create_graph", [False, True])
@EACH
@on_aten
def test_of_a_result_without_gradient(case, create_graph):
    inputs = case.inputs((3,), 4, 5)
    total = sum(y.sum() for y in Cut.apply(*as_tuple(case.fused(*inputs))))
    assert flops(lambda: total.backward(create_graph=create_graph)) == 0
    assert all(leaf.grad is None for leaf in leaves_of(inputs))


WIDTHS = (8, 4, 3)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_linears_whose_results_nobody_used(norm):
    """They have no gradients, as in eager, and cost no GEMM."""
    linears = [nn.Linear(D, n) for n in WIDTHS]
    block = fusedckpt.NormLinear(norm(D), *linears).to(DEVICE, torch.float64)
    x = randn(ROWS, D, dtype=torch.float64)
    wanted = [x, *block.parameters()]
    for used in list(product((False, True), repeat=3))[1:]:
        n = block.norm(x)
        pair = [
            sum(y.sin().sum() for y, use in zip(ys, used, strict=True) if use)
            for ys in (block(x), [linear(n) for linear in block.linears])
        ]
        for create in (False, True):
            options = {"create_graph": create, "allow_unused": True, "retain_graph": True}
            found, theirs = (torch.autograd.grad(total, wanted, **options) for total in pair)
            torch.testing.assert_close(found, theirs)
        width = sum(n for n, use in zip(WIDTHS, used, strict=True) if use)
        assert flops(pair[0].backward) == 2 * 2 * ROWS * D * width
    block.norm.requires_grad_(False)
    block.linears[1].requires_grad_(False)
    assert [y.requires_grad for y in block(x.detach())] == [True, False, True]


def test_saves_nothing_that_no_gradient_reads():
    """Weights that are computed, and so are nobody's parameters; x, for gradients of biases."""
    x, weights = randn(ROWS, D, requires_grad=False), [randn(n, D) for n in WIDTHS]
    norm, call = fusedckpt.NormSpec("rms"), functional.norm_linear
    assert saved_bytes(lambda x, *w: call(x, norm, w), [x, *weights]) == x.nbytes
    weights, biases = [w.detach() for w in weights], [randn(n) for n in WIDTHS]
    assert saved_bytes(lambda x, *b: call(x, norm, weights, b), [x, *biases]) == 0
    w, scale = randn(F, D), randn(D)
    for fn in (
        lambda x, w, _: functional.linear_act(x, w, activation="identity"),
        lambda x, _, scale: functional.rms_norm(x, D, scale),
    ):
        assert saved_bytes(fn, [x, w, scale]) == x.nbytes


def split(model, x):
    """Return the two steps of backward as a zero-bubble pipeline runs it."""
    from torch.distributed.pipelining import _backward as pipelining

    weights = list(model.parameters())
    loss = sum(y.square().sum() for y in as_tuple(model(x * 1)))
    found = []

    def inputs():
        found.append(pipelining.stage_backward_input([loss], None, [x], iter(weights)))

    return inputs, lambda: pipelining.stage_backward_weight(iter(weights), found[0][1])


# GEMMs per layer: of the step for inputs, of the one for weights
MLPS = {"mlp": fusedckpt.MLP, "gated_mlp": fusedckpt.GatedMLP}
PLAIN = {
    ("mlp", "inputs"): (3, 4),
    ("mlp", "preact"): (2, 3),
    ("gated_mlp", "inputs"): (5, 6),
    ("gated_mlp", "gate"): (4, 5),
    ("gated_mlp", "preact"): (3, 4),
}


def joined(cls, save):
    return nn.Sequential(fusedckpt.RMSNorm(D), cls(D, F, save=save))


LAYOUTS = {
    "plain": lambda cls, save: cls(D, F, save=save),
    "joined": joined,
    "inside": lambda cls, save: cls(D, F, save=save, norm=fusedckpt.RMSNorm(D), residual=True),
    "checkpointed": lambda cls, save: fusedckpt.checkpoint_module(joined(cls, save)),
    "stock's": lambda cls, save: checkpoint_wrapper(joined(cls, save)),
}


@splits_backward
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "save"), PLAIN)
@on_aten
def test_gemms_of_inputs_and_of_weights_apart(name, save, layout):
    """A norm of the layer's own takes the GEMMs of its weight's gradient, one for each it feeds."""
    model = nn.Sequential(*(LAYOUTS[layout](MLPS[name], save) for _ in range(LAYERS))).to(DEVICE)
    of_inputs, of_weights = PLAIN[name, save]
    if layout == "inside":
        of_weights += 1 if name == "mlp" else 2
    if layout in ("checkpointed", "stock's"):
        of_inputs, of_weights = PLAIN[name, "inputs"]
    x, unit = randn(ROWS, D), 2 * ROWS * D * F * LAYERS
    inputs, rest = split(model, x)
    assert (flops(inputs), flops(rest)) == (of_inputs * unit, of_weights * unit)
    grads = [x.grad, *(p.grad for p in model.parameters())]
    expected = torch.autograd.grad(model(x * 1).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(grads, list(expected))


@splits_backward
@on_aten
def test_gemms_of_projections():
    """One per linear in either step; the norm's weight takes as many more."""
    linears = (nn.Linear(D, F) for _ in range(3))
    model = fusedckpt.NormLinear(fusedckpt.RMSNorm(D), *linears).to(DEVICE)
    inputs, rest = split(model, randn(ROWS, D))
    unit = 2 * ROWS * D * F
    assert (flops(inputs), flops(rest)) == (3 * unit, 6 * unit)


def weights():
    return randn(F, D), randn(F), randn(D, F), randn(D)


@pytest.fixture
def seen(monkeypatch, on_aten):
    """Collect which gradients a block's backward computes."""
    seen, computed = [], run.backward

    def spy(call, wanted, *args, **options):
        seen.append(wanted)
        return computed(call, wanted, *args, **options)

    monkeypatch.setattr(run, "backward", spy)
    return seen


def test_roots_of_a_backward(seen):
    """The engine does not count the root among the nodes of its graph."""
    x, given = randn(ROWS, D), weights()
    y = functional.mlp(x, *given)
    y.sum().backward(inputs=[y], retain_graph=True)
    assert y.grad is not None
    assert not seen
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert sum(seen[0]) == 1
    torch.testing.assert_close(dx, torch.autograd.grad(y.sum(), [x, *given])[0])


def test_called_by_hand_inside_another_backward(seen):
    """What is called by hand gets all gradients, whatever the backward around it wants."""
    x, given = randn(ROWS, D), weights()
    y = functional.mlp(x, *given)
    expected = torch.autograd.grad(y.sum(), [x, *given], retain_graph=True)
    found = []
    z = y * 2
    z.register_hook(lambda _: found.extend(y.grad_fn.apply(torch.ones_like(y))))
    torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close([grad for grad in found if grad is not None], list(expected))


def test_hooks_see_what_is_wanted(seen):
    x, given = randn(ROWS, D), weights()
    inner, got = x * 1, {}
    y = functional.mlp(inner, *given)
    inner.register_hook(lambda grad: got.setdefault("inner", grad))
    given[0].register_hook(lambda grad: got.setdefault("fc1", grad) * 2)
    handle = y.grad_fn.register_hook(lambda grads, _: got.setdefault("node", grads) and None)
    (dw,) = torch.autograd.grad(y.sum(), given[0], retain_graph=True)
    assert "inner" not in got
    torch.testing.assert_close(dw, got["fc1"] * 2)
    assert sum(grad is not None for grad in got["node"]) == sum(seen[-1]) == 1
    handle.remove()
    inner.retain_grad()
    torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(inner.grad, got["inner"])


def test_in_the_backward_of_another(seen):
    """The innermost backward says what is wanted, and the one around it afterwards."""
    x, given = randn(ROWS, D), weights()
    y, inner = (functional.mlp(x, *given) for _ in range(2))
    loss, got = inner.sum(), []
    y.register_hook(lambda _: got.extend(torch.autograd.grad(loss, given[2], retain_graph=True)))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close([*got, dx], list(torch.autograd.grad(loss, [given[2], x])))
    assert [sum(needs) for needs in seen] == [1, 1, 2]


@pytest.mark.parametrize(
    "engine",
    [
        {"will_execute": lambda node: False},
        {"will_execute": lambda node: True},
        {"current_node": lambda: None},
    ],
    ids=["no to all", "yes to all", "no node"],
)
def test_an_engine_that_does_not_tell(engine, monkeypatch, seen):
    """All gradients are computed, as by torch.distributed.autograd, whose engine says no to all."""
    for name, function in engine.items():
        monkeypatch.setattr(private, name, function)
    x, given = randn(ROWS, D), weights()
    found = torch.autograd.grad(functional.mlp(x, *given).sum(), x)
    assert sum(seen[0]) == 5
    monkeypatch.undo()
    expected = torch.autograd.grad(functional.mlp(x, *given).sum(), [x, *given])
    torch.testing.assert_close(found, expected[:1])


def test_a_norm_computes_what_it_is_asked_for():
    """No GEMM tells: it is asked with the arguments of the op."""
    x, w, b = randn(ROWS, D), randn(D), randn(D)
    y = functional.layer_norm(x, D, w, b).sum()
    with Watched() as watched:
        for tensor in (x, w, b):
            torch.autograd.grad(y, tensor, retain_graph=True)
    wanted = [list(args[-1]) for func, args in watched.ours()]
    assert wanted == [[i == j for i in range(3)] for j in range(3)]
