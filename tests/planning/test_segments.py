"""Segments of several units: their gradients are those of no plan at all, bit for bit."""

import copy
import gc
from contextlib import nullcontext
from weakref import WeakSet

import pytest
import torch
from plan_models import assert_equal, convolutional, images, planned, step, tokens, transformer
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import Line

import fusedckpt
from fusedckpt import is_recomputing, prefetch_recompute
from fusedckpt.checkpointing.call_sequence import MultiCallSegment
from fusedckpt.memory import saved_tensors
from fusedckpt.planning.roles import NO_OPTIONS


def line(count):
    return Line(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(count)))


def rows():
    return torch.randn(16, 32)


def twin_of(model, *args, **kwargs):
    """Return the model planned, and a copy that is not."""
    plain = copy.deepcopy(model)
    return planned(model, *args, policy="uniform:2", **kwargs).apply(model), plain


class Views(Line):
    """What is handed on between units is now and then another tensor, or of two."""

    def forward(self, x):
        for i, unit in enumerate(self.units):
            x = unit(x)
            if i % 3 == 1 and not self.training:
                x = x.view_as(x)
            if i % 3 == 2 and not self.training:
                x = x.clone()
        return x


class Double(nn.Module):
    """Saves nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + x + self.weight


class Aside(Double):
    """Returns a tensor beside the next unit's input that the loss alone takes."""

    def forward(self, x):
        return super().forward(x), x.sin()


class WithAside(Line):
    def forward(self, x):
        asides = []
        for unit in self.units:
            x = unit(x)
            if isinstance(unit, Aside):
                x, aside = x
                asides.append(aside)
        return x + sum(asides)


def with_some(kind, unit, places):
    """Return a line of 17 of which the segments that some units start are gone early."""
    return kind(*(unit() if i in places else x for i, x in enumerate(line(17).units)))


def frozen():
    model = line(9)
    for i in (0, 1, 4, 8):
        model.units[i].requires_grad_(False)
    return model


def as_is(model):
    pass


def in_order(*order):
    def change(model):
        model.units = nn.ModuleList(model.units[i] for i in order)

    return change


def mask():
    found = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) > 0.3
    return found.fill_diagonal_(True)


