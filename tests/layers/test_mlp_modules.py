"""MLP, GatedMLP and NormLinear: eager's values and gradients, children that must be called."""

import pytest
import torch
from support import DEVICE, randn, saved_bytes
from torch import nn
from torch.nn.utils import parametrize
from zoo import Doubled, LoraLinear

import fusedckpt
from fusedckpt import MLP, GatedMLP, NormLinear
from fusedckpt.kernels.activations import ACTIVATIONS

T, D, F = 10, 12, 20
NORMS = {
    "none": lambda: None,
    "rms": lambda: nn.RMSNorm(D, eps=1e-6, dtype=torch.float64, device=DEVICE),
    "gemma": lambda: fusedckpt.RMSNorm(D, None, True, DEVICE, torch.float64, offset=1.0),
    "layer": lambda: nn.LayerNorm(D, dtype=torch.float64, device=DEVICE),
    "custom": lambda: nn.Sequential(nn.LayerNorm(D, dtype=torch.float64, device=DEVICE)),
}
CLASSES = (MLP, GatedMLP)


def build(kind, norm="none", **options):
    return kind(D, F, device=DEVICE, dtype=torch.float64, norm=NORMS[norm](), **options)


def eager(block, x):
    """Call the children one by one, as a model without us would."""
    n = x if block.norm is None else block.norm(x)
    act = ACTIVATIONS[block.activation].eager
    if isinstance(block, MLP):
        y = block.fc2(act(block.fc1(n)))
    else:
        y = block.down_proj(act(block.gate_proj(n)) * block.up_proj(n))
    return x + y if block.residual else y


def assert_same(block, reference=eager):
    x = randn(T, D, dtype=torch.float64)
    leaves = [x, *(p for p in block.parameters() if p.requires_grad)]
    results = []
    for call in (lambda: block(x), lambda: reference(block, x)):
        y = call()
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", CLASSES)
def test_matches_its_children(kind, norm, bias):
    for residual in (False, True):
        block = build(kind, norm, bias=bias, residual=residual)
        assert_same(block)
        if norm != "custom":
            x = randn(T, D, dtype=torch.float64)
            assert saved_bytes(block, [x]) == 8 * T * D
    options = {"chunks": 3, "activation": "relu", "device": DEVICE, "dtype": torch.float64}
    assert_same(kind(D, F, 7, bias=bias, norm=NORMS[norm](), **options))


def parametrized(block, child):
    parametrize.register_parametrization(block.get_submodule(child), "weight", Doubled())


def replaced(block, child):
    old = block.get_submodule(child)
    setattr(block, child, nn.Sequential(old) if child == "norm" else LoraLinear(old, 3))


def hooked(block, child):
    block.get_submodule(child).register_forward_hook(lambda module, args, y: y * 3)


def pre_hooked(block, child):
    block.get_submodule(child).register_forward_pre_hook(lambda module, args: (args[0] * 3,))


@pytest.mark.parametrize("change", [parametrized, hooked, pre_hooked, replaced])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_changed_child_is_called(kind, change):
    residual = kind is MLP
    names = ("fc1", "fc2") if kind is MLP else ("gate_proj", "up_proj", "down_proj")
    for child in ("norm", *names):
        block = build(kind, "rms", residual=residual)
        before = block(torch.ones(1, D, dtype=torch.float64, device=DEVICE))
        change(block, child)
        assert_same(block)
        if change in (parametrized, hooked):
            after = block(torch.ones(1, D, dtype=torch.float64, device=DEVICE))
            assert not torch.allclose(before, after)


@pytest.mark.parametrize("norm", ["rms", "layer", "custom"])
def test_norm_linear(norm):
    linears = [nn.Linear(D, n, n != 3, DEVICE, torch.float64) for n in (8, 3, 3)]
    block = NormLinear(NORMS[norm](), *linears)

    def children(block, x):
        n = block.norm(x)
        return torch.cat([linear(n) for linear in block.linears], -1)

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return torch.cat(self.block(x), -1)

    joined = Joined()
    assert_same(joined, lambda joined, x: children(joined.block, x))
    names = ["norm.weight", "linears.0.weight", "linears.0.bias", "linears.1.weight"]
    assert set(names if norm == "rms" else names[1:]) <= set(block.state_dict())
    if norm != "custom":
        assert saved_bytes(block, [randn(T, D, dtype=torch.float64)]) == 8 * T * D
    hooked(block, "linears.1")
    assert_same(joined, lambda joined, x: children(joined.block, x))


def test_only_schedules_that_run_are_compiled(monkeypatch):
    compiled = []
    write = torch.fx.Graph.python_code
    monkeypatch.setattr(
        torch.fx.Graph, "python_code", lambda *args: compiled.append(1) or write(*args)
    )
    # of options and sizes that no other test has, as schedules are remembered
    block = GatedMLP(6, 14, activation="mish", residual=True, save="gate", device=DEVICE)
    y = block(randn(3, 6))
    assert len(compiled) == 1
    y.sum().backward()
    assert len(compiled) == 2
