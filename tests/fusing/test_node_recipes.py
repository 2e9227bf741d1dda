"""Linears and MLPs behind functions of code, which are found by their nodes in the graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import DEVICE, calls, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt.autograd.recipes import View
from fusedckpt.recipes.node_recipes import found_by_node

pytestmark = pytest.mark.usefixtures("any_size")

N, T, D = 2, 8, 4
# bytes of rows, and of a vector for each sample, in float64
ROWS, VECTOR = 8 * N * T * D, 8 * N * D


def plain(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    return n * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def shift_first(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    return shift[:, None, :] + (1 + scale[:, None, :]) * n


def in_place(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    return (n * (1 + scale.unsqueeze(1))).add_(shift.unsqueeze(1))


def norm_written(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    with torch.no_grad():
        n.mul_(2)
    return plain(model, n, shift, scale)


def vectors_written(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    y = plain(model, n, shift, scale)
    shift._base.detach().mul_(2)
    return y


def vectors_written_later(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    model.later = shift._base.detach()
    return plain(model, n, shift, scale)


def result_written(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    y = plain(model, n, shift, scale)
    with torch.no_grad():
        y.mul_(2)
    return y


def swish(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    return n * torch.sigmoid(n)


def less_parameter(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    return (plain(model, n, shift, scale) - model.shift) / 2


def parameter_written(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    y = plain(model, n, shift, scale) - model.shift
    with torch.no_grad():
        model.shift.add_(1)
    return y


def parameter_written_later(model: Any, n: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
    model.later = model.shift.data
    return plain(model, n, shift, scale) - model.shift


class Modulated(nn.Module):
    """As a block of DiT: a shift and a scale of each sample, behind a norm without parameters."""

    def __init__(self, modulate: Any, is_affine: bool):
        super().__init__()
        self.act, self.vectors = nn.SiLU(), nn.Linear(D, 2 * D)
        self.norm = nn.LayerNorm(D, elementwise_affine=is_affine)
        self.mlp, self.modulate = SmallMLP(), modulate
        self.shift = nn.Parameter(torch.randn(D))

    def forward(self, x, c):
        scale, shift = self.vectors(self.act(c)).chunk(2, dim=-1)
        return x + self.mlp(self.modulate(self, self.norm(x), shift, scale))


class SmallMLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


# how many rows are saved, x always, and how many vectors of a sample: SiLU's result, a factor, and
# a copy of the shift. Eager saves nine rows, with those of the MLP
MODULATED: dict[str, tuple[Any, int, float]] = {
    "plain": (plain, 1, 3),
    "affine": (plain, 2, 3),
    "shift first": (shift_first, 1, 3),
    "in place": (in_place, 1, 3),
    "norm written": (norm_written, 2, 3),
    "vectors written": (vectors_written, 2, 2),
    "vectors written later": (vectors_written_later, 1, 3),
    "result written": (result_written, 2, 2),
    # the sigmoid's result
    "swish": (swish, 2, 1),
    # of the parameter a copy, half as long as the vectors of both samples
    "less a parameter": (less_parameter, 1, 3.5),
    "parameter written": (parameter_written, 2, 2),
    "parameter written later": (parameter_written_later, 1, 3.5),
}


def gradients(model: nn.Module, *inputs: torch.Tensor) -> list[Any]:
    model.zero_grad()
    y = model(*inputs)
    later = getattr(model, "later", None)
    if isinstance(later, torch.Tensor):
        later.mul_(2)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_like(ours: nn.Module, eager: nn.Module, *inputs: torch.Tensor) -> None:
    """Compare the gradients of two calls."""
    for _ in range(2):
        for a, b in zip(gradients(ours, *inputs), gradients(eager, *inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODULATED)
def test_modulated_norms(name):
    modulate, num_rows, num_vectors = MODULATED[name]
    torch.manual_seed(0)
    # hooks may gather parameters of a norm for its call alone: its result is saved
    eager = Modulated(modulate, name == "affine").to(DEVICE, torch.float64)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    x = torch.randn(N, T, D, device=DEVICE, dtype=torch.float64, requires_grad=True)
    c = torch.randn(N, D, device=DEVICE, dtype=torch.float64)
    assert_like(ours, eager, x, c)
    assert saved_bytes(ours, [x, c]) == num_rows * ROWS + num_vectors * VECTOR


def read_by(read: Any, act: Any = lambda h: h) -> Any:
    """Return a function of a picture and a weight that reads act(picture)."""
    return lambda h, w: read(act(h), w)


def written_first(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h.mul_(2)
    return h


def pooled(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return nn.functional.max_pool2d(h, 2)


def convolved(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return nn.functional.conv2d(h, w)


def residual(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return h + convolved(h, w)


class Standardized(nn.Conv2d):
    """A convolution by a weight that it computes."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


