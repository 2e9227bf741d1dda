"""`fuse(recompute_elementwise=True)`: results of cheap functions are made again, not saved."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipe_nets import NETS, C, D, T, net, same, saved_bytes, step, tokens, with_recipes
from support import peak_of_step
from torch import nn
from torch.utils.checkpoint import checkpoint as stock_checkpoint
from zoo import Attention, DecoderLayer

import fusedckpt
from fusedckpt.autograd import recipes, tracker
from fusedckpt.fusing import recipe_models
from fusedckpt.layers.notes import set_notes
from fusedckpt.recipes import recipe_mode

pytestmark = pytest.mark.usefixtures("any_size")

# bytes of an image and of the statistics of two batch norms; of D features of all tokens
IMAGE, STATISTICS, WIDE = 8 * 3 * C * 49, 8 * 4 * C, 8 * 2 * T * D
# bytes of a batch norm's bias
BIAS = 8 * C
# saved bytes of three blocks: eager's, and with recipes
SAVED = {
    # the inputs of convolutions and batch norms, and the result; the inputs of batch norms and the
    # first one's, and copies of biases, which eager does not save
    "residual": (13 * IMAGE + 3 * STATISTICS, 7 * IMAGE + 3 * STATISTICS + 6 * BIAS),
    "residual, not in place": (13 * IMAGE + 3 * STATISTICS, 7 * IMAGE + 3 * STATISTICS + 6 * BIAS),
    # each part of a concatenation once
    "dense": (234_000, 93_456),
    "diffusion": (382_080, 203_136),
    "encoder": (205_056, 100_608),
    "rotary": (131_328, 62_592),
}


@pytest.mark.parametrize("name", NETS)
def test_values_bytes_and_peaks(name):
    """The same kernels on the same numbers: gradients have the same bits."""
    eager, x = net(name)
    ours = with_recipes(eager)
    for _ in range(2):
        same(step(ours, x), step(eager, x))
    assert (saved_bytes(eager, x), saved_bytes(ours, x)) == SAVED[name]
    peaks = [peak_of_step(m, x) for m in (eager, ours)]
    assert peaks[1] < peaks[0] - (SAVED[name][0] - SAVED[name][1]) / 4, peaks


@pytest.mark.parametrize("name", NETS)
def test_other_dtypes_and_layouts(name):
    eager, x = net(name, torch.float32)
    if x.dim() == 4:
        channels_last = eager.to(memory_format=torch.channels_last)
        y = x.contiguous(memory_format=torch.channels_last)
        same(step(with_recipes(channels_last), y), step(channels_last, y))
    ours = with_recipes(eager)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            theirs = step(eager, x)
            same(step(ours, x), theirs)
    expanded = x[:1].expand_as(x)
    same(step(ours, expanded), step(eager, expanded))
    same(step(ours.eval(), x), step(eager.eval(), x))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("checkpoint", [fusedckpt.checkpoint, stock_checkpoint])
def test_checkpoints_around_and_inside(name, checkpoint):
    eager, x = net(name)
    ours = with_recipes(eager)

    def around(model):
        return lambda x: checkpoint(model, x, use_reentrant=False)

    same(step(ours, x, around(ours)), step(eager, x, around(eager)))

    class Inside(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            x = self.blocks[0](x)
            x = checkpoint(self.blocks[1], F.gelu(x), use_reentrant=False)
            return self.blocks[2](F.gelu(x))

    inside = Inside(eager)
    same(step(with_recipes(inside), x), step(inside, x))


@pytest.mark.parametrize("name", ["diffusion", "rotary", "residual, not in place"])
def test_second_derivatives(name):
    eager, x = net(name)
    ours = with_recipes(eager)

    def second(model):
        inputs = [x.clone().requires_grad_(), *model.parameters()]
        # torch's fused attention has none
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = model(inputs[0]).square().mean()
            grads = torch.autograd.grad(y, inputs, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    same(list(second(ours)), list(second(eager)))


@pytest.mark.parametrize("name", NETS)
def test_graphs_that_are_kept_and_run_in_parts(name):
    eager, x = net(name)
    results = []
    for model in (with_recipes(eager), eager):
        torch.manual_seed(3)
        inputs = [x.clone().requires_grad_(), *model.parameters()]
        y = model(inputs[0]).square().mean()
        parts = [
            *torch.autograd.grad(y, inputs, retain_graph=True),
            *torch.autograd.grad(y, inputs[:1], retain_graph=True),
            *torch.autograd.grad(y, inputs[2:3], retain_graph=True),
            *torch.autograd.grad(y, inputs),
        ]
        results.append(parts)
    same(*results)


@pytest.mark.parametrize("name", NETS)
def test_nothing_lives_after_a_step(name):
    """No reference cycle keeps a graph, abandoned or run."""
    eager, x = net(name)
    ours = with_recipes(eager)
    alive: list[Any] = []
    original = recipes.Leaf.__init__

    def noted(self, *args):
        original(self, *args)
        alive.append(weakref.ref(self))

    recipes.Leaf.__init__ = noted
    gc.collect()
    gc.disable()
    try:
        given, late = x.clone().requires_grad_(), []
        # the last gradient: the tensors of later blocks are free before the backward ends
        given.register_hook(lambda _: late.append(sum(ref() is not None for ref in alive)))
        y = ours(given)
        held = sum(ref() is not None for ref in alive)
        y.sum().backward()
        assert held > 0
        assert late[0] <= held / 3, (late, held)
        del y
        assert not any(ref() is not None for ref in alive)
        y = ours(x.clone().requires_grad_())
        del y
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()
        recipes.Leaf.__init__ = original


def test_beside_fused_layers():
    """Fused layers save recipes of their inputs, and functions those of fused norms' results."""
    for name in ("diffusion", "encoder", "rotary"):
        eager, x = net(name)
        for p in eager.modules():
            if isinstance(p, nn.Dropout):
                p.p = 0.0
        fused, both = copy.deepcopy(eager), copy.deepcopy(eager)
        fusedckpt.fuse(fused)
        fusedckpt.fuse(both, recompute_elementwise=True)
        torch.testing.assert_close(step(both, x), step(eager, x), rtol=1e-9, atol=1e-12)
        assert saved_bytes(both, x) <= saved_bytes(fused, x)
        peaks = [peak_of_step(m, x) for m in (fused, both)]
        assert peaks[1] <= peaks[0], (name, peaks)
        # the last one has no MLP, attention or norm that is fused
        alone = saved_bytes(with_recipes(eager), x)
        assert saved_bytes(both, x) < alone or name == "rotary"


