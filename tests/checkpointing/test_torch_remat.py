"""Fused layers inside a checkpoint whose regions are saved or recomputed, as torch_remat's are."""

from __future__ import annotations

import pytest
import torch
import torch_remat
from support import DEVICE, flops, randn
from torch import nn

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path

D, F, ROWS = 12, 20, 6
GEMM = 2 * ROWS * D * F
# of a layer: GEMMs of its forward, and those that its backward runs again at a level
CASES = [
    (fusedckpt.MLP, 2, "inputs", 1),
    (fusedckpt.MLP, 2, "preact", 0),
    (fusedckpt.GatedMLP, 3, "inputs", 2),
    (fusedckpt.GatedMLP, 3, "gate", 1),
    (fusedckpt.GatedMLP, 3, "preact", 0),
]
# of each layer, whether its region is recomputed; None for no region
PLANS = [
    (True, True, True, True),
    (None, None, None, None),
    (False, False, False, False),
    (True, False, None, False),
]


def planned(layers, plan):
    def run(x):
        for number, (layer, recompute) in enumerate(zip(layers, plan, strict=True)):
            if recompute is not None:
                layer = torch_remat.region(layer, f"layer {number}", recompute=recompute)
            x = layer(x)
        return x

    return run


def in_each(layers):
    def run(x):
        for layer in layers:
            x, _ = torch_remat.checkpoint(layer, x)
        return x

    return run


def step(run, layers, x) -> list[torch.Tensor]:
    layers.zero_grad()
    x.grad = None
    y = run(x * 1)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("cls", "forward", "save", "again"), CASES)
def test_gemms_and_bytes_of_a_step(cls, forward, save, again, plan):
    """A recomputed layer's backward runs none again; a saved one's those of its own level."""
    layers = nn.ModuleList(cls(D, F, save=save) for _ in range(4)).to(DEVICE)
    x, found, run = randn(ROWS, D), [], planned(layers, plan)
    with forced_path("aten"):
        checkpointed = lambda x: torch_remat.checkpoint(run, x)[0]  # noqa: E731
        total = flops(lambda: found.extend(step(checkpointed, layers, x)))
        counts = [3 * forward + (again if saved is False else forward) for saved in plan]
        assert total == sum(counts) * GEMM
        expected = step(run, layers, x)
        assert all(map(torch.equal, found, expected))
        # a layer that ends its checkpoint is recomputed whole: the output is where that begins
        assert flops(lambda: step(in_each(layers), layers, x)) == 4 * 4 * forward * GEMM
        _, regions = torch_remat.checkpoint(run, x * 1)
    assert len(regions.saved) == plan.count(False)
    weights = {p.untyped_storage().data_ptr() for p in layers.parameters()}
    for _, saved, _ in regions.saved.values():
        # GEMM outputs of the level but for the last, which is never needed; weights, and no input
        kept = [x for x in saved if x.untyped_storage().data_ptr() not in weights]
        assert [x.shape for x in kept] == [(ROWS, F)] * (forward - 1 - again)
