"""Concatenations and pictures scaled up in code, which are made again from their parts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, saved_bytes
from torch import Tensor, nn

import fusedckpt
from fusedckpt.autograd.recipes import Leaf, Made, View

pytestmark = pytest.mark.usefixtures("any_size")

N, C, S = 2, 4, 8
# bytes of a picture in float64, and of the statistics and parameters of a batch norm
PICTURE, VECTORS = 8 * N * C * S * S, 8 * 4 * C


def written(skip: Tensor, up: Tensor) -> Tensor:
    y = torch.cat([skip, up], 1)
    with torch.no_grad():
        y.mul_(2)
    return y


def part_written(act: Callable[[Tensor], Tensor], skip: Tensor, up: Tensor) -> Tensor:
    part = act(skip)
    with torch.no_grad():
        part.mul_(2)
    return torch.cat([part, up], 1)


def silu_part(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    return torch.cat([F.silu(skip), up], 1)


def gelu_part(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    return part_written(F.gelu, skip, up)


def one_empty(skip: Tensor, up: Tensor) -> Tensor:
    return torch.cat([skip.new_empty(0).requires_grad_(), skip, up], 1)


def shifted(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    return skip - nn.Parameter(skip.new_full((C, 1, 1), 2.0))


def shift_written(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    shift = nn.Parameter(skip.new_full((C, 1, 1), 2.0))
    y = skip - shift
    with torch.no_grad():
        shift.neg_()
    return y


def halves_of_function(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    first, second = F.gelu(skip).chunk(2, 1)
    return torch.cat([second, first, first * second], 1)


def halves_of_written(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    y = F.gelu(skip)
    with torch.no_grad():
        y.mul_(2)
    first, second = y.chunk(2, 1)
    return torch.cat([second, first, first * 2], 1)


def halves_written(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    first, second = skip[:, :2], skip[:, 2:]
    with torch.no_grad():
        first.mul_(2)
    return torch.cat([second, first], 1)


def base_written(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    y = torch.cat([skip[:, 2:], skip[:, :2]], 1)
    with torch.no_grad():
        skip.mul_(2)
    return y


def halves_gated(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    first, second = skip.chunk(2, 1)
    return torch.cat([first * torch.sigmoid(second), first - second], 1)


def halves_changed(skip: Tensor, up: Tensor, _: Tensor) -> Tensor:
    first, second = skip[:, :1], skip[:, 1:]
    return torch.cat([first.add_(1), second], 1)


def larger(low: Tensor, scale: float, mode: str = "nearest") -> Tensor:
    return F.interpolate(low, scale_factor=scale, mode=mode)


# by name: the function of the skip, its result scaled up, and the small picture; how many of its
# channels the next convolution reads; how many pictures are saved beside those of the norms
GROWN: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], float, float]] = {
    "cat": (lambda skip, up, low: torch.cat([skip, up], 1), 2, 1),
    "another order": (lambda skip, up, low: torch.cat([up, skip], -3), 2, 1),
    "padded": (lambda skip, up, low: torch.cat([F.pad(skip, [0] * 4), up], 1), 2, 1),
    "padded by zeros": (lambda skip, up, low: F.pad(torch.cat([skip, up], 1), [1, 0]), 2, 2.25),
    "function of it": (lambda skip, up, low: F.relu(torch.cat([skip, skip], 1)), 2, 0),
    "function of a copy": (lambda skip, up, low: F.relu(torch.cat([skip, up], 1)), 2, 2),
    "written": (lambda skip, up, low: written(skip, up), 2, 2),
    "part of a function": (silu_part, 2, 1),
    "part of a function, written": (lambda skip, up, low: part_written(F.silu, skip, up), 2, 2),
    "shifted": (lambda skip, up, low: torch.cat([F.pad(skip, [1, -1]), up], 1), 2, 2),
    "one empty": (lambda skip, up, low: one_empty(skip, up), 2, 2),
    "no recipe": (lambda skip, up, low: torch.cat([up, up], 1), 2, 2),
    "a small part": (lambda skip, up, low: torch.cat([low, *[low.flip(0)] * 7], 1), 8, 2),
    "nearest": (lambda skip, up, low: larger(up, 2), 1, 1),
    "by a fraction": (lambda skip, up, low: larger(up, 2.1), 1, 4),
    "by three": (lambda skip, up, low: larger(up, 3), 1, 9),
    "bilinear": (lambda skip, up, low: larger(low, 4, "bilinear"), 1, 0),
    "bilinear of none": (lambda skip, up, low: larger(up, 2, "bilinear"), 1, 4),
    "cropped": (
        lambda skip, up, low: torch.cat([t[:, :, 1:, 1:-1] for t in (skip, up)], 1),
        2,
        42 / 64,
    ),
    "halves": (lambda skip, up, low: torch.cat([*skip.chunk(2, 1)][::-1], 1), 1, 0),
    "a slice of a slice": (lambda skip, up, low: torch.cat([skip[:, 1:][:, ::2]] * 2, 1), 1, 0),
    "parts by sizes": (lambda skip, up, low: torch.cat([*skip.split([1, 3], 1)][::-1], 1), 1, 0),
    "channels alone": (lambda skip, up, low: torch.stack([*skip.unbind(1)], 1), 1, 1),
    "sum of slices": (lambda skip, up, low: skip[:, :2].repeat(1, 2, 1, 1) + skip, 1, 1),
    "sum with a transposed": (lambda skip, up, low: skip + skip.transpose(2, 3), 1, 0),
    "sum with an expanded": (lambda skip, up, low: skip + skip[:, :1].expand_as(skip), 1, 0),
    "sum with a slice": (lambda skip, up, low: skip + skip[:, :1], 1, 0),
    # a copy of the parameter
    "less a parameter": (shifted, 1, 8 * C / PICTURE),
    "less a parameter that is written": (shift_written, 1, 1),
    "difference": (lambda skip, up, low: skip - skip.flatten(2).view_as(skip) / 2, 1, 0),
    "halves, gated": (halves_gated, 1, 0),
    "halves of a function": (halves_of_function, 1.5, 1),
    "halves of a function, written": (halves_of_written, 1.5, 1.5),
    "part of a concatenation": (
        lambda skip, up, low: F.relu(torch.cat([skip, up], 1)[:, :C]),
        1,
        1,
    ),
    "halves, by a function": (lambda skip, up, low: torch.cat([F.glu(skip, -3)] * 2, 1), 1, 0),
    "halves, by a function of all": (lambda skip, up, low: F.glu(F.silu(skip * 2), 1), 0.5, 0),
    "halves, written": (halves_written, 1, 1),
    "halves, changed": (halves_changed, 1, 1),
    "halves, their base written": (base_written, 1, 1),
    "nested": (lambda skip, up, low: torch.cat([skip, larger(low, 2, "bilinear")], 1), 2, 0),
}


class UpBlock(nn.Module):
    """As a block of a U-Net."""

    def __init__(self, name: str):
        super().__init__()
        self.grow, width, _ = GROWN[name]
        self.first, self.norm = nn.Conv2d(C, C, 1), nn.BatchNorm2d(C)
        # code may write to a result that it does not save
        self.act = nn.GELU() if name.startswith("halves") else nn.ReLU()
        self.down, self.low_norm, self.low_act = nn.Conv2d(C, C, 2, 2), nn.BatchNorm2d(C), nn.ReLU()
        self.up, self.last = nn.ConvTranspose2d(C, C, 2, 2), nn.Conv2d(int(width * C), C, 1)

    def forward(self, x):
        skip = self.act(self.norm(self.first(x)))
        low = self.low_act(self.low_norm(self.down(skip)))
        return self.last(self.grow(skip, self.up(low), low))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    y = model(x)
    inputs = [x, *model.parameters()]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs, allow_unused=True)]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", GROWN)
def test_results_are_made_of_their_parts(name, is_last):
    torch.manual_seed(0)
    layout = torch.channels_last if is_last else torch.contiguous_format
    eager = UpBlock(name).to(DEVICE, torch.float64).to(memory_format=layout)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    for _ in range(2):
        x = torch.randn(N, C, S, S, device=DEVICE, dtype=torch.float64, requires_grad=True)
        for a, b in zip(gradients(ours, x), gradients(eager, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    # x, the results of both convolutions, of which the second is small
    saved = 2.25 * PICTURE + 2 * VECTORS
    assert saved_bytes(ours, [x]) == saved + GROWN[name][2] * PICTURE


def test_a_reader_before_others_leaves_no_result():
    """Nor do the recipes behind; the readers after it make them, once."""
    runs = []

    def again(x: Tensor) -> Tensor:
        runs.append(len(x))
        return x * 2

    x = torch.ones(3, requires_grad=True)
    first = Made("first", again, [Leaf(x)], [x])
    first.add_reader(None)
    second = Made("second", again, [View(first, 0, x.shape, (1,), 0)], [x])
    for _ in range(3):
        second.add_reader(None)
    seen = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for read in reads:
                read(0)
                seen.append((len(runs), first.is_made, second.is_made))
            return grad

    reads = [second.passing, second.value, second.value, first.value]
    for _ in range(2):
        Reads.apply(x).sum().backward()
        found = [(2, False, False), (4, True, True), (4, True, False), (4, False, False)]
        assert seen == found
        seen.clear()
        runs.clear()
        # a backward that ends there
        reads, all_reads = reads[:1], reads
        Reads.apply(x).sum().backward()
        reads = all_reads
        seen.clear()
        runs.clear()


def test_other_functions_of_a_part_are_compared_anew():
    torch.manual_seed(0)
    eager = UpBlock("cat").to(DEVICE, torch.float64)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    x = torch.randn(N, C, S, S, device=DEVICE, dtype=torch.float64, requires_grad=True)
    for grow in (silu_part, silu_part, gelu_part):
        eager.grow = ours.grow = grow
        for a, b in zip(gradients(ours, x), gradients(eager, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
