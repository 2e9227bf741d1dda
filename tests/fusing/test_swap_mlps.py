"""fuse: MLPs of any class, by their parts and what they compute."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from own_mlps import (
    Conv1D,
    D,
    Gated,
    H,
    Inheriting,
    InList,
    Packed,
    Plain,
    QuickGELU,
    Raw,
    Split,
    SquaredReLU,
    Written,
    is_fused,
)
from support import DEVICE, randn
from swap_cases import assert_equal, results
from torch import nn
from zoo import Intermediate, OwnSequential, SwiGLU

from fusedckpt import fuse, saving, unfuse
from fusedckpt.fusing import verification
from fusedckpt.memory import saved_tensors

ACTS = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "mish": nn.Mish,
}


inheriting = partial(SwiGLU, D, H, linear=Inheriting)
FOUND = {
    **{f"Plain-{n}": (partial(Plain, a()), f"Plain -> mlp ({n})") for n, a in ACTS.items()},
    "written": (partial(Plain, Written()), "Plain -> mlp (gelu_tanh)"),
    "transposed": (
        partial(Plain, linear=Conv1D),
        "Plain -> mlp (gelu, weights as [in, out])",
    ),
    "other width": (partial(Plain, out=5), "Plain -> mlp (gelu)"),
    "dropout unused": (partial(Plain, p=0.3), "Plain -> mlp (gelu)"),
    "gated": (Gated, "Gated -> gated_mlp (silu)"),
    "gated with biases": (partial(Gated, nn.GELU(), True), "Gated -> gated_mlp (gelu)"),
    "square": (partial(Gated, features=H), "Gated -> gated_mlp (silu)"),
    "no module": (partial(SwiGLU, D, H), "SwiGLU -> gated_mlp (silu)"),
    "packed": (Packed, "Packed -> gated_mlp (gelu_tanh, packed, gate first)"),
    "packed, up first": (
        partial(Packed, "up", False),
        "Packed -> gated_mlp (gelu_tanh, packed, up first)",
    ),
    "one linear": (partial(Intermediate, D, H, F.gelu), "Intermediate -> linear_act (gelu)"),
    "inherited forward": (inheriting, "SwiGLU -> gated_mlp (silu)"),
    "inherited from Sequential": (
        lambda: OwnSequential(nn.Linear(D, H), QuickGELU(), nn.Linear(H, D)),
        "OwnSequential -> mlp (quick_gelu)",
    ),
    "in a Sequential": (
        lambda: nn.Sequential(nn.Linear(D, H), QuickGELU(), nn.Linear(H, D)),
        "Sequential -> mlp (quick_gelu)",
    ),
    "squared": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(D, H), SquaredReLU()), nn.Linear(H, D)),
        "Sequential -> mlp (relu2)",
    ),
    "in a list": (InList, "InList -> gated_mlp (gelu, packed, up first)"),
    "no linears": (Raw, "Raw -> mlp (tanh, weights as [in, out])"),
    "sizes by number": (Split, "Split -> gated_mlp (silu, packed, gate first)"),
}


@pytest.mark.parametrize(("make", "change"), FOUND.values(), ids=list(FOUND))
@pytest.mark.parametrize("save", ["inputs", "gate", "preact"])
def test_found_and_the_same(make, change, save):
    if save == "gate" and "gated" not in change:
        pytest.skip("without a gate it is the level of inputs")
    dtype = torch.float32 if make is Split else torch.float64
    module = make().to(DEVICE, dtype)
    eager = copy.deepcopy(module)
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    features = H if len({child.weight.shape for child in linears}) == 1 < len(linears) else D
    x = randn(2, 3, 96 if make is Split else features, dtype=dtype)
    assert fuse(module, save=save, verify=save == "inputs").swapped == {"": change}
    assert is_fused(module, x)
    assert_equal(module, eager, x, tol=1e-5 if make is Split else 1e-12)
    assert type(unfuse(module)) is type(eager)
    assert [type(m) for m in module.modules()] == [type(m) for m in eager.modules()]


def test_a_rounded_constant_counts_in_the_modules_own_dtype():
    module = Plain(Written(0.7978845608))
    assert fuse(module).swapped == {"": "Plain -> mlp (gelu_tanh)"}
    report = fuse(unfuse(module).double())
    assert report.swapped == {}
    assert report.left[""].key == "differs"


def test_float32_on_every_path(path):
    for make, _ in (FOUND["transposed"], FOUND["packed, up first"]):
        module = make().to(DEVICE)
        eager, x = copy.deepcopy(module), randn(33, D)
        fuse(module, verify=False)
        assert is_fused(module, x)
        torch.testing.assert_close(results(module, x), results(eager, x), rtol=1e-4, atol=1e-5)


def kept(module, x):
    with saved_tensors(exclude=[x]) as saved:
        y = module(x)
    del y
    return saved.nbytes // 8 // x.shape[0]


@pytest.mark.parametrize("make", [FOUND["transposed"][0], FOUND["packed, up first"][0]])
def test_levels_and_transposed_views_keep_what_they_say(make):
    module, x = make().to(DEVICE, torch.float64), randn(4, D, dtype=torch.float64).detach()
    wide = 2 if isinstance(module, Packed) else 1
    report = fuse(module)
    assert kept(module, x) == 0
    with saving("preact"):
        assert kept(module, x) == wide * H
    with saving("gate"):
        assert kept(module, x) == (H if isinstance(module, Packed) else 0)
    assert report.saved[""][1] == 8 * D
    module.save = "preact"
    assert kept(module, x) == wide * H


def test_a_transposed_weight_is_not_copied():
    module, x = FOUND["transposed"][0]().to(DEVICE, torch.float64), randn(4, D, dtype=torch.float64)
    fuse(module)
    with torch.profiler.profile(record_shapes=True) as profiler:
        module(x).sum().backward()
    shapes = {(D, H), (H, D)}
    copies = [
        event.name
        for event in profiler.events()
        if event.name in ("aten::clone", "aten::contiguous", "aten::_to_copy")
        and event.input_shapes
        and tuple(event.input_shapes[0]) in shapes
    ]
    # .grad takes the layout of its weight: that copies each gradient once
    assert len(copies) <= 2


def test_other_calls_raise_what_they_did():
    module = Plain().to(DEVICE)
    eager = copy.deepcopy(module)
    fuse(module)
    for args in ((torch.ones(2, D, device=DEVICE).double(),), (None,), (), (1, 2)):
        errors = []
        for each in (module, eager):
            with pytest.raises((RuntimeError, TypeError)) as error:
                each(*args)
            errors.append(type(error.value))
        assert errors[0] is errors[1]
    x = randn(2, D)
    torch.testing.assert_close(module(x=x), eager(x=x))


def test_what_runs_once_for_all_is_the_same_for_all(monkeypatch):
    """Identical modules are checked once, others each."""
    real, calls = verification.difference, []
    monkeypatch.setattr(verification, "difference", lambda *a: calls.append(a) or real(*a))
    model = nn.ModuleList([inheriting(), inheriting(), Split(), Split(), Split(96, 128)])
    assert len(fuse(model.to(DEVICE)).swapped) == 5
    assert len(calls) == 3