def test_a_model_that_is_a_block_and_back():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    kinds = [type(m) for m in mlp.modules()]
    x = tokens()
    expected = step(mlp, x)
    assert fusedckpt.fuse(mlp, recompute_elementwise=True).swapped
    torch.testing.assert_close(step(mlp, x), expected)
    twin = copy.deepcopy(mlp)
    fusedckpt.unfuse(twin)
    assert [type(m) for m in twin.modules()] == kinds
    model, _ = net("encoder")
    ours = with_recipes(model)
    assert isinstance(ours, recipe_models.WithRecipes)
    assert type(ours).__name__ == "Sequential"
    fusedckpt.fuse(ours, recompute_elementwise=True)
    fusedckpt.unfuse(ours)
    assert type(ours) is nn.Sequential
    with pytest.raises(TypeError, match="recompute_elementwise must be"):
        fusedckpt.fuse(model, recompute_elementwise="yes")


def test_the_result_of_a_block_that_begins_with_a_norm():
    """It has no recipe: only a norm alone has."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    eager = nn.Sequential(nn.Linear(D, D), mlp, nn.Linear(D, D)).double()
    x = torch.randn(1000, D, dtype=torch.float64)
    fused = with_recipes(eager, norm=True, mlp=True, linear=True)
    torch.testing.assert_close(step(fused, x), step(eager, x), rtol=1e-9, atol=1e-9)


def test_small_tensors_run_as_they_are(monkeypatch):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 1 << 20)
    eager, x = net("residual")
    assert saved_bytes(with_recipes(eager), x) == saved_bytes(eager, x)


def test_modules_that_run_again_hold_nothing_of_the_forward():
    """The context of a call, which they keep, has no recipe: saved bytes and peak are fuse's."""
    torch.manual_seed(0)
    eager = nn.Sequential(*[DecoderLayer(D, Attention(D)) for _ in range(6)]).double()
    x = torch.randn(2, 16 * T, D, dtype=torch.float64)
    fused, both = copy.deepcopy(eager), copy.deepcopy(eager)
    fusedckpt.fuse(fused)
    fusedckpt.fuse(both, recompute_elementwise=True)
    for model in (fused, both):
        same(step(model, x)[1:3], step(eager, x)[1:3])
    for layer in fused:
        # its attention runs again, too
        set_notes(layer.attention, follows_nodes=False)
    assert saved_bytes(both, x) <= saved_bytes(fused, x)
    peaks = [peak_of_step(m, x) for m in (fused, both)]
    assert peaks[1] <= peaks[0], peaks


