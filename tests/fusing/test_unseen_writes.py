"""Writes that raise no version to results with recipes: an error, or eager's gradients."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable

import pytest
import torch
from support import randn
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from zoo import Attention

import fusedckpt
from fusedckpt.checkpointing import samples
from fusedckpt.layers.notes import notes_of
from fusedckpt.recipes import recipe_mode

T, D = 6, 16


def clamp(h: Tensor) -> None:
    h.data.clamp_(-0.3, 0.3)


def assign(h: Tensor) -> None:
    h.data = (h.data * 4).round() / 4


def numpy(h: Tensor) -> None:
    h.detach().numpy()[..., ::2] = 0


def from_numpy(h: Tensor) -> None:
    torch.from_numpy(h.detach().numpy()).mul_(2)


def address(h: Tensor) -> None:
    ctypes.memset(h.data_ptr(), 0, h.nbytes // 2)


WRITES = (clamp, assign, numpy, from_numpy, address)


class WritingLayer(nn.Module):
    """An MLP and two linears behind a norm; its results are written, by the name of a place."""

    def __init__(self, place: str, write: Callable[[Tensor], None]):
        super().__init__()
        self.place, self.write = place, write
        self.norm, self.act = nn.LayerNorm(D), nn.GELU()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def at(self, place: str, h: Tensor) -> Tensor:
        if place == self.place:
            self.write(h)
        return h

    def forward(self, x):
        n = self.at("norm", self.norm(x))
        y = self.a(n)
        n = self.at("between readers", n)
        y = y * self.b(n).tanh()
        h = self.at("linear", self.up(n))
        return y + self.down(self.at("activation", self.act(h)))


PLACES = ("norm", "linear", "activation")


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "options", [{}, {"save": "preact"}, {"recompute_elementwise": True}], ids=str
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", WRITES)
def test_writes(write, place, options, monkeypatch):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
    torch.manual_seed(0)
    eager = WritingLayer(place, write)
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours, **options)
    x = randn(T, D)
    expected = gradients(eager, x)
    # what has another storage is known, and a mode sees most of the others
    sees = "recompute_elementwise" in options or (place == "linear" and not options)
    is_seen = write is assign or (sees and write is not address)
    is_saved = place == "linear" and "save" in options
    if not (is_saved or is_seen):
        with pytest.raises(CheckpointError, match="writes there without a version"):
            gradients(ours, x)
        return
    actual = gradients(ours, x)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


class WritingAttention(Attention):
    """Writes to its argument before it reads it, from a call on."""

    def __init__(self, write: Callable[[Tensor], None], since: int):
        super().__init__(D)
        self.write, self.since = write, since

    def forward(self, x):
        self.since -= 1
        if self.since < 0:
            self.write(x)
        return super().forward(x)


class FunctionsAround(nn.Module):
    """Functions make attention's argument, and another one reads it behind attention."""

    def __init__(self, attention: WritingAttention):
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(D, D), attention, nn.Linear(D, D)

    def forward(self, x):
        h = nn.functional.gelu(self.first(x)) * 2
        y = self.attention(h)
        return self.last(h.sigmoid() * y)


@pytest.mark.parametrize("since", range(3))
@pytest.mark.parametrize("write", [clamp, assign, numpy])
def test_attention_that_writes_to_a_result_of_functions(write, since, monkeypatch):
    """The mode of recipes sees writes in its first calls, in a checkpoint, and in later ones."""
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
    torch.manual_seed(0)
    eager = FunctionsAround(WritingAttention(write, since)).double()
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours, recompute_elementwise=True)
    for _ in range(4):
        x = randn(2, T, D, dtype=torch.float64)
        torch.testing.assert_close(gradients(ours, x), gradients(eager, x))
        assert notes_of(ours.attention).follows_nodes


class Usual(nn.Module):
    """Calls that follow each other, as models have them."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2, self.act = nn.LayerNorm(D), nn.RMSNorm(D), nn.GELU()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        n = self.norm(x)
        q, k, v = self.q(n), self.k(n), self.v(n)
        residual = x
        h = self.norm2(x)
        h = self.up(h)
        h = self.act(h)
        h = self.down(h)
        return residual + q * k + v + self.down(self.act(self.up(self.norm2(x)))) + h


class Looped(nn.Module):
    """Other calls come between, or may."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        n = self.norm(x)
        if len(self._modules) == 1:
            clamp(n)
        for _ in range(2):
            x = x + self.linear(n)
        return x


@pytest.mark.parametrize(("net", "count"), [(Usual, 0), (Looped, 2)])
def test_what_nothing_can_have_written_has_no_samples(net, count, monkeypatch):
    model = net()
    fusedckpt.fuse(model)
    taken = []
    take = samples._blocks_of
    monkeypatch.setattr(samples, "_blocks_of", lambda rows: taken.append(rows) or take(rows))
    model(randn(T, D))
    assert len(taken) == count


def test_hooks_are_other_code():
    model = Usual()
    eager = copy.deepcopy(model)
    fusedckpt.fuse(model)
    for each in (eager, model):
        each.q.register_forward_pre_hook(lambda _, args: clamp(args[0]))
    x = randn(T, D)
    gradients(eager, x)
    with pytest.raises(CheckpointError, match="writes there without a version"):
        gradients(model, x)


@pytest.mark.parametrize("write", [clamp, numpy, from_numpy, address])
def test_writes_between_two_readers(write):
    """Eager's first linear reads in backward what is written behind it, too."""
    torch.manual_seed(0)
    ours = WritingLayer("between readers", write)
    fusedckpt.fuse(ours)
    with pytest.raises(CheckpointError, match="writes there without a version"):
        gradients(ours, randn(T, D))


class ScalesByData(nn.Module):
    """An MLP behind a norm that scales its input by `.data`: a second run scales it twice."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(D), nn.Linear(D, 2 * D)

    def forward(self, x):
        x = x * 1.0
        y = self.up(self.norm(x))
        x.data.mul_(3)
        return y


def test_a_module_whose_check_finds_another_recompute_is_left():
    model = nn.Sequential(ScalesByData(), nn.ReLU(), nn.Linear(2 * D, D))
    report = fusedckpt.fuse(model)
    assert "0" not in report.swapped
