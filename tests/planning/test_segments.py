"""Segments of several units: their gradients are those of no plan at all, bit for bit."""

import copy
import gc

import pytest
import torch
from plan_models import convolutional, images, tokens, transformer
from segment_models import Line, line, planned, same, step, twin_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import is_recomputing, prefetch_recompute
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import saved_tensors
from fusedckpt.planning.roles import HandingOn


@pytest.fixture(autouse=True)
def aten():
    """Kernels in the interpreter are too slow to be timed."""
    with forced_path("aten"):
        yield


def test_masks_and_dropout():
    model, x = transformer(7, dropout=0.2), tokens()
    mask = torch.rand(64, 64) > 0.3
    mask.fill_diagonal_(True)
    model, plain = twin_of(model, x, mask=mask)
    for seed in (1, 2):
        assert same(step(model, x, mask=mask, seed=seed), step(plain, x, mask=mask, seed=seed))


def test_autocast_and_accumulation():
    model, x = transformer(6, fused=True), tokens()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = planned(model, x[:2], accumulate=2)
    found.apply(model)
    for each in (model, plain):
        for part in x.chunk(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(part)
            loss.backward()
    grads = [[p.grad for p in each.parameters()] for each in (model, plain)]
    assert same(*grads)


def test_batch_norm_counts_once():
    model, x = convolutional(9), images()
    model, plain = twin_of(model, x)
    assert same(step(model, x), step(plain, x))
    assert {int(b) for n, b in model.named_buffers() if n.endswith("tracked")} == {1}
    assert same([*model.buffers()], [*plain.buffers()])


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
        assert same(ours, theirs)
    y, expected = model(x), plain(x)
    for keep in (True, True, False):
        grads = torch.autograd.grad(y.sum(), [*model.parameters()], retain_graph=keep)
        theirs = torch.autograd.grad(expected.sum(), [*plain.parameters()], retain_graph=keep)
        assert same(grads, theirs)
    inner = [None]
    model.units[4].register_forward_hook(lambda m, a, y: inner.__setitem__(0, y))
    model(x)
    # of what is in the middle of a segment
    found = torch.autograd.grad(inner[0].sum(), [x])
    assert same(found, torch.autograd.grad(Line(*plain.units[:5])(x).sum(), [x]))


def test_frozen_units_and_parts():
    model, x = line(9), torch.randn(16, 32)
    for i in (0, 1, 4, 8):
        model.units[i].requires_grad_(False)
    model, plain = twin_of(model, x)
    ours, theirs = (
        [None if p.grad is None else p.grad for p in m.parameters() if p.requires_grad]
        for m in (model, plain)
        if m(x).sum().backward() is None
    )
    assert same(ours, theirs)


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
            assert same(step(model, x), step(plain, x))
    # and in a recompute
    handle = model.units[2][1].register_forward_hook(
        lambda *_: (_ for _ in ()).throw(Broken()) if is_recomputing() else None
    )
    loss = model(x).sum()
    with pytest.raises(Broken):
        loss.backward()
    handle.remove()
    assert same(step(model, x), step(plain, x))


@pytest.mark.parametrize("stock", [True, False])
def test_inside_another_checkpoint(stock):
    model, x = transformer(5, dropout=0.1), tokens()
    model, plain = twin_of(model, x)
    ours, theirs = (
        (checkpoint(m, x, use_reentrant=False) if stock else fusedckpt.checkpoint(m, x))
        for m in (model, plain)
        if torch.manual_seed(3) is not None
    )
    assert torch.equal(ours, theirs)
    ours.backward(), theirs.backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("order", [[0, 1, 3, 2, 4, 6, 5], [2, 3, 0, 1, 1, 6]])
def test_units_in_another_order(order):
    model, x = line(7), torch.randn(16, 32)
    model, plain = twin_of(model, x)
    for each in (model, plain):
        each.units = nn.ModuleList(each.units[i] for i in order)
    assert same(step(model, x), step(plain, x))


class Views(nn.Module):
    """What is handed on between units is now and then another tensor, or of two."""

    def __init__(self):
        super().__init__()
        self.units = line(8).units

    def forward(self, x):
        for i, unit in enumerate(self.units):
            x = unit(x)
            if i % 3 == 1 and not self.training:
                x = x.view_as(x)
            if i % 3 == 2 and not self.training:
                x = x.clone()
        return x


def test_other_tensors_between_units_than_the_plan_saw():
    model, x = Views(), torch.randn(16, 32)
    model, plain = twin_of(model, x)
    model.eval(), plain.eval()
    assert same(step(model, x), step(plain, x))


def test_compiled_units_are_checkpoints_of_their_own():
    model, x = transformer(5), tokens()
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
    assert same([p.grad for p in model.parameters()], step(plain, x)[1:])


def test_what_is_saved_may_be_elsewhere():
    model, x = transformer(5, dropout=0.1), tokens()
    model, plain = twin_of(model, x)
    with torch.autograd.graph.save_on_cpu():
        ours = step(model, x)
    assert same(ours, step(plain, x))


def test_gradients_of_gradients():
    model, x = line(6), torch.randn(16, 32)
    found = []
    for each in twin_of(model, x):
        parameters = [*each.parameters()]
        grads = torch.autograd.grad(each(x).sin().sum(), parameters, create_graph=True)
        squares = sum(grad.square().sum() for grad in grads)
        found.append(torch.autograd.grad(squares, parameters))
    assert same(*found)


def test_nothing_lives_on_without_a_collection():
    """No segment is in a cycle."""
    model, x = line(9), torch.randn(16, 32)
    planned(model, x).apply(model)

    def left():
        return sum(isinstance(thing, HandingOn) for thing in gc.get_objects()) - before

    before = 0
    gc.collect()
    # of other tests
    before = left()
    gc.disable()
    try:
        for _ in range(2):
            model(x).sum().backward()
            assert left() == 0
        loss = model(x).sum()
        assert left() > 0
        del loss
        assert left() == 0
        torch.autograd.grad(model(x).sum(), [model.units[3][0].weight])
        assert left() == 0
    finally:
        gc.enable()


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + x + self.weight


@pytest.mark.parametrize("places", [{0, 4, 9, 13}, {*range(0, 17, 2)}])
def test_units_of_which_nothing_is_saved(places):
    """The segment that one starts is gone as the next unit comes, but not so in a recompute."""
    units = [Double() if i in places else unit for i, unit in enumerate(line(17).units)]
    model, x = Line(*units), torch.randn(16, 32)
    model, plain = twin_of(model, x)
    assert same(step(model, x), step(plain, x))


class Aside(Double):
    def forward(self, x):
        return super().forward(x), x.sin()


class WithAside(Line):
    """The first unit of a segment returns a tensor that the loss alone takes."""

    def forward(self, x):
        asides = []
        for unit in self.units:
            x = unit(x)
            if isinstance(unit, Aside):
                x, aside = x
                asides.append(aside)
        return x + sum(asides)


def test_units_of_which_all_that_is_saved_is_beside_the_next():
    """The segment that one starts is alive for that in the forward, and is to be in a recompute."""
    units = [Aside() if i == 4 else unit for i, unit in enumerate(line(17).units)]
    model, x = WithAside(*units), torch.randn(16, 32)
    model, plain = twin_of(model, x)
    assert same(step(model, x), step(plain, x))
