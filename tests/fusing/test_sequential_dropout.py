"""fuse: MLPs with dropouts in an nn.Sequential, as ViTs have them: saved bytes, reports, modes."""

from __future__ import annotations

import copy

import pytest
import torch
from own_mlps import SquaredReLU
from support import DEVICE, peak_of_step, randn, saved_bytes
from swap_cases import D, F, assert_equal
from torch import nn
from zoo import OwnSequential, Residual

from fusedckpt import fuse, unfuse

T, P = 5, 0.4
N, ALL = "nn.LayerNorm", "nn.Linear + gelu + nn.Dropout + nn.Linear + nn.Dropout -> mlp"


def layers(p=P, act=nn.GELU):
    return [nn.Linear(D, F), act(), nn.Dropout(p), nn.Linear(F, D), nn.Dropout(p)]


def pieces(norm):
    return nn.Sequential(norm, nn.Sequential(*layers()[:3]), nn.Sequential(*layers()[3:]))


# the module, what the report says of its MLP by name, and its dropouts
CASES = {
    "norm first": (lambda: nn.Sequential(nn.LayerNorm(D), *layers()), {"1": f"{N} + {ALL}"}, 2),
    "at rate 0": (lambda: nn.Sequential(nn.LayerNorm(D), *layers(0.0)), {"1": f"{N} + {ALL}"}, 0),
    "at rate 1": (lambda: nn.Sequential(nn.LayerNorm(D), *layers(1.0)), {"1": f"{N} + {ALL}"}, 2),
    "no norm": (lambda: nn.Sequential(*layers()), {"0": ALL}, 2),
    "one dropout": (
        lambda: nn.Sequential(nn.RMSNorm(D), *layers(act=nn.SiLU)[:-1]),
        {"1": "nn.RMSNorm + nn.Linear + silu + nn.Dropout + nn.Linear -> mlp"},
        1,
    ),
    "the last dropout": (
        lambda: nn.Sequential(*layers()[:2], *layers()[3:]),
        {"0": "nn.Linear + gelu + nn.Linear + nn.Dropout -> mlp"},
        1,
    ),
    "identities": (
        lambda: nn.Sequential(nn.LayerNorm(D), nn.Identity(), *layers()[:-1], nn.Identity()),
        {"2": f"{N} + nn.Identity + nn.Linear + gelu + nn.Dropout + nn.Linear -> mlp"},
        1,
    ),
    "in pieces": (lambda: pieces(nn.LayerNorm(D)), {"1.0": f"{N} + {ALL}"}, 2),
    "a subclass": (lambda: OwnSequential(nn.LayerNorm(D), *layers()), {"1": f"{N} + {ALL}"}, 2),
    "an MLP inside": (
        lambda: nn.Sequential(nn.LayerNorm(D), nn.Sequential(*layers())),
        {"1.0": ALL},
        2,
    ),
    "under a residual": (
        lambda: Residual(nn.LayerNorm(D), *layers()),
        {"inner.1": f"{N} + {ALL}"},
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_block(name):
    make, swapped, seeds = CASES[name]
    model = make().to(DEVICE)
    eager = copy.deepcopy(model)
    report = fuse(model)
    mlps = {key: text for key, text in report.swapped.items() if report.kinds[key] == "mlp"}
    assert (mlps, report.left) == (swapped, {})
    assert saved_bytes(model, [randn(T, D)]) == 4 * T * D + 8 * seeds
    assert report.fallbacks == {}
    for each in (model, eager):
        each.double().eval()
    x = randn(T, D, dtype=torch.float64)
    assert_equal(model, eager, x)
    assert saved_bytes(model, [x]) == 8 * T * D
    unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in eager.modules()]


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_falls_with_saved_bytes(name):
    """Of six modules; at most one recomputes at a time."""
    eager, x = nn.Sequential(*[CASES[name][0]() for _ in range(6)]).to(DEVICE), randn(64, D)
    model = copy.deepcopy(eager)
    fuse(model)
    saved = [saved_bytes(m, [x]) for m in (eager, model)]
    peaks = [peak_of_step(m, x) for m in (eager, model)]
    assert peaks[0] - peaks[1] >= 0.7 * (saved[0] - saved[1]) > 0


def test_a_hook_inside_is_seen_and_named():
    model, calls = pieces(nn.LayerNorm(D)).to(DEVICE).eval(), []
    eager, x = copy.deepcopy(model), randn(T, D)
    report = fuse(model)
    model[1].register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(model(x), eager(x))
    assert calls == [1]
    assert list(report.fallbacks) == ["1.0"]


def test_a_copy_and_a_slice_drop_alike():
    model = nn.Sequential(nn.LayerNorm(D), *layers()).to(DEVICE)
    fuse(model)
    x = randn(T, D)
    torch.manual_seed(0)
    y = model(x)
    torch.manual_seed(0)
    assert torch.equal(copy.deepcopy(model)(x), y)
    torch.manual_seed(0)
    assert torch.equal(model[1:](model[0](x)), y)


class GatesHalves(nn.Module):
    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return nn.functional.gelu(gate) * x


def gated(p=P):
    return [nn.Linear(D, 2 * F), GatesHalves(), nn.Dropout(p), nn.Linear(F, D, bias=False)]


# layers before, those of an MLP that a recording shows, and layers behind it
TAILS = {
    "gated": (lambda: [nn.LayerNorm(D)], gated, list, "gated_mlp (gelu, packed, up first)", 1),
    "gated, at rate 0": (
        lambda: [nn.RMSNorm(D), nn.Identity()],
        lambda: [*gated(0.0), nn.Dropout(0.0)],
        list,
        "gated_mlp (gelu, packed, up first)",
        0,
    ),
    "squared": (
        lambda: [nn.LayerNorm(D)],
        lambda: layers(act=SquaredReLU),
        lambda: [nn.Flatten(0, 0)],
        "mlp (relu2)",
        2,
    ),
}


@pytest.mark.parametrize("name", TAILS)
def test_an_mlp_of_any_kind_behind_a_norm(name):
    before, mlp, after, kind, seeds = TAILS[name]
    model = nn.Sequential(*before(), *mlp(), *after()).to(DEVICE)
    eager, place = copy.deepcopy(model), len(before())
    apart = nn.Sequential(*copy.deepcopy(model)[place : place + len(mlp())])
    report = fuse(model)
    assert report.swapped[str(place)] == f"Sequential -> {kind}"
    assert report.left == {}
    # with the norm's input in place of its result
    assert saved_bytes(model, [randn(T, D)]) == 4 * T * D + 8 * seeds
    assert report.fallbacks == {}
    # the same masks as those of the MLP alone
    assert fuse(apart).swapped == {"": f"Sequential -> {kind}"}
    x, n = randn(T, D), eager[:place]
    torch.manual_seed(1)
    y = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(y, apart(n(x)))
    for each in (model, eager):
        each.double().eval()
    assert_equal(model, eager, randn(T, D, dtype=torch.float64))
    # another layer there is called
    model[place + 1] = eager[place + 1] = nn.GLU() if "gated" in name else nn.Softmax(-1)
    assert_equal(model, eager, randn(T, D, dtype=torch.float64))
    assert [reason.key for reason in report.fallbacks.values()] == ["child"]
    model.append(nn.Tanh())
    eager.append(nn.Tanh())
    assert_equal(model, eager, randn(T, D, dtype=torch.float64))
    unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in eager.modules()]


def test_a_norm_between_the_linears_is_no_mlp():
    model = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, F), nn.LayerNorm(F), nn.Linear(F, D))
    report = fuse(model.to(DEVICE))
    assert "mlp" not in report.kinds.values()
