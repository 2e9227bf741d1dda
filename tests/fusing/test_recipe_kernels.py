"""Chains of recipes run as one kernel each, and gradients obey the error rule."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import Tensor, nn
from zoo import BasicBlock

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.fusing.accuracy import Errors
from fusedckpt.kernels import pointwise
from fusedckpt.memory import saved_tensors
from fusedckpt.recipes import dropouts

pytest.importorskip("triton", reason="kernels need Triton")
pytestmark = pytest.mark.usefixtures("any_size")
C, D, T = 8, 16, 12


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Note the launches of the kernels."""
    names: list[str] = []

    def noting(name):
        launch = getattr(pointwise, name)

        def note(*args):
            names.append(name)
            return launch(*args)

        return note

    for name in ("modulated_norm", "channel_norm", "gated_sum"):
        monkeypatch.setattr(pointwise, name, noting(name))
    return names


class Resnet(nn.Module):
    """A block of a UNet: group norms with SiLU before convolutions."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, C), nn.GroupNorm(2, C)
        self.conv1, self.conv2 = (nn.Conv2d(C, C, 3, padding=1) for _ in range(2))

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class ChannelsLast(BasicBlock):
    """A block of a residual net and a convolution behind it, channels last."""

    def __init__(self):
        super().__init__(C)
        self.conv3 = nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x):
        return self.conv3(super().forward(x.contiguous(memory_format=torch.channels_last)))


class ModulatedMLP(nn.Module):
    """Blocks of a diffusion transformer."""

    def __init__(self, affine: bool):
        super().__init__()
        self.norm = nn.LayerNorm(D, elementwise_affine=affine)
        self.parts, self.fc1 = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc2, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        shift, scale, gate = self.parts(x.mean(1))[:, None].chunk(3, -1)
        h = self.fc1(self.norm(x) * (1 + scale) + shift)
        return self.out(x + gate * self.fc2(h))


def image() -> Tensor:
    return torch.randn(2, C, 6, 5)


def tokens() -> Tensor:
    return torch.randn(2, T, D)


NETS = {
    "unet": (Resnet, image, ["channel_norm"] * 4),
    "residual": (ChannelsLast, image, ["channel_norm"] * 2),
    "modulated": (lambda: ModulatedMLP(False), tokens, ["gated_sum", "modulated_norm"]),
    "modulated, affine": (lambda: ModulatedMLP(True), tokens, ["gated_sum", "modulated_norm"]),
}


def step(model: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    x = x.clone().requires_grad_()
    with saved_tensors(exclude=[*model.parameters(), *model.buffers(), x]) as saved:
        y = model(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    return saved.nbytes, [y.detach(), *grads]


@pytest.mark.parametrize("swaps", [False, True], ids=["recipes", "fuse"])
@pytest.mark.parametrize("name", NETS)
def test_a_chain_is_one_launch(name, swaps, launched):
    make, inputs, expected = NETS[name]
    errors: list[Errors] = []
    for _ in range(4):
        eager, x = make().to(DEVICE), inputs().to(DEVICE)
        ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
        fusedckpt.fuse(ours, recompute_elementwise=True, norm=swaps, mlp=swaps, linear=swaps)
        launched.clear()
        # interpreted on a CPU
        with forced_path(None):
            saved, found = step(ours, x)
        assert [n for n in launched if n in expected] == expected
        with forced_path("aten"):
            aten, same = step(ours, x)
        assert [n for n in launched if n in expected] == expected
        was, theirs = step(eager, x)
        _, truth = step(exact, x.double())
        assert saved == aten < was
        if not swaps:
            assert all(map(torch.equal, same, theirs))
        errors = errors or [Errors(t.dtype) for t in found]
        for error, *tensors in zip(errors, found, theirs, truth, strict=True):
            error.add(*tensors)
    assert [error.problem() for error in errors] == [None] * len(errors)


@pytest.mark.parametrize("name", NETS)
def test_a_graph_that_is_kept_launches_the_same_again(name, launched):
    make, inputs, expected = NETS[name]
    model, x = make().to(DEVICE), inputs().to(DEVICE).requires_grad_()
    fusedckpt.fuse(model, recompute_elementwise=True, norm=False, mlp=False, linear=False)
    with forced_path(None):
        loss = model(x).square().sum()
        parameters = [*model.parameters()]
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        # a part of the graph reads fewer values
        torch.autograd.grad(loss, parameters[-1:], retain_graph=True)
        launched.clear()
        second = torch.autograd.grad(loss, parameters)
    assert launched == expected
    assert all(map(torch.equal, first, second))


def test_layers_alone_launch_the_same(launched):
    """Without recipes of all functions, batch and group norms, sums and activations of layers."""

    class LayersAlone(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.conv3 = (nn.Conv2d(C, C, 3, padding=1) for _ in range(3))
            self.bn1, self.bn2, self.norm = nn.BatchNorm2d(C), nn.BatchNorm2d(C), nn.GroupNorm(4, C)
            self.relu, self.silu = nn.ReLU(inplace=True), nn.SiLU()

        def forward(self, x):
            x = self.relu(self.bn1(self.conv1(x)))
            y = self.bn2(self.conv2(x))
            y += x
            return self.conv3(self.silu(self.norm(self.conv1(self.relu(y)))))

    errors: list[Errors] = []
    for _ in range(4):
        eager, x = LayersAlone().to(DEVICE), image().to(DEVICE)
        ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
        fusedckpt.fuse(ours)
        launched.clear()
        with forced_path(None):
            saved, found = step(ours, x)
        assert launched == ["channel_norm"] * 3
        was, theirs = step(eager, x)
        _, truth = step(exact, x.double())
        assert saved < was
        errors = errors or [Errors(t.dtype) for t in found]
        for error, *tensors in zip(errors, found, theirs, truth, strict=True):
            error.add(*tensors)
    assert [error.problem() for error in errors] == [None] * len(errors)


def test_an_option_that_no_kernel_has_runs_as_ever(launched):
    class OddConvolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(C, C, 1)

        def forward(self, x):
            h = F.silu(F.group_norm(x.transpose(2, 3), 4))
            h = self.conv(torch.add(h, F.batch_norm(x, None, None, training=True).mT, alpha=2))
            return self.conv(F.gelu(h.expand(2, *h.shape)[1], approximate="tanh"))

    eager, x = OddConvolutions().to(DEVICE), image().to(DEVICE)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours, recompute_elementwise=True)
    with forced_path(None):
        _, found = step(ours, x)
    _, expected = step(eager, x)
    assert launched.count("gated_sum") == launched.count("modulated_norm") == 0
    assert all(map(torch.allclose, found, expected))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the random state of a CPU stands in")
def test_a_mask_is_drawn_again_by_its_random_state():
    x = torch.randn(3, T, D)
    again = dropouts.Mask(x, 0.3, torch.get_rng_state())
    _, mask = torch.native_dropout(x, 0.3, True)
    state = torch.get_rng_state()
    assert torch.equal(again(), mask)
    assert torch.equal(torch.get_rng_state(), state)
