"""Recipes beside writes, hooks, transforms and compilers: as in eager, or not used, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from recipe_nets import C, D, net, same, step, tokens, with_recipes
from torch import Tensor, nn

import fusedckpt
from fusedckpt.autograd import tracker
from fusedckpt.autograd.recipes import Leaf
from fusedckpt.recipes import dropouts, recipe_mode

pytestmark = pytest.mark.usefixtures("any_size")


class ShiftedNorm(nn.Module):
    """A sum with a small tensor and a bias, which autograd does not save."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.shift = torch.zeros(D, dtype=torch.float64)

    def forward(self, x):
        return self.linear(F.gelu(self.norm(x) + self.shift))


@pytest.mark.parametrize("is_dropped", [True, False], ids=["dropped", "unused"])
def test_write_of_what_only_a_result_beside_the_loss_saved(is_dropped):
    """The limit that the documentation names: it raises, where eager works."""
    weight = torch.randn(D, D, dtype=torch.float64, requires_grad=True)

    class UnusedResult(nn.Module):
        def forward(self, x):
            c = x * 2
            unused = [F.linear(c, weight)]
            if is_dropped:
                unused.clear()
            y = torch.tanh(c).sin()
            c.mul_(2)
            return y + c, unused

    eager = UnusedResult()
    ours, x = with_recipes(eager), tokens().double().requires_grad_()
    eager(x)[0].sum().backward()
    assert x.grad is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ours(x)[0].sum().backward()


def test_writes_between_forward_and_backward():
    """What autograd does not save may be written; what it saves raises, as in eager."""
    eager = ShiftedNorm().double()
    ours, x = with_recipes(eager), tokens().double()

    def gradients(model, write):
        inputs = [x.clone().requires_grad_(), *model.parameters()]
        given = inputs[0] * 1
        y = model(given)
        with torch.no_grad():
            write(model, given)
        return list(torch.autograd.grad(y.square().sum(), inputs))

    for write in (
        lambda model, _: model.shift.add_(1),
        lambda model, _: model.linear.bias.add_(1),
    ):
        same(gradients(ours, write), gradients(eager, write))
    for write in (
        lambda _, given: given.add_(1),
        lambda model, _: model.norm.weight.add_(1),
        lambda model, _: model.norm.bias.add_(1),
        lambda model, _: model.linear.weight.add_(1),
    ):
        for model in (eager, ours):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(model, write)


def test_a_value_whose_inputs_were_written_in_the_forward_is_saved():
    class WritesResult(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x):
            a = self.linear(x)
            b = a * 2
            c = a.sin()
            with torch.no_grad():
                # eager's gradient of sin reads a
                d = c.clone()
            b.add_(1)
            return self.linear(b) + self.linear(F.gelu(b)) * d

    eager, x = WritesResult().double(), tokens().double()
    same(step(with_recipes(eager), x), step(eager, x))


class RunningStatistics(nn.Module):
    """Convolutions with a norm between that updates running statistics."""

    def __init__(self, norm: Callable[..., Tensor]):
        super().__init__()
        self.first, self.last = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
        self.norm = norm
        self.register_buffer("mean", torch.zeros(C))
        self.register_buffer("var", torch.ones(C))

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x), self.mean, self.var)))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, m, v: F.instance_norm(x, m, v),
        lambda x, m, v: F.instance_norm(x, running_mean=m, running_var=v),
        lambda x, m, v: F.instance_norm(x, m, v, use_input_stats=False),
        lambda x, m, v: F.batch_norm(x, running_mean=m, running_var=v, training=True),
        lambda x, m, v: torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, False),
        lambda x, m, v: torch.instance_norm(x, None, None, m, v, True, 0.1, 1e-5, False),
    ],
)
def test_running_statistics_advance_once(norm):
    eager, x = RunningStatistics(norm).double(), torch.randn(2, C, 4, 4, dtype=torch.float64)
    model = copy.deepcopy(eager)
    fusedckpt.fuse(model, recompute_elementwise=True)
    for each in (eager, model):
        loss = each(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(eager.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert all(map(torch.equal, eager.buffers(), model.buffers()))


def test_hooks():
    """Hooks on results see the same gradients; saved-tensor hooks of others are left alone."""
    eager, x = net("diffusion")
    ours = with_recipes(eager)
    seen: dict[nn.Module, list[Tensor]] = {ours: [], eager: []}
    for model in seen:
        model[1].register_forward_hook(
            lambda _, args, y, model=model: y.register_hook(seen[model].append) and None
        )
    same(step(ours, x), step(eager, x))
    same(seen[ours], seen[eager])
    report = fusedckpt.fuse(ours)
    assert "recipes: results of cheap functions are made again in backward\n" in f"{report}\n"
    with torch.autograd.graph.save_on_cpu():
        same(step(ours, x)[1:2], step(eager, x)[1:2])
    assert "not in the last call: saved-tensor hooks of other code" in str(report)
    assert not tracker.active()


def test_no_grad_compile_and_transforms():
    eager, x = net("encoder")
    eager.eval()
    ours = with_recipes(eager)
    with torch.no_grad():
        assert torch.equal(ours(x), eager(x))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    same(step(ours, x, compiled), step(eager, x, torch.compile(eager, backend="aot_eager")))
    grads = [torch.func.grad(lambda x, m=m: m(x).sum())(x) for m in (ours, eager)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_module_inside(dynamic):
    eager, x = net("encoder")
    eager.eval()
    expected = step(eager, x)
    ours = with_recipes(eager)
    ours[1] = torch.compile(ours[1], backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(step(ours, x)[:2], expected[:2])


def test_the_hook_of_saved_tensors_is_traced():
    """A compiler traces it where compiled code breaks off inside of a model with recipes."""
    pack = torch.compile(recipe_mode._pack, backend="eager", dynamic=True)
    x, packed = torch.ones(3, 4), []
    assert pack(packed, x.nbytes + 1, x).__class__ is Leaf
    assert [tensor is x for _, tensor in packed] == [True]


def test_the_random_state_of_a_dropout():
    """Gradients see the mask of the forward, whatever is drawn in between."""
    eager, x = net("encoder")
    results = []
    for model in (with_recipes(eager), eager):
        torch.manual_seed(3)
        inputs = [x.clone().requires_grad_(), *model.parameters()]
        y = model(inputs[0]).square().mean()
        torch.manual_seed(99)
        torch.rand(7)
        results.append([*torch.autograd.grad(y, inputs), torch.rand(1)])
    same(*results)


def test_the_mask_of_a_dropout():
    """A device's dropout saves its mask, which makes the result again."""
    x = torch.randn(5, 7)
    y, mask = torch.native_dropout(x, 0.3, True)
    assert torch.equal(dropouts.masked(1 / 0.7, x, mask), y)
