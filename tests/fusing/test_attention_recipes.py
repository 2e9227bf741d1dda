"""Attention saves recipes of its inputs by their nodes: after its first call no code runs twice."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, gemms, randn, saved_bytes
from test_attention import D, H, NormedAttention, OfTorch, OwnAttention, T, layer_of
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError
from zoo import LoraLinear

import fusedckpt
from fusedckpt import fuse
from fusedckpt.layers.fallbacks import take_fallback
from fusedckpt.layers.notes import notes_of, set_notes


class Separate(nn.Module):
    """With a linear for each input, one of which may have an adapter; keys may come from memory."""

    def __init__(self, query=nn.Linear):
        super().__init__()
        self.query, self.key, self.value = query(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        inputs = self.query(x), self.key(memory), self.value(memory)
        q, k, v = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in inputs)
        y = F.scaled_dot_product_attention(*self.between(q, k, v))
        return self.out(y.transpose(1, 2).flatten(2))

    def between(self, q, k, v):
        """Return queries, keys and values as attention reads them."""
        return q, k, v


class RotaryByBuffers(Separate):
    def __init__(self):
        super().__init__()
        angles = torch.arange(T)[:, None] / torch.arange(1, D // H + 1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def between(self, q, k, v):
        table = self.cos[: q.shape[2]], self.sin[: q.shape[2]]
        return self.rotated(q, *table), self.rotated(k, *table), v

    def rotated(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin


class ComplexRotary(RotaryByBuffers):
    def rotated(self, x, cos, sin):
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * cos[:, : D // H // 2]).flatten(-2).to(x.dtype)


class Repeated(Separate):
    def between(self, q, k, v):
        return q, *[x[:, ::2].repeat_interleave(2, 1) for x in (k, v)]


class ByPosition(Separate):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.ones(T, D // H))

    def between(self, q, k, v):
        position = self.position[: q.shape[2]]
        return (q + position) / 2, k - position, v


def adapted():
    return Separate(lambda *sizes: LoraLinear(nn.Linear(*sizes, bias=False), 4))


def pair(kind, dtype=torch.float64, layer=layer_of):
    torch.manual_seed(0)
    eager = nn.ModuleList([layer(kind())]).to(DEVICE, dtype)[0]
    model = copy.deepcopy(eager)
    fuse(model)
    return eager, model


def step(model, x, **options):
    """Return the result and all gradients of a training step."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = model(x * 1, **options)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def assert_steps(eager, model, count=3, **options):
    for number in range(count):
        x = randn(2, T - number, D, dtype=next(model.parameters()).dtype)
        torch.testing.assert_close(step(model, x, **options), step(eager, x, **options))


def follows(model):
    return any(notes_of(module).follows_nodes for module in model.modules())


KINDS = [
    OwnAttention,
    OfTorch,
    Separate,
    adapted,
    RotaryByBuffers,
    ComplexRotary,
    Repeated,
    ByPosition,
]


@pytest.mark.parametrize("kind", [*KINDS, NormedAttention])
def test_gradients_and_bytes(kind):
    """Those of the first call, which a checkpoint makes: also with other shapes in each step."""
    # norms in float64 run as torch's, whose nodes tell no function
    dtype = torch.float32 if kind is NormedAttention else torch.float64
    eager, model = pair(kind, dtype)
    x = randn(2, T, D, dtype=dtype).requires_grad_()
    first = saved_bytes(model, [x])
    assert follows(model)
    assert_steps(eager, model, 4)
    assert follows(model)
    assert saved_bytes(model, [x]) == first


class ModulatedAttention(nn.Module):
    """As a block of DiT: functions of code scale and shift a norm before attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D, elementwise_affine=False), Separate()
        self.vectors = nn.Linear(D, 2 * D)

    def forward(self, x):
        scale, shift = self.vectors(x[:, :1]).chunk(2, -1)
        return x + self.attention(self.norm(x) * (1 + scale) + shift)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("options", [{}, {"recompute_elementwise": True}], ids=str)
def test_bytes_behind_functions_of_code(options):
    """Hooks that count are told of the recipe of attention's argument, as with a checkpoint."""
    torch.manual_seed(0)
    model = ModulatedAttention().to(DEVICE)
    fuse(model, **options)
    other = copy.deepcopy(model)
    set_notes(other.attention, follows_nodes=False)
    x = randn(2, T, D).requires_grad_()
    nbytes = [[saved_bytes(each, [x]) for _ in range(3)] for each in (model, other)]
    assert follows(model)
    assert nbytes[0] == nbytes[1]


