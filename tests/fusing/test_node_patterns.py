"""Patterns of attention's nodes: calls that differ from those before in nodes or results."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn, saved_bytes
from test_attention import D, H, T, layer_of
from test_attention_recipes import Separate, adapted, assert_steps, follows, pair, step
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fusedckpt import fuse
from fusedckpt.layers.notes import notes_of
from fusedckpt.recipes import attention_recipes, node_patterns
from fusedckpt.recipes.attention_recipes import _Sequence
from fusedckpt.recipes.node_patterns import FunctionStep, UnknownNode


class PartsInOrder(nn.Module):
    """Queries, keys and values are parts of one linear's result, in an order that changes."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.order = nn.Linear(D, 3 * D), nn.Linear(D, D), (0, 1, 2)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3 * H, -1)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(*[parts[i] * 1.5 for i in self.order])
        return self.out(y.transpose(1, 2).flatten(2))


class Shares(Separate):
    """Values are made of the result of the keys' linear, or of another."""

    shares = True

    def between(self, q, k, v):
        return q * 1.5, k * 1.5, (k if self.shares else v) * 2


class Returns(Separate):
    """Returns more results where asked."""

    returns_more = True

    def between(self, q, k, v):
        self.product = q * k
        return q * 1.5, k, v

    def forward(self, x):
        y = super().forward(x)
        return (y, self.product) if self.returns_more else y


class OneHead(Separate):
    """All heads have the same keys, by a view of a tensor that another function reads."""

    def between(self, q, k, v):
        key = k[:, :1] * 1.5
        return q * key, key.expand_as(q), v


class WritesLast(Separate):
    """Its code may write to the queries behind all nodes."""

    writes = False

    def between(self, q, k, v):
        q = q * 1.5
        if self.writes:
            with torch.no_grad():
                q.mul_(2)
        return q, k, v


def test_parts_in_another_order():
    """The nodes are of the same classes, and read other results of one node."""
    eager, model = pair(PartsInOrder)
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 1, 2)):
        for each in (eager, model):
            each.attention.order = order
        assert_steps(eager, model, 2)
        assert follows(model)


@pytest.mark.parametrize("first", [True, False])
def test_nodes_that_are_the_same(first):
    eager, model = pair(Shares)
    for shares in (first, not first, first):
        for each in (eager, model):
            each.attention.shares = shares
        assert_steps(eager, model, 2)
        assert follows(model)


def test_other_shapes_before_the_backward():
    """A recipe has the functions of its own call."""
    eager, model = pair(Separate)
    assert_steps(eager, model, 2)
    found = []
    for each in (eager, model):
        each.zero_grad()
        torch.manual_seed(0)
        losses = [each(randn(2, size, D, dtype=torch.float64)).square().sum() for size in (7, 3, 5)]
        for loss in losses:
            loss.backward()
        found.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*found)
    assert follows(model)


def test_other_numbers_of_results():
    """A product of queries and keys, which a caller gets, saves recipes of both, too."""
    torch.manual_seed(0)
    eager = Returns().to(DEVICE, torch.float64)
    model = nn.Sequential(copy.deepcopy(eager))
    fuse(model)
    x = randn(2, T, D, dtype=torch.float64).requires_grad_()
    nbytes = []
    for number, more in enumerate((True, True, True, False, False, True)):
        eager.returns_more = model[0].returns_more = more
        found = []
        for each in (eager, model):
            each.zero_grad()
            results = each(x)
            loss = sum(y.square().sum() for y in (results if more else [results]))
            loss.backward()
            found.append([p.grad for p in each.parameters()])
        torch.testing.assert_close(*found)
        eager.product = model[0].product = None
        if number < 3:
            nbytes.append(saved_bytes(model, [x]))
            assert follows(model)
    assert nbytes == nbytes[:1] * 3


def test_recipes_of_a_whole_and_of_its_view():
    eager, model = pair(OneHead)
    x = randn(2, T, D, dtype=torch.float64).requires_grad_()
    first = saved_bytes(model, [x])
    assert_steps(eager, model, 3)
    assert follows(model)
    assert saved_bytes(model, [x]) == first


class AttendsToAttention(Separate):
    """Attention reads the result of attention before it."""

    def between(self, q, k, v):
        y = F.scaled_dot_product_attention(q * 1.5, k * 1.5, v * 1)
        q = self.key(y.transpose(1, 2).flatten(2)).unflatten(-1, (H, -1)).transpose(1, 2)
        return q * 1.25, k * 1.25, v * y