# a model, its input, and what is done with it once it is planned
CASES = {
    "batch norm": (lambda: convolutional(4), images, as_is),
    "frozen": (frozen, rows, as_is),
    "another order": (lambda: line(7), rows, in_order(0, 1, 3, 2, 4, 6, 5)),
    "left out and twice": (lambda: line(7), rows, in_order(2, 3, 0, 1, 1, 6)),
    "other tensors between": (lambda: Views(*line(8).units), rows, nn.Module.eval),
    "nothing saved": (lambda: with_some(Line, Double, {0, 4, 9, 13}), rows, as_is),
    "every other saves": (lambda: with_some(Line, Double, range(0, 17, 2)), rows, as_is),
    "saved beside the next": (lambda: with_some(WithAside, Aside, {4}), rows, as_is),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_without_a_plan(name):
    make, example, change = CASES[name]
    x = example()
    pair = twin_of(make(), x)
    for each in pair:
        change(each)
    assert_equal(*(step(each, x) for each in pair))
    assert_equal(*([*each.buffers()] for each in pair))


@pytest.mark.parametrize("around", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_masks_and_dropout(around):
    x = tokens()
    model, plain = twin_of(transformer(4, dropout=0.2), x, mask=mask())
    for seed in (1, 2):
        with around():
            ours = step(model, x, mask=mask(), seed=seed)
        assert_equal(ours, step(plain, x, mask=mask(), seed=seed))


def test_autocast_and_accumulation():
    model, x = transformer(4, fused=True), tokens()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = planned(model, x[:2], policy="uniform:2", accumulate=2)
    found.apply(model)
    for each in (model, plain):
        for part in x.chunk(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(part)
            loss.backward()
    grads = [[p.grad for p in each.parameters()] for each in (model, plain)]
    assert_equal(*grads)


def test_partial_backwards_and_outputs_that_are_used_twice():
    model, x = line(9), torch.randn(16, 32, requires_grad=True)
    model, plain = twin_of(model, x)
    for wanted in (
        lambda m: [x],
        lambda m: [m.units[0][0].weight],
        lambda m: [m.units[3][0].weight, m.units[7][0].bias],
        lambda m: [m.units[8][0].weight],
        lambda m: [x, *m.parameters()],
    ):
        ours, theirs = (
            torch.autograd.grad((y := m(x)).sum() + (y * y).sum(), wanted(m))
            for m in (model, plain)
        )
        assert_equal(ours, theirs)
    y, expected = model(x), plain(x)
    for keep in (True, True, False):
        grads = torch.autograd.grad(y.sum(), [*model.parameters()], retain_graph=keep)
        theirs = torch.autograd.grad(expected.sum(), [*plain.parameters()], retain_graph=keep)
        assert_equal(grads, theirs)
    inner = [None]
    model.units[4].register_forward_hook(lambda m, a, y: inner.__setitem__(0, y))
    model(x)
    # of what is in the middle of a segment
    found = torch.autograd.grad(inner[0].sum(), [x])
    assert_equal(found, torch.autograd.grad(Line(*plain.units[:5])(x).sum(), [x]))


def test_an_exception_in_a_step_leaves_the_next_alone():
    model, x = line(9), torch.randn(16, 32)
    model, plain = twin_of(model, x)

    class Broken(Exception):
        pass

    def fail(*_):
        if not is_recomputing():
            raise Broken

    for i in (0, 3, 5):
        for register in ("register_forward_pre_hook", "register_forward_hook"):
            handle = getattr(model.units[i][1], register)(fail)
            with pytest.raises(Broken):
                model(x)
            handle.remove()
            assert_equal(step(model, x), step(plain, x))
    # and in a recompute
    handle = model.units[2][1].register_forward_hook(
        lambda *_: (_ for _ in ()).throw(Broken()) if is_recomputing() else None
    )
    loss = model(x).sum()
    with pytest.raises(Broken):
        loss.backward()
    handle.remove()
    assert_equal(step(model, x), step(plain, x))


@pytest.mark.parametrize("stock", [True, False])
def test_inside_another_checkpoint(stock):
    model, x = transformer(3, dropout=0.1), tokens()
    model, plain = twin_of(model, x)
    ours, theirs = (
        (checkpoint(m, x, use_reentrant=False) if stock else fusedckpt.checkpoint(m, x))
        for m in (model, plain)
        if torch.manual_seed(3) is not None
    )
    assert torch.equal(ours, theirs)
    ours.backward(), theirs.backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_compiled_units_are_checkpoints_of_their_own():
    model, x = transformer(3), tokens()
    model, plain = twin_of(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    with saved_tensors() as saved:
        loss = compiled(x)
    loss.backward()
    assert saved.nbytes > 0
    plain(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("segments", [1, 2, 9])
def test_recomputes_that_come_before_their_backward(segments):
    model, x = line(9), torch.randn(16, 32)
    model, plain = twin_of(model, x)
    loss = model(x).square().mean()
    assert prefetch_recompute(loss, segments) == min(segments, 2)
    loss.backward()
    assert_equal([p.grad for p in model.parameters()], step(plain, x)[1:])


def test_gradients_of_gradients():
    model, x = line(6), torch.randn(16, 32)
    found = []
    for each in twin_of(model, x):
        parameters = [*each.parameters()]
        grads = torch.autograd.grad(each(x).sin().sum(), parameters, create_graph=True)
        squares = sum(grad.square().sum() for grad in grads)
        found.append(torch.autograd.grad(squares, parameters))
    assert_equal(*found)


def test_nothing_lives_on_without_a_collection(monkeypatch):
    """No segment is in a cycle."""
    model, x = line(9), torch.randn(16, 32)
    planned(model, x, policy="uniform:2").apply(model)
    alive, init = WeakSet(), MultiCallSegment.__init__

    def noted(segment, options):
        init(segment, options)
        alive.add(segment)

    monkeypatch.setattr(MultiCallSegment, "__init__", noted)
    gc.disable()
    try:
        for _ in range(2):
            model(x).sum().backward()
            assert not alive
        loss = model(x).sum()
        assert len(alive) == 2
        del loss
        assert not alive
        torch.autograd.grad(model(x).sum(), [model.units[3][0].weight])
        assert not alive
    finally:
        gc.enable()


def test_an_address_of_a_handed_on_output_is_used_again():
    """An output that is gone must not be taken for what comes to lie where it lay."""
    segment, x = (
        MultiCallSegment(NO_OPTIONS),
        torch.randn(4, 6, dtype=torch.float64, requires_grad=True),
    )
    total = 0
    for _ in range(50):
        y = segment.add_call(lambda x: (x.sin() * 2).exp(), (x,), {})
        total = total + y.sum()
        del y
        # a fresh tensor, likely at the same address
        z = torch.full((4, 6), 0.5, dtype=torch.float64)
        total = total + segment.add_call(lambda z, x: (z * x.cos()).sin(), (z, x), {}).sum()
        del z
    (found,) = torch.autograd.grad(total, x)
    plain = (x.sin() * 2).exp().sum() + (0.5 * x.cos()).sin().sum()
    torch.testing.assert_close(found, torch.autograd.grad(50 * plain, x)[0])
