"""Where a tensor comes from: one row a storage, of a tensor of the graph, which keeps nothing."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref

import pytest
import torch
from support import DEVICE, randn
from torch import nn

import fusedckpt
from fusedckpt.autograd import index, recipes
from fusedckpt.autograd.recipes import Leaf, Made

D = 8


def doubled(x: torch.Tensor, maker: str = index.NORM, *parameters: torch.Tensor | None):
    """Return 2x, and the recipes that its readers asked for."""
    y, made = x * 2, []

    def source(whole, values):
        made.append(
            Made(
                "twice",
                lambda t, *_: t * 2,
                [Leaf(x), *(Leaf(v) for v in values if v is not None)],
                [whole],
            )
        )
        return made[-1]

    index.put(y, maker, source, *parameters)
    return y, made


class TwoReaders(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        n = self.norm(x)
        return self.a(n) + self.b(n)


@pytest.mark.parametrize("has_recipes", [False, True], ids=["", "recipes"])
def test_a_norm_that_two_linears_read_has_one_recipe(has_recipes, monkeypatch):
    from fusedckpt.recipes import recipe_mode

    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
    model = TwoReaders().to(DEVICE)
    fusedckpt.fuse(model, recompute_elementwise=has_recipes)
    made = []
    init = Made.__init__
    monkeypatch.setattr(Made, "__init__", lambda self, *a: (made.append(a[0]), init(self, *a))[1])
    model(randn(5, D))
    assert made == ["norm"]


def test_readers_share_a_recipe_and_views_find_it():
    y, made = doubled(randn(4, D))
    views = [index.view_of(t, index.NORM) for t in (y, y.view(-1), y[1:])]
    assert len(made) == 1 == len({id(view.source) for view in views})
    assert torch.equal(views[2].read(), y[1:])
    assert index.view_of(y, index.LINEAR) is None
    del views
    made.clear()
    assert index.view_of(y, index.NORM) is not None
    assert len(made) == 1


def test_an_alias_has_no_recipe():
    """It hides the hooks of the tensor, as those of a unit whose parameters FSDP2 frees."""
    y, _ = doubled(randn(4, D))
    alias = y.detach().requires_grad_() * 1
    assert index.view_of(y.detach().requires_grad_(), index.NORM) is None
    assert index.view_of(alias, index.NORM) is None
    y.register_hook(lambda g: g)
    assert index.view_of(y, index.NORM) is None
    assert index.view_of(y.view(-1), index.NORM) is None


def test_writes_and_freed_parameters_end_it():
    p = nn.Parameter(randn(D).detach())
    y, _ = doubled(randn(4, D), index.NORM, p, None)
    assert index.view_of(y, index.NORM) is not None
    storage = p.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    assert index.view_of(y, index.NORM) is None
    storage.resize_(size)
    assert index.view_of(y, index.NORM) is not None
    with torch.no_grad():
        p.zero_()
    assert index.view_of(y, index.NORM) is None
    y, _ = doubled(randn(4, D))
    with torch.no_grad():
        y.view(-1)[0] = 1
    assert index.view_of(y, index.NORM) is None


def test_two_tensors_of_one_storage_each_have_their_recipe():
    """A Function may return its input's bytes as another tensor: whole rows that it gathered."""
    y, of_y = doubled(randn(4, D))
    other = torch.autograd.function.Function
    alias = type(
        "Same",
        (other,),
        {
            "forward": staticmethod(lambda ctx, t: t.detach()),
            "backward": staticmethod(lambda ctx, g: g),
        },
    ).apply(y)
    assert alias.untyped_storage() is y.untyped_storage()
    made = Made("rows", lambda t: t, [Leaf(y)], [alias])
    index.put(alias, index.GATHERED_ROWS, lambda *_: made)
    assert index.view_of(alias, index.GATHERED_ROWS).source is made
    assert index.view_of(alias, index.NORM) is None
    assert index.view_of(y, index.NORM).source is of_y[0]
    assert index.view_of(y, index.GATHERED_ROWS) is None


