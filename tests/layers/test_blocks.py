"""MLP, GatedMLP and NormLinear: eager's values and gradients, children that must be called."""

import pytest
import torch
from support import DEVICE, randn, saved_bytes
from torch import nn
from torch.nn.utils import parametrize

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
    leaves = [x, *block.parameters()]
    results = []
    for call in (lambda: block(x), lambda: reference(block, x)):
        y = call()
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", CLASSES)
def test_matches_its_children(kind, norm, bias, residual):
    block = build(kind, norm, bias=bias, residual=residual)
    assert_same(block)
    if norm != "custom":
        x = randn(T, D, dtype=torch.float64)
        assert saved_bytes(block, [x]) == 8 * T * D


@pytest.mark.parametrize("kind", CLASSES)
def test_other_output_width_and_chunks(kind):
    block = kind(D, F, 7, device=DEVICE, dtype=torch.float64, chunks=3, activation="relu")
    assert_same(block)


@pytest.mark.parametrize("kind", CLASSES)
def test_levels(kind):
    x = randn(T, D, dtype=torch.float64)
    block = build(kind, "rms", save="preact")
    wide = F if kind is MLP else 2 * F
    assert saved_bytes(block, [x]) == 8 * T * (D + wide)
    with fusedckpt.saving("inputs"):
        assert saved_bytes(block, [x]) == 8 * T * D


def parametrized(block, child):
    class Halved(nn.Module):
        def forward(self, weight):
            return weight / 2

    parametrize.register_parametrization(block.get_submodule(child), "weight", Halved())


def hooked(block, child):
    block.get_submodule(child).register_forward_hook(lambda module, args, y: y * 3)


def pre_hooked(block, child):
    block.get_submodule(child).register_forward_pre_hook(lambda module, args: (args[0] * 3,))


def replaced(block, child):
    old = block.get_submodule(child)
    new = nn.Sequential(old, nn.Dropout(0.0))
    setattr(block, child, new)


@pytest.mark.parametrize("change", [parametrized, hooked, pre_hooked, replaced])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_changed_child_is_called(kind, residual, change):
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


RANK = 3


class LoRA(nn.Module):
    """A frozen `base` and a trainable low-rank branch beside it (arXiv 2106.09685)."""

    def __init__(self, base, in_features, out_features):
        super().__init__()
        self.base = base.requires_grad_(False)
        options = {"bias": False, "device": DEVICE, "dtype": torch.float64}
        self.a = nn.Linear(in_features, RANK, **options)
        self.b = nn.Linear(RANK, out_features, **options)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def trained(module, x, call):
    """Return call's result and the gradients of all that is trainable, x's too where wanted."""
    wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), wanted)]


@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("level", ["inputs", "preact"])
@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("kind", CLASSES)
def test_lora_beside_a_frozen_block(kind, norm, level, x_grad):
    """The branch keeps x and its own low-rank product; the block adds what dx reads, if wanted."""
    block = build(kind, norm, save=level)
    model = LoRA(block, D, D)
    x = randn(T, D, dtype=torch.float64, requires_grad=x_grad)
    reference = trained(model, x, lambda x: eager(block, x) + model.b(model.a(x)))
    torch.testing.assert_close(trained(model, x, model), reference)
    wide = 0 if level == "inputs" or not x_grad else F if kind is MLP else 2 * F
    assert saved_bytes(model, [x]) == 8 * T * (D + RANK + wide)
    # the block alone: x, but where the level keeps all that dx reads
    reads_x = x_grad and (level == "inputs" or norm == "rms")
    assert saved_bytes(block, [x]) == 8 * T * (D * reads_x + wide)


@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_lora_around_a_frozen_linear_in_a_block(kind, x_grad):
    """An adapter in a child's place is called, and nothing is kept for a frozen weight."""
    block = build(kind, activation="silu").requires_grad_(False)
    child = "fc1" if kind is MLP else "gate_proj"
    old = block.get_submodule(child)
    base = fusedckpt.Linear(D, F, old.bias is not None, DEVICE, torch.float64)
    base.load_state_dict(old.state_dict())
    setattr(block, child, LoRA(base, D, F))
    x = randn(T, D, dtype=torch.float64, requires_grad=x_grad)
    reference = trained(block, x, lambda x: eager(block, x))
    torch.testing.assert_close(trained(block, x, block), reference)
    assert saved_bytes(base, [x]) == 0
    # x and the low-rank product for the branch, what SiLU reads; gated, what the product reads: the
    # activated gate is read only where up has a gradient
    wide = F if kind is MLP else (3 * F if x_grad else 2 * F)
    assert saved_bytes(block, [x]) == 8 * T * (D + RANK + wide)


def test_names_of_common_models():
    assert list(build(MLP, "rms").state_dict()) == [
        "norm.weight",
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    ]
    assert list(build(GatedMLP).state_dict()) == [
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    ]
    assert "activation=silu, residual=False, save=inputs" in repr(build(GatedMLP))


@pytest.mark.parametrize("kind", CLASSES)
def test_compiles_without_a_graph_break(kind):
    torch._dynamo.reset()
    block = build(kind, "rms", residual=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = randn(T, D, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), block(x))