def test_attention_behind_attention():
    """Stays a checkpoint: the walk ends at the last one."""
    eager, model = pair(AttendsToAttention)
    assert_steps(eager, model)
    assert not follows(model)


def test_a_write_behind_all_nodes_that_begins_later():
    """The version tells it: the module becomes a checkpoint again."""
    eager, model = pair(WritesLast)
    assert_steps(eager, model)
    assert follows(model)
    for each in (eager, model):
        each.attention.writes = True
    assert_steps(eager, model)
    assert not follows(model)


def test_nodes_of_another_torch(monkeypatch):
    """Without an attribute they tell nothing."""
    eager, model = pair(Separate)

    def operation_of(node, number):
        raise AttributeError

    monkeypatch.setattr(node_patterns, "operation_of", operation_of)
    assert_steps(eager, model)
    assert not follows(model)


@pytest.mark.parametrize("name", ["_MOST_NODES", "_MOST_BEHIND"])
def test_calls_of_many_nodes(name, monkeypatch):
    monkeypatch.setattr(node_patterns, name, 4)
    eager, model = pair(Separate)
    assert_steps(eager, model)
    assert not follows(model)


def test_functions_before_the_call_are_none_of_it():
    """A sum reads, and does not save, the tensor that other functions have made."""

    class AddsOther(Separate):
        def forward(self, x, memory):
            self.memory = memory.unflatten(-1, (H, -1)).transpose(1, 2)
            return super().forward(x)

        def between(self, q, k, v):
            return q + self.memory, k, v

    eager, model = pair(AddsOther)
    found = []
    for each in (eager.attention, model.attention):
        linear = nn.Linear(D, D).to(DEVICE, torch.float64)
        torch.nn.init.ones_(linear.weight)
        for _ in range(3):
            x = torch.ones(2, T, D, device=DEVICE, dtype=torch.float64, requires_grad=True)
            each(x * 1, linear(x)).square().sum().backward()
            found.append(x.grad)
    torch.testing.assert_close(found[:3], found[3:])
    assert not follows(model)


def test_values_are_freed_behind_their_last_reader():
    """In backward no more values live than in the forward."""
    made, living = [], []

    def function(*inputs):
        living.append([reference() is not None for reference in made])
        result = inputs[0] + 1
        made.append(weakref.ref(result))
        return result

    steps = [FunctionStep(0, [0], [0]), FunctionStep(0, [1], []), FunctionStep(0, [2, 1], [2, 1])]
    result = _Sequence([function], [*steps, FunctionStep(0, [3], [3])])(torch.zeros(1))
    assert result.item() == 4
    assert living == [[], [True], [True, True], [False, False, True]]


def test_patterns_tell_the_last_readers():
    _, model = pair(Shares)
    for _ in range(2):
        step(model, randn(2, T, D, dtype=torch.float64))
    (pattern,) = model.attention._fusedckpt.patterns
    for recipe in (pattern.result, *pattern.recipes):
        num = len(recipe.inputs)
        last = [i for step in recipe.steps for i in step.last]
        # each value but the last one, once
        assert sorted(last) == [*range(num + len(recipe.steps) - 1)]
        for place, each in enumerate(recipe.steps):
            assert {*each.last} <= {*each.arguments}
            assert all(not {*each.last} & {*later.arguments} for later in recipe.steps[place + 1 :])


def test_inputs_of_attention_alone_are_sampled(monkeypatch):
    """The others are right where these are, which are made of them."""
    eager, model = pair(adapted)
    numbers = []
    checks_of = attention_recipes.checks_of

    def counted(name, tensors, is_rounded):
        numbers.append(len(tensors))
        return checks_of(name, tensors, is_rounded)

    monkeypatch.setattr(attention_recipes, "checks_of", counted)
    assert_steps(eager, model)
    assert numbers == [3, 3]
    (pattern,) = model.attention._fusedckpt.patterns
    assert len(pattern.found) > 3


class AddsItsArgument(Separate):
    """The argument is a part of its result, which a norm reads."""

    def forward(self, x):
        return x + super().forward(x)


def test_bytes_where_a_norm_reads_a_sum_with_the_argument():
    torch.manual_seed(0)
    layers = nn.Linear(D, D), nn.Tanh(), AddsItsArgument(), nn.LayerNorm(D), nn.Tanh()
    model = nn.Sequential(*layers).to(DEVICE)
    fuse(model)
    x = randn(2, T, D, dtype=torch.float32).requires_grad_()
    nbytes = [saved_bytes(model, [x]) for _ in range(4)]
    assert nbytes == nbytes[:1] * 4


