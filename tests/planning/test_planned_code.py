"""Code between units: what is planned, predicted and shown is what runs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from budgets import ResNet
from torch import nn

from fusedckpt import Plan, plan, report
from fusedckpt.planning.chain import Segment

LAYERS, WIDTH = 6, 64

CODE = {
    "relu": lambda x, y, scale: y.relu(),
    "gelu": lambda x, y, scale: F.gelu(y),
    "in place": lambda x, y, scale: F.relu(y, inplace=True),
    "view": lambda x, y, scale: y.view(-1, WIDTH),
    "scaled": lambda x, y, scale: y * 0.5,
    "scaled by a parameter": lambda x, y, scale: y * scale,
    "dropout": lambda x, y, scale: F.dropout(y, 0.1),
    "residual": lambda x, y, scale: x + y,
    "residual, relu": lambda x, y, scale: (x + y).relu(),
    "gated": lambda x, y, scale: x * y,
    # a view keeps all of what it is a part of
    "rows of more": lambda x, y, scale: torch.cat([y, y])[: len(y)],
}


class Coded(nn.Module):
    """Layers in a ModuleList, with code between them."""

    def __init__(self, code=None, pairs=False, holds=False):
        super().__init__()
        made = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            if pairs
            else nn.Linear(WIDTH, WIDTH)
            for _ in range(LAYERS)
        ]
        self.layers, self.head = nn.ModuleList(made), nn.Linear(WIDTH, WIDTH)
        self.scale, self.code, self.holds = nn.Parameter(torch.ones(WIDTH)), code, holds

    def forward(self, x):
        found = []
        for layer in self.layers:
            y = layer(x)
            x = y if self.code is None else CODE[self.code](x, y, self.scale)
            found.append(x) if self.holds else None
        return [self.head(x), *found]


def planned(model, **options):
    return plan(model, torch.randn(2048, WIDTH), progress=False, **options)


def segments(found):
    return [item for item in found.items if isinstance(item, Segment)]


@pytest.mark.parametrize("pairs", [False, True], ids=["linears", "pairs"])
@pytest.mark.parametrize("code", CODE)
def test_what_cannot_be_joined_is_not(code, pairs):
    model = Coded(code, pairs)
    for policy in ("none", "all", "sqrt", "uniform:2", "memory"):
        found = planned(model, policy=policy)
        assert found.measured_bytes <= found.predicted_bytes <= 1.02 * found.measured_bytes
        assert all(item.stop == item.start + 1 for item in segments(found))
    told = "code between these modules prevents one segment across them"
    places = "layers.0 and layers.1, layers.1 and layers.2, and 3 more; it saves"
    assert f"limited by      {told}: {places}" in str(found)


@pytest.mark.parametrize("holds", [False, True], ids=["handed on", "held in a list, too"])
def test_what_is_handed_on_is_joined_unless_it_is_held_anyway(holds):
    for policy in ("none", "all", "uniform:2"):
        found = planned(Coded(holds=holds), policy=policy)
        assert found.measured_bytes <= found.predicted_bytes <= 1.02 * found.measured_bytes
    assert [item.stop - item.start for item in segments(found)] == ([1] * 6 if holds else [3, 3])
    assert ("limited by" in str(found)) == holds


class Graph(nn.Module):
    """Layers over the nodes of a graph, whose edges are a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Neighbours(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges)
        return x


class Neighbours(nn.Linear):
    def forward(self, x, edges):
        return torch.sparse.mm(edges, super().forward(x)).relu()


@pytest.mark.parametrize("policy", ["none", "all", "sqrt"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_sparse_arguments(layout, policy):
    edges = torch.eye(2048).roll(1, 0).to_sparse(layout=layout)
    found = plan(Graph(), torch.randn(2048, WIDTH), edges, policy=policy, progress=False)
    assert found.measured_bytes <= found.predicted_bytes <= 1.02 * found.measured_bytes


class Skips(nn.Module):
    """What one half returns, the other gets, too; a mask that code makes is kept by units."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x):
        found, mask = [], torch.rand_like(x) > 0.5
        for layer in self.down:
            x = layer(x).relu()
            found.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, found.pop()], -1), mask=mask.float()).relu()
        return x


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        return super().forward(x) * mask


@pytest.mark.parametrize("policy", ["none", "all", "sqrt", "memory"])
def test_skip_connections_and_masks(policy):
    found = planned(Skips(), policy=policy)
    assert found.measured_bytes <= found.predicted_bytes <= 1.02 * found.measured_bytes


def test_the_policy_memory_is_the_least_of_all():
    model = Skips()
    peaks = [planned(model, policy=name).measured_bytes for name in ("none", "all", "sqrt")]
    assert planned(model, policy="memory").measured_bytes <= min(peaks)


@pytest.mark.parametrize("code", CODE)
def test_a_budget_that_fits_is_not_refused(code):
    model = Coded(code)
    peak = report(model, torch.randn(2048, WIDTH)).peak_bytes
    found = planned(model, budget=int(1.005 * peak))
    assert found.measured_bytes <= 1.005 * peak


def test_plans_around_code_are_applied_and_loaded(tmp_path):
    model, x = Coded("residual, relu", pairs=True), torch.randn(2048, WIDTH)
    plain = copy.deepcopy(model)
    planned(model, policy="memory").save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").apply(model)
    for each in (model, plain):
        each(x)[0].square().mean().backward()
    ours, theirs = ([p.grad for p in m.layers.parameters()] for m in (model, plain))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("policy", ["none", "all", "uniform:2"])
def test_what_callers_of_units_hold_meanwhile_is_counted_once(policy):
    model, x = ResNet((16, 32), 2), torch.randn(8, 3, 32, 32)
    found = plan(model, x, policy=policy, progress=False)
    assert found.measured_bytes <= found.predicted_bytes <= 1.01 * found.measured_bytes