def test_choices():
    """Reports ask which functions made what, and where a sequence was cut."""
    eager, x = net("residual", torch.float32)
    ours = with_recipes(eager)
    with tracker.choices() as noted:
        ours(x)
    made = [choice for choice in noted if choice.functions]
    assert made[0].functions == ("relu", "batch_norm")
    assert made[0].nbytes == IMAGE // 2
    assert not any(choice.cut for choice in noted)
    recipes_of = {choice.functions for choice in noted}
    assert () in recipes_of

    class Sums(nn.Module):
        def forward(self, x):
            for _ in range(tracker.LIMIT + 2):
                x = torch.sigmoid(x)
            return x

    long = with_recipes(nn.Sequential(nn.Linear(D, D), Sums()))
    with tracker.choices() as noted:
        long(tokens())
    (cut,) = [choice for choice in noted if choice.cut]
    assert cut.cut == ("sigmoid",) * (tracker.LIMIT + 1)


def test_python_work_of_a_function():
    """Calls of Python that a function takes more; a small one takes that of the mode alone."""
    x = torch.randn(4, D, requires_grad=True) * 1
    y = torch.randn(4, D)

    def calls(run, floor: int) -> int:
        count = [0]

        def noted(frame, event, arg):
            count[0] += event == "call"

        known = tracker.Tracker(floor=floor)
        with tracker.tracking(known), recipe_mode.RecipeMode(known, floor):
            run()
            sys.setprofile(noted)
            run()
            sys.setprofile(None)
        return count[0]

    small, large = x.nbytes + 1, x.nbytes
    # the lambda, and the mode
    assert calls(lambda: x + y, small) == 2
    assert calls(lambda: x + y, large) <= 15
    assert calls(lambda: x * y, large) <= 24
    weight, bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
    assert calls(lambda: F.gelu(x), large) <= 27
    # torch has 22 of these
    assert calls(lambda: F.layer_norm(x, (D,), weight, bias), large) <= 57


class LinearAndMLP(nn.Module):
    """A residual MLP and a linear behind norms; all but the two sums run fused."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.LayerNorm(D)
        self.linear = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        x = x + self.linear(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def test_the_mode_sees_functions_of_the_model(monkeypatch):
    """Each attribute that code of ours reads from a tensor would call it, too."""
    model = LinearAndMLP()
    fusedckpt.fuse(model, recompute_elementwise=True)
    x = tokens().requires_grad_() * 1
    model(x)
    seen = []
    plain = recipe_mode.RecipeMode.__torch_function__

    def noted(self, func, *args):
        seen.append(func)
        return plain(self, func, *args)

    monkeypatch.setattr(recipe_mode.RecipeMode, "__torch_function__", noted)
    model(x)
    assert seen.count(torch.Tensor.add) == 2
    assert len(seen) <= 2


def test_batched_gradients_behind_a_dropout():
    """Its noise is drawn again outside of the vmap, as in the forward."""
    eager = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.GELU(), nn.Linear(D, D))
    ours = with_recipes(eager)
    x, dys = tokens(), torch.eye(2)[:, 0]
    gradients = []
    for model in (ours, eager):
        parameters = list(model.parameters())
        torch.manual_seed(0)
        losses = [model(x).square().mean() for _ in range(2)]
        by_flag = torch.autograd.grad(losses[0], parameters, dys, is_grads_batched=True)
        by_vmap = torch.vmap(lambda dy, y=losses[1], p=parameters: torch.autograd.grad(y, p, dy))
        gradients.append([*by_flag, *by_vmap(dys)])
    same(*gradients)