class ModeOfOthers(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_function_modes_of_other_code():
    """Backward may run outside of them: the module saves what eager does, and is named."""
    eager, model = pair(Separate)
    assert_steps(eager, model)
    with ModeOfOthers():
        assert_steps(eager, model)
    assert take_fallback(model.attention).key == "mode"
    assert follows(model)


@pytest.mark.parametrize("is_inside", [False, True])
def test_autocast(is_inside):
    """Copies of weights are made again; a backward inside casts nothing that nodes have not."""
    _, model = pair(RotaryByBuffers, torch.float32)
    other = copy.deepcopy(model)
    set_notes(other.attention, follows_nodes=False)
    nbytes = []
    for each in (model, other):
        for dtype in (torch.bfloat16, None, torch.bfloat16):
            x = randn(2, T, D, dtype=torch.float32).requires_grad_()
            with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
                nbytes.append(saved_bytes(each, [x]))
    assert follows(model)
    assert not follows(other)
    assert nbytes[:3] == nbytes[3:]
    x = randn(2, T, D, dtype=torch.float32)
    for forward, backward in ((True, is_inside), (False, is_inside)):
        found = []
        for each in (model, other):
            each.zero_grad()
            given = x.clone().requires_grad_()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=forward):
                loss = each(given * 1).float().square().sum()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=backward):
                loss.backward()
            found.append([given.grad, *[p.grad for p in each.parameters()]])
        torch.testing.assert_close(*found, rtol=0, atol=0)


def num_runs(function):
    """Return how often a function runs the module's code; its state is put back, also a count."""
    runs = []
    code = Separate.forward.__code__
    sys.setprofile(
        lambda frame, event, _: event == "call" and frame.f_code is code and runs.append(1)
    )
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(runs)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has no fused attention in float64")
def test_code_runs_once_and_gemms_as_often():
    """A checkpoint's recompute runs the code twice, but as many products."""
    eager, model = pair(Separate)
    x = randn(2, T, D, dtype=torch.float64)
    runs, products = [], []
    for _ in range(4):
        products.append(len(gemms(lambda: runs.append(num_runs(lambda: step(model, x))))))
    # the second call compares all values once, which takes three products more
    assert runs == [2, 1, 1, 1]
    assert products == [products[0], products[0] + 3, products[0], products[0]]
    assert products[0] == len(gemms(lambda: step(eager, x))) + 3
    # keys of other tensors than the module's argument
    memory = randn(2, 5, D, dtype=torch.float64)
    attention = [each.attention for each in (model, eager)]
    for _ in range(3):
        torch.testing.assert_close(*[step(a, x, memory=memory) for a in attention])


def by_data(x):
    x.data.mul_(2)


def without_grad(x):
    with torch.no_grad():
        x.mul_(2)


def assert_write_is_seen(model):
    """Backward raises, on a GPU one or two steps later."""

    def steps():
        for _ in range(3):
            step(model, randn(2, T, D, dtype=torch.float64))

    with pytest.raises(CheckpointError, match="the result of a linear, if code writes there"):
        steps()


class Writes(Separate):
    """Its code writes to a tensor before attention, which autograd does not see."""

    writer = staticmethod(by_data)

    def between(self, q, k, v):
        self.writer(q)
        return q * 1.5, k, v


@pytest.mark.parametrize("writer", [by_data, without_grad])
def test_an_unseen_write(writer, monkeypatch):
    """All values are compared once, and samples in each backward."""
    monkeypatch.setattr(Writes, "writer", staticmethod(writer))
    eager, model = pair(Writes)
    assert_steps(eager, model)
    assert not follows(model)
    # one that begins later
    monkeypatch.setattr(Writes, "writer", staticmethod(lambda _: None))
    eager, model = pair(Writes)
    assert_steps(eager, model)
    assert follows(model)
    monkeypatch.setattr(Writes, "writer", staticmethod(writer))

    if writer is without_grad:
        # which changes the nodes of a view: what they had saved stays
        assert_steps(eager, model)
        assert not follows(model)
        return
    assert_write_is_seen(model)