relu = nn.functional.relu
SIDE, PICTURE = 8, 8 * N * D * 8 * 8
# by name: a function of a picture that has a recipe, and a weight; the pictures that are saved from
# there on
READ_IN_CODE: dict[str, tuple[Any, float]] = {
    # the result, and the indices
    "max pool": (read_by(pooled), 0.5),
    "max pool of a function": (read_by(pooled, relu), 0.5),
    "max pool, written": (read_by(pooled, written_first), 1.5),
    "convolution": (read_by(convolved), 1),
    "convolution of a function": (read_by(convolved, relu), 1),
    "convolution, written": (read_by(convolved, written_first), 2),
    "residual": (read_by(residual), 1),
    # the concatenation, and the convolution's input, too
    "max pool of a part": (lambda h, w: pooled(torch.cat([convolved(h, w), h], 1)[:, :D], w), 3.5),
    # a repeated part has no recipe
    "convolution of a part": (lambda h, w: convolved(h[:, :2].repeat(1, 2, 1, 1), w), 2),
}


class ReadsInCode(nn.Module):
    """A layer's result is read by functions that code calls."""

    def __init__(self, read: Any):
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(D, D, 1), nn.BatchNorm2d(D), nn.GELU()
        self.weight, self.read = nn.Parameter(torch.randn(D, D, 1, 1)), read
        self.last_norm, self.last = nn.BatchNorm2d(D), nn.Conv2d(D, D, 1)

    def forward(self, x):
        # `fuse` looks for the names of such functions
        y = nn.functional.conv2d(x, self.weight)
        h = self.read(self.act(self.norm(self.first(y))), self.weight)
        return self.last(self.last_norm(h))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", READ_IN_CODE)
def test_functions_that_read_channels_in_code(name, is_last):
    read, num_pictures = READ_IN_CODE[name]
    torch.manual_seed(0)
    layout = torch.channels_last if is_last else torch.contiguous_format
    eager = ReadsInCode(read).to(DEVICE, torch.float64).to(memory_format=layout)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    x = torch.randn(N, D, SIDE, SIDE, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert_like(ours, eager, x)
    # the inputs of both functions before, and the vectors of norms
    saved = (3 + num_pictures) * PICTURE + 8 * 8 * D
    assert saved_bytes(ours, [x]) == saved


def test_convolutions_with_a_forward_of_their_own():
    torch.manual_seed(0)
    layers = nn.Conv2d(D, D, 1), nn.BatchNorm2d(D), nn.ReLU(), Standardized(D, D, 1)
    eager = nn.Sequential(*layers, nn.BatchNorm2d(D)).to(DEVICE, torch.float64)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    x = torch.randn(N, D, SIDE, SIDE, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert_like(ours, eager, x)
    # all but the ReLU's result
    assert saved_bytes(eager, [x]) - saved_bytes(ours, [x]) == PICTURE


class Assigns(nn.Module):
    """Gives a result other memory, which raises no version, between two layers."""

    def __init__(self, act: Any):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(D), act
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.num_calls = 0

    def forward(self, x):
        # so it is not run again
        self.num_calls += 1
        h = self.act(self.a(self.norm(x)))
        h.data = 2 * h.data
        return self.b(h)


@pytest.mark.parametrize(
    ("act", "options"),
    [(nn.GELU(), {}), (nn.functional.gelu, {"recompute_elementwise": True})],
    ids=["layer", "function"],
)
def test_results_with_other_memory(act, options):
    """They are saved, as the index, or a mode, has forgotten them."""
    torch.manual_seed(0)
    eager = Assigns(act).to(DEVICE, torch.float64)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours, **options)
    x = torch.randn(N, T, D, device=DEVICE, dtype=torch.float64)
    for model in (eager, ours):
        model(x).square().sum().backward()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_functions_are_found_in_few_calls():
    """Two functions with three views behind a norm, of which two tensors are compared."""
    model = Modulated(plain, False).to(DEVICE, torch.float64)
    fusedckpt.fuse(model)
    x = torch.randn(N, T, D, device=DEVICE, dtype=torch.float64, requires_grad=True)
    c = torch.randn(N, D, device=DEVICE, dtype=torch.float64)
    for _ in range(2):
        gradients(model, x, c)
    scale, shift = model.vectors(model.act(c)).chunk(2, dim=-1)
    y = plain(model, model.norm(x), shift, scale)
    found = []
    count = calls(lambda: found.append(found_by_node(y, model.mlp)))
    assert isinstance(found[0], View)
    # of Python and C; 594 where shapes and contexts were those of Python modules of torch
    assert count < 490
