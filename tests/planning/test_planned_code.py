"""Code between units: the plan that is predicted and shown is the one that runs."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from budgets import transformers_model
from plan_models import assert_predicted
from torch import nn

from fusedckpt import Plan, plan, report

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
# of these, code that saves no bytes of its own
SAVES_NOTHING = "in place", "view"


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
    return [item for item in found.items if item.level is None]


@pytest.mark.parametrize("code", CODE)
def test_what_cannot_be_joined_is_not(code):
    model = Coded(code, pairs="residual" in code)
    peak = report(model, torch.randn(2048, WIDTH)).peak_bytes
    for options in (
        {"policy": "none"},
        {"policy": "uniform:2"},
        {"policy": "memory"},
        # a budget that fits is not refused
        {"budget": int(1.005 * peak)},
    ):
        found = planned(model, **options)
        assert_predicted(found, 1.02)
        assert all(item.stop == item.start + 1 for item in segments(found))
    told = "code between these modules prevents one segment across them"
    places = "layers.0 and layers.1, layers.1 and layers.2, and 3 more"
    assert f"limited by      {told}: {places}" in str(found)
    assert ("more; it saves" in str(found)) == (code not in SAVES_NOTHING)


@pytest.mark.parametrize("holds", [False, True], ids=["handed on", "held in a list, too"])
def test_what_is_handed_on_is_joined_unless_it_is_held_anyway(holds):
    for policy in ("none", "all", "uniform:2"):
        found = planned(Coded(holds=holds), policy=policy)
        assert_predicted(found, 1.02)
    assert [item.stop - item.start for item in segments(found)] == ([1] * 6 if holds else [3, 3])
    assert ("limited by" in str(found)) == holds


class Graph(nn.Module):
    """Layers over the nodes of a graph, whose edges are a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Neighbors(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges)
        return x


class Neighbors(nn.Linear):
    def forward(self, x, edges):
        return torch.sparse.mm(edges, super().forward(x)).relu()


@pytest.mark.parametrize("policy", ["none", "sqrt"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_sparse_arguments(layout, policy):
    edges = torch.eye(2048).roll(1, 0).to_sparse(layout=layout)
    found = plan(Graph(), torch.randn(2048, WIDTH), edges, policy=policy, progress=False)
    assert_predicted(found, 1.02)


class Skips(nn.Module):
    """What one half returns, the other gets, too; a mask that code makes is kept by units."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.ModuleList(MaskedLinear() for _ in range(3))

    def forward(self, x):
        found, mask = [], torch.rand_like(x) > 0.5
        for layer in self.down:
            x = layer(x).relu()
            found.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, found.pop()], -1), mask=mask.float()).relu()
        return x


class MaskedLinear(nn.Linear):
    def __init__(self):
        super().__init__(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        return super().forward(x) * mask


def test_skip_connections_and_masks():
    model = Skips()
    plans = [planned(model, policy=policy) for policy in ("none", "all", "sqrt", "memory")]
    for found in plans:
        assert_predicted(found, 1.02)
    assert plans[-1].measured_bytes <= min(found.measured_bytes for found in plans)


def test_plans_around_code_are_applied_and_loaded(tmp_path):
    model, x = Coded("residual, relu", pairs=True), torch.randn(2048, WIDTH)
    plain = copy.deepcopy(model)
    planned(model, policy="memory").save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").apply(model)
    for each in (model, plain):
        each(x)[0].square().mean().backward()
    ours, theirs = ([p.grad for p in m.layers.parameters()] for m in (model, plain))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("policy", ["none", "uniform:2"])
def test_what_callers_of_units_hold_meanwhile_is_counted_once(policy):
    pytest.importorskip("transformers")
    model, inputs = transformers_model("resnet", random.Random(0))
    found = plan(model, **inputs, policy=policy, progress=False)
    assert_predicted(found, 1.01)