class QueriesOfKeys(Separate):
    """Queries are made of keys, which code may write behind that."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((D // H,), 1.5))
        self.write = None

    def between(self, q, k, v):
        q = k * self.scale
        if self.write is not None:
            self.write(k)
        return q, k, v


def test_an_unseen_write_to_a_tensor_that_two_functions_read():
    """All inputs of attention are compared, also one that a function before has saved."""
    eager, model = pair(QueriesOfKeys)
    assert_steps(eager, model)
    assert follows(model)
    model.attention.write = by_data
    assert_write_is_seen(model)


def in_place(q, k, v):
    return q.mul_(1.5), k, v


def part_in_place(q, k, v):
    k = k * 1
    k[..., :2] *= 2
    return q, k, v


def with_dropout(q, k, v):
    return F.dropout(q, 0.5), k, v


def of_made_constant(q, k, v):
    return q * torch.rand(q.shape[2:], device=q.device).to(q), k, v


@pytest.mark.parametrize("change", [in_place, part_in_place, with_dropout, of_made_constant])
def test_functions_that_nodes_do_not_tell(change, monkeypatch):
    """The checkpoint stays: recipes would save more, or other values."""
    monkeypatch.setattr(Separate, "between", staticmethod(change))
    eager, model = pair(Separate)
    for number in range(3):
        x = randn(2, T, D, dtype=torch.float64)
        found = []
        for each in (model, eager):
            torch.manual_seed(number)
            found.append(step(each, x))
        torch.testing.assert_close(*found)
    assert not follows(model)


def test_a_call_that_is_another():
    """With hooks, hooks on saved tensors, autocast and frozen weights, and as before between."""
    eager, model = pair(Separate)
    assert_steps(eager, model, 2)
    handles = []
    for each in (eager, model):
        key = each.attention.key
        handles.append(key.register_forward_hook(lambda _module, _args, y: y * 2))
    assert_steps(eager, model, 2)
    for handle in handles:
        handle.remove()
    with save_on_cpu():
        assert_steps(eager, model, 1)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert_steps(eager, model, 1)
    assert_steps(eager, model, 2)
    assert follows(model)
    for each in (eager, model):
        each.attention.value.weight.requires_grad_(False)
    assert_steps(eager, model, 2)
    assert follows(model)
    for each in (eager, model):
        # no node has a frozen bias
        each.attention.query.requires_grad_(False)
    assert_steps(eager, model, 2)
    assert not follows(model)


def test_a_weight_that_is_written_before_backward():
    _, model = pair(Separate)
    x = randn(2, T, D, dtype=torch.float64)
    for name in ("weight", "bias"):
        for _ in range(2):
            step(model, x)
        loss = model(x).square().sum()
        with torch.no_grad():
            getattr(model.attention.key, name).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_copies_and_pickles():
    """Find patterns of their own; unfuse leaves none."""
    eager, model = pair(Separate)
    assert_steps(eager, model, 2)
    assert model.attention._fusedckpt.patterns
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not twin.attention._fusedckpt.patterns
        assert_steps(eager, twin, 2)
        assert twin.attention._fusedckpt.patterns
    fusedckpt.unfuse(model)
    assert "_fusedckpt" not in vars(model.attention)


def test_second_derivatives():
    """As eager's where attention has some."""
    eager, model = pair(Separate)
    assert_steps(eager, model, 2)
    x = randn(2, T, D, dtype=torch.float64)
    found = []
    for each in (model, eager):
        weight = each.attention.out.weight
        (first,) = torch.autograd.grad(each(x).square().sum(), weight, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), weight)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_weight_with_other_memory_before_backward(name):
    """It raises no version: the first call's recompute differs, and nodes have the old weight."""
    x = randn(2, T, D, dtype=torch.float64)
    for num_steps in range(3):
        eager, model = pair(Separate)
        assert_steps(eager, model, num_steps)
        found = []
        for each in (eager, model):
            each.zero_grad()
            loss = each(x).square().sum()
            weight = getattr(each.attention, name).weight
            weight.data = weight.data * 1.1
            if each is model and not num_steps:
                with pytest.raises(CheckpointError, match="other values"):
                    loss.backward()
            else:
                loss.backward()
            found.append([p.grad for p in each.parameters()])
        if num_steps:
            torch.testing.assert_close(*found)
