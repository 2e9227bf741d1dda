"""Fused layers inside a checkpoint whose regions are saved or recomputed, as torch_remat's are."""

from __future__ import annotations

import pytest
import regions
import torch
from regions import region
from support import DEVICE, flops, randn
from torch import nn

import fusedckpt
from fusedckpt.autograd import phases
from fusedckpt.autograd.dispatch import forced_path

D, F, ROWS = 12, 20, 6
GEMM = 2 * ROWS * D * F
# of a layer: GEMMs of its forward, and those that its backward runs again at a level
LAYERS = {
    "mlp": (fusedckpt.MLP, 2, {"inputs": 1, "preact": 0}),
    "gated": (fusedckpt.GatedMLP, 3, {"inputs": 2, "gate": 1, "preact": 0}),
}
CASES = [(name, save) for name, (_, _, levels) in LAYERS.items() for save in levels]
# of each layer, whether its region is recomputed; None for no region
PLANS = [
    (True, True, True, True),
    (None, None, None, None),
    (False, False, False, False),
    (True, False, True, False),
    (False, None, None, False),
]


@pytest.fixture(autouse=True)
def on_aten():
    with forced_path("aten"):
        yield


@pytest.fixture(params=CASES, ids="-".join)
def case(request):
    """Return four layers, the GEMMs of one's forward, and those that it runs again by itself."""
    name, save = request.param
    cls, forward, levels = LAYERS[name]
    torch.manual_seed(0)
    return nn.ModuleList(cls(D, F, save=save) for _ in range(4)).to(DEVICE), forward, levels[save]


def planned(layers, plan):
    def run(x):
        for number, (layer, recompute) in enumerate(zip(layers, plan, strict=True)):
            if recompute is not None:
                layer = region(layer, f"layer {number}", recompute=recompute)
            x = layer(x)
        return x

    return run


def step(run, layers, x) -> list[torch.Tensor]:
    layers.zero_grad()
    x.grad = None
    y = run(x * 1)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("plan", PLANS)
def test_gemms_of_a_step(case, plan):
    """A recomputed layer's backward runs none again; a saved one's those of its own level."""
    layers, forward, again = case
    x, found = randn(ROWS, D), []
    run = planned(layers, plan)
    total = flops(lambda: found.extend(step(lambda x: regions.checkpoint(run, x)[0], layers, x)))
    counts = [3 * forward + (again if saved is False else forward) for saved in plan]
    assert total == sum(counts) * GEMM
    assert all(map(torch.equal, found, step(run, layers, x)))


def test_a_checkpoint_for_each_layer(case):
    """A layer that ends its checkpoint is recomputed whole: the output is where that begins."""
    layers, forward, _ = case
    x, found = randn(ROWS, D), []

    def run(x):
        for layer in layers:
            x, _ = regions.checkpoint(layer, x)
        return x

    assert flops(lambda: found.extend(step(run, layers, x))) == 4 * 4 * forward * GEMM
    assert all(map(torch.equal, found, step(nn.Sequential(*layers), layers, x)))


def test_a_saved_layer_keeps_what_its_level_says(case):
    """GEMM outputs of the level, the region's own weights, and no input."""
    layers, forward, again = case
    run = planned(layers, (True, False, True, False))
    _, found = regions.checkpoint(run, randn(ROWS, D) * 1)
    assert [*found.saved] == ["layer 1", "layer 3"]
    weights = {p.untyped_storage().data_ptr() for p in layers.parameters()}
    for saved in found.saved.values():
        kept = [x for x in saved.kept if x.untyped_storage().data_ptr() not in weights]
        # the last GEMM's output is never needed
        assert [x.shape for x in kept] == [(ROWS, F)] * (forward - 1 - again)


def test_the_phase_in_a_region():
    """A saved region is no checkpoint; hooks of its own keep what a layer saves there."""
    found = []

    def look(x):
        phase = phases.of_layer()
        assert phase is not None
        found.append((phase.recomputes, phase.levels, phase.owns_extras))
        return x.sin().sin()

    def run(x):
        return region(look, "a", recompute=True)(region(look, "b", recompute=False)(x))

    regions.checkpoint(run, randn(4) * 1)[0].sum().backward()
    saved, forward, recompute = found
    assert saved == (False, None, False)
    assert forward == (False, ("inputs", "inputs"), False)
    assert recompute == (True, ("inputs", "preact"), False)


def test_a_tensor_written_after_it_was_saved():
    """The region runs again, up to the last tensor that backward reads; eager raises."""

    def spoilt(x):
        saved = x.exp()
        y = saved * 2
        saved.add_(1)
        return y

    x = randn(4)
    y = fusedckpt.checkpoint(fusedckpt.region(spoilt, "r"), x, save_regions="r")
    (dx,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(dx, 2 * x.detach().exp())