class ReadsItsArgument(Separate):
    """Queries are views of the argument."""

    def between(self, q, k, v):
        return self.argument.unflatten(-1, (H, -1)).transpose(1, 2), k, v

    def forward(self, x):
        self.argument = x
        y = super().forward(x)
        self.argument = None
        return y


class LearnedKeys(Separate):
    """Keys are views of a parameter."""

    def __init__(self):
        super().__init__()
        self.keys = nn.Parameter(torch.linspace(-1, 1, T * D).view(H, T, D // H))

    def between(self, q, k, v):
        return q * 1.5, self.keys.expand_as(k), v


@pytest.mark.parametrize("kind", [ReadsItsArgument, LearnedKeys])
def test_inputs_that_are_views_of_saved_tensors(kind):
    eager, model = pair(kind)
    x = randn(2, T, D, dtype=torch.float64).requires_grad_()
    first = saved_bytes(model, [x])
    for _ in range(3):
        torch.testing.assert_close(step(model, x), step(eager, x))
    assert follows(model)
    assert saved_bytes(model, [x]) == first


def test_transforms_and_forward_mode_between():
    """They run as a checkpoint does; then recipes are saved as before."""
    eager, model = pair(Separate)
    assert_steps(eager, model, 2)
    x = randn(3, 2, T, D, dtype=torch.float64)

    def gradients(each):
        def loss(x):
            return each(x).square().sum()

        return torch.func.grad(loss)(x[0]), torch.func.vmap(torch.func.grad(loss))(x)

    torch.testing.assert_close(gradients(model), gradients(eager))
    assert follows(model)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = [torch.func.jvp(each, (x[0],), (x[1],)) for each in (model, eager)]
    torch.testing.assert_close(*found)
    assert follows(model)
    assert_steps(eager, model, 2)
    assert follows(model)


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "context",
    [Watching, lambda: disable_saved_tensors_hooks("none here")],
    ids=["function mode", "no hooks"],
)
def test_calls_in_contexts_run_as_eager(context):
    eager, model = pair(Separate)
    assert_steps(eager, model, 2)
    patterns = model.attention._fusedckpt.patterns
    with context():
        x = randn(2, T - 2, D, dtype=torch.float64)
        torch.testing.assert_close(step(model, x), step(eager, x))
    assert model.attention._fusedckpt.patterns is patterns
    assert_steps(eager, model, 2)
    assert follows(model)


def test_hooks_of_other_code_get_as_little_as_from_a_checkpoint():
    eager, model = pair(Separate)
    x = randn(2, T, D, dtype=torch.float64).requires_grad_()

    def packed_bytes(each):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.nbytes)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            each(x)
        return sum(sizes)

    first = packed_bytes(model)
    assert first < packed_bytes(eager)
    assert_steps(eager, model, 2)
    assert follows(model)
    assert packed_bytes(model) == first
    assert_steps(eager, model, 1)
    assert follows(model)


def in_halves():
    """Return hooks that save other values."""
    return saved_tensors_hooks(lambda x: x.to(torch.bfloat16), lambda x: x.double())


class SetsHooks(Separate):
    """Its code sets hooks on saved tensors, in some of its calls, around one function."""

    hooks_at = ""

    def at(self, place):
        return in_halves() if self.hooks_at == place else nullcontext()

    def between(self, q, k, v):
        with self.at("product"):
            return q * k, k * q, v

    def forward(self, x):
        with self.at("all"):
            inputs = self.query(x), self.key(x), self.value(x)
            q, k, v = self.between(*[x.unflatten(-1, (H, -1)).transpose(1, 2) for x in inputs])
            with self.at("attention"):
                y = F.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("place", ["product", "attention", "all"])
def test_hooks_inside_the_module(place):
    """The tensors that they have packed are theirs, and no recipe reads them."""
    eager, model = pair(SetsHooks)
    assert_steps(eager, model, 2)
    assert follows(model)
    for each in (eager, model):
        each.attention.hooks_at = place
    assert_steps(eager, model, 2)
    assert not follows(model)


def test_a_view_of_a_leaf_as_the_argument():
    torch.manual_seed(0)
    eager = layer_of(Separate()).to(DEVICE, torch.float64).attention
    model = nn.Sequential(copy.deepcopy(eager))
    fuse(model)
    for number in range(3):
        found = []
        for each in (eager, model):
            each.zero_grad()
            torch.manual_seed(number)
            leaf = randn(2 * T, D, dtype=torch.float64).requires_grad_()
            each(leaf.view(2, T, D)).square().sum().backward()
            found.append([leaf.grad, *[p.grad for p in each.parameters()]])
        torch.testing.assert_close(*found)
    assert any(notes_of(module).follows_nodes for module in model)