def test_nothing_is_kept():
    p = nn.Parameter(randn(D).detach())
    x = randn(4, D)
    y, made = doubled(x, index.NORM, p)
    index.view_of(y, index.NORM)
    made.clear()
    alias, row = y.detach(), weakref.ref(index.known_of(y))
    gone = [weakref.ref(y), weakref.ref(p)]
    del y, p
    # the storage lives, the tensor and its parameters do not
    assert [reference() for reference in gone] == [None, None]
    assert row() is not None
    del alias
    assert row() is None


def test_a_result_keeps_nothing_of_its_forward(monkeypatch):
    from fusedckpt.recipes import recipe_mode

    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Sigmoid(), nn.Tanh()).to(DEVICE)
    fusedckpt.fuse(model, recompute_elementwise=True)
    kept = []
    fill = recipes.Made.__init__
    monkeypatch.setattr(
        recipes.Made,
        "__init__",
        lambda self, *a: (kept.append(weakref.ref(self)), fill(self, *a))[1],
    )
    y = model(randn(5, D))
    assert kept
    y.sum().backward()
    assert [reference for reference in kept if reference() is not None] == []


def test_an_error_in_a_forward_keeps_nothing(monkeypatch):
    from fusedckpt.recipes import recipe_mode

    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
    results = []

    class FailsAtOnce(nn.Module):
        def forward(self, x):
            results.append((x + 1).detach())
            raise ValueError

    model = nn.Sequential(nn.Linear(D, D), nn.Sigmoid(), FailsAtOnce()).to(DEVICE)
    fusedckpt.fuse(model, recompute_elementwise=True)
    with pytest.raises(ValueError):
        model(randn(5, D))
    known = index.known_of(results[0])
    assert known is None or known.kept is None


def test_parameters_may_be_swapped(monkeypatch):
    """torch.utils.swap_tensors refuses a tensor with a weak reference."""
    from fusedckpt.recipes import recipe_mode

    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
    model = nn.Sequential(nn.Linear(D, D), nn.Sigmoid(), TwoReaders()).to(DEVICE)
    fusedckpt.fuse(model, recompute_elementwise=True)
    model(randn(5, D)).sum().backward()
    assert not any(map(weakref.getweakrefcount, model.parameters()))


def test_copies_know_nothing():
    y, _ = doubled(randn(4, D))
    leaf = y.detach()
    for again in (copy.deepcopy(leaf), pickle.loads(pickle.dumps(leaf)), leaf.clone()):
        assert index.known_of(again) is None
    assert index.view_of(y.clone(), index.NORM) is None


def test_tensors_without_a_storage():
    sparse = torch.eye(D).to_sparse().requires_grad_() * 1
    assert index.view_of(sparse, index.NORM) is None
    seen = []

    def function(x):
        seen.append(index.view_of(x * 2, index.NORM))
        return (x * 2).sum()

    x = randn(4, D)
    torch.func.grad(function)(x)
    torch.func.vmap(torch.func.grad(function))(x)
    with torch.inference_mode():
        seen.append(index.view_of(torch.ones(2), index.NORM))
    assert seen == [None] * 3


def test_threads_that_share_an_input(monkeypatch):
    from fusedckpt.recipes import recipe_mode

    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
    eager = [TwoReaders().to(DEVICE, torch.float64) for _ in range(4)]
    fused = copy.deepcopy(eager)
    for model in fused:
        fusedckpt.fuse(model, recompute_elementwise=True)
    x = randn(5, D, dtype=torch.float64) * 1
    found: dict[int, list[torch.Tensor]] = {}

    def run(i):
        for _ in range(20):
            y = fused[i](x)
            loss = y.square().sum()
            found[i] = list(torch.autograd.grad(loss, [*fused[i].parameters()]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, model in enumerate(eager):
        expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        torch.testing.assert_close(found[i], list(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("has_recipes", [False, True], ids=["", "recipes"])
def test_a_read_after_backward_freed_the_graph(has_recipes):
    """A lazy recipe of a graph that is gone is none: the reader saves its tensor."""
    model = TwoReaders().to(DEVICE)
    fusedckpt.fuse(model, recompute_elementwise=has_recipes)
    n = model.norm(randn(5, D))
    n.sum().backward()
    assert index.view_of(n, index.NORM) is None