def test_calls_that_are_unknown_do_not_raise(monkeypatch):
    """As where a node was freed in between."""
    eager, model = pair(Separate)
    assert_steps(eager, model, 2)

    def saved_at(node, packed):
        raise UnknownNode

    monkeypatch.setattr(attention_recipes, "_saved_at", saved_at)
    assert_steps(eager, model, 2)
    assert not follows(model)


class Scales(Separate):
    """Adds a parameter with a factor, which its node has as an option."""

    def __init__(self):
        super().__init__()
        self.position, self.alpha = nn.Parameter(torch.ones(T, D // H)), 1

    def between(self, q, k, v):
        return torch.add(q, self.position[: q.shape[2]], alpha=self.alpha), k, v


def test_a_factor_that_comes_later():
    eager, model = pair(Scales)
    assert_steps(eager, model, 2)
    assert follows(model)
    for each in (eager, model):
        each.attention.alpha = 2
    assert_steps(eager, model, 2)
    assert not follows(model)


def test_patterns_of_several_kinds_of_calls():
    """Four stay, the last ones first."""
    eager, model = pair(PartsInOrder)
    orders = (0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (2, 0, 1)
    assert_steps(eager, model, 1)
    known = []
    for order in (*orders[:4], *orders[:4], *orders[4:]):
        for each in (eager, model):
            each.attention.order = order
        assert_steps(eager, model, 1)
        known.append(model.attention._fusedckpt.patterns)
    assert [len(patterns) for patterns in known] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert known[3] is known[7]
    assert known[9][2:] == known[3][:2]


class ReturnsConstants(Separate):
    def forward(self, x):
        return super().forward(x), torch.zeros(3, device=x.device)


def test_results_without_a_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(ReturnsConstants().to(DEVICE, torch.float64))
    fuse(model)
    for _ in range(2):
        model(randn(2, T, D, dtype=torch.float64).requires_grad_())[0].sum().backward()
    assert notes_of(model[0]).follows_nodes


class ReturnsPart(Separate):
    """Its result is a part of a linear's, or has the argument as a part."""

    adds, start = False, 1

    def forward(self, x):
        y = super().forward(x)[:, self.start :]
        return x + y if self.adds else y


@pytest.mark.parametrize(("adds", "start"), [(False, 1), (True, 0)])
def test_a_norm_of_a_result_that_has_no_recipe(adds, start):
    """Nor had it one in the calls before, or it begins later."""
    torch.manual_seed(0)
    layers = nn.Linear(D, D), ReturnsPart(), nn.RMSNorm(D), nn.Linear(D, D)
    eager = nn.Sequential(*layers).to(DEVICE)
    eager[1].start = start
    model = copy.deepcopy(eager)
    fuse(model)
    for number in range(4):
        eager[1].adds = model[1].adds = adds and number > 1
        found = []
        for each in (eager, model):
            each.zero_grad()
            torch.manual_seed(number)
            each(randn(2, T, D, dtype=torch.float32)).square().sum().backward()
            found.append([p.grad for p in each.parameters()])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_hooks_that_bring_a_bias_for_a_call_alone():
    """As code that shards parameters does: no recipe reads them behind it."""
    eager, model = pair(Separate)
    assert_steps(eager, model, 2)
    for each in (eager, model):
        linear = each.attention.query
        whole = linear.bias.detach().clone()
        linear.register_forward_pre_hook(lambda m, _x, whole=whole: setattr(m.bias, "data", whole))
        linear.register_forward_hook(
            lambda m, _x, _y: setattr(m.bias, "data", torch.zeros_like(m.bias.data))
        )
    assert_steps(eager, model, 2)


def test_one_comparison_of_samples():
    _, model = pair(Separate)
    x = randn(2, T, D, dtype=torch.float64)
    for _ in range(2):
        step(model, x)
    loss = model(x).square().sum()
    with torch.profiler.profile() as events:
        loss.backward()
    counts = {event.key: event.count for event in events.key_averages()}
    assert [counts.get(f"aten::{name}", 0) for name in ("cat", "eq")] == [1, 1]


def test_bytes_of_rounded_inputs():
    """A checkpoint rounds its argument: recipes would be made of other values."""
    torch.manual_seed(0)
    model = layer_of(Separate()).to(DEVICE)
    fuse(model, store="int8")
    x = randn(2, T, D, dtype=torch.float32).requires_grad_()
    nbytes = [saved_bytes(model, [x]) for _ in range(3)]
    assert nbytes == nbytes[:1] * 3
    assert not follows(model)
