"""Units are the deepest repeated blocks of a model, whatever the nesting of its containers."""

import copy

import pytest
import torch
from plan_models import assert_predicted, count_calls
from torch import nn
from zoo import MLP, Line, MLPBlock

import fusedckpt
from fusedckpt import plan
from fusedckpt.memory import peak_bytes

WIDTH = 32


def blocks(count):
    return nn.ModuleList(MLPBlock(nn.LayerNorm(WIDTH), MLP(WIDTH, 4 * WIDTH)) for _ in range(count))


class Stage(nn.Module):
    """Blocks, and a layer behind them."""

    def __init__(self, count):
        super().__init__()
        self.blocks, self.dropout = blocks(count), nn.Dropout(0.0)
        self.merge = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.merge(self.dropout(x))


class ExpertBlocks(nn.Module):
    """Experts side by side."""

    def __init__(self):
        super().__init__()
        self.experts, self.router = blocks(3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        return x + sum(expert(x) * scores[..., i : i + 1] for i, expert in enumerate(self.experts))


class Zigzag(nn.Module):
    """A part of a UNet: entries of two lists in turns, and a list of one."""

    def __init__(self, count):
        super().__init__()
        self.attentions, self.resnets = blocks(count), blocks(count)
        self.downsamplers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        skips = ()
        for attention, resnet in zip(self.attentions, self.resnets, strict=True):
            x = attention(resnet(x))
            skips = *skips, x
        return self.downsamplers[0](x), skips


class Mirrored(nn.Module):
    """A UNet whose middle is no entry of a container."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Zigzag(2), Zigzag(1)])
        self.middle = Line(*blocks(2))
        self.up = nn.ModuleList(Zigzag(2) for _ in range(2))

    def forward(self, x):
        total = 0
        for part in self.down:
            x, skips = part(x)
            total = total + sum(skips)
        x = self.middle(x) + total
        for part in self.up:
            x, _ = part(x)
        return x


def names(prefix, count):
    return [f"{prefix}.{i}" for i in range(count)]


def zigzag(prefix, count):
    order = [f"{prefix}.{part}.{i}" for i in range(count) for part in ("resnets", "attentions")]
    return [*order, f"{prefix}.downsamplers.0"]


NESTINGS = {
    "stages of blocks": (
        lambda: Line(*[Stage(2), Stage(3)]),
        [
            *(*names("units.0.blocks", 2), "units.0.merge"),
            *(*names("units.1.blocks", 3), "units.1.merge"),
        ],
    ),
    "stages of groups of blocks": (
        lambda: Line(*[Line(*[Stage(2), Stage(2)]), Line(*[Stage(2), Stage(1)])]),
        [
            name
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))
            for name in (
                *names(f"units.{i}.units.{j}.blocks", 1 if i and j else 2),
                f"units.{i}.units.{j}.merge",
            )
        ],
    ),
    "blocks of experts": (lambda: Line(*[ExpertBlocks(), ExpertBlocks()]), names("units", 2)),
    "stages of blocks of experts": (
        lambda: Line(
            *[Line(*[ExpertBlocks(), ExpertBlocks()]), Line(*[ExpertBlocks(), ExpertBlocks()])]
        ),
        [*names("units.0.units", 2), *names("units.1.units", 2)],
    ),
    "down, middle and up": (
        Mirrored,
        [
            *(*zigzag("down.0", 2), *zigzag("down.1", 1), *names("middle.units", 2)),
            *(*zigzag("up.0", 2), *zigzag("up.1", 2)),
        ],
    ),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_units_of_nested_containers(name):
    made, expected = NESTINGS[name]
    model, x = made(), torch.randn(256, WIDTH)
    plain = copy.deepcopy(model)
    for policy in ("all", "memory"):
        found = plan(model, x, policy=policy, progress=False)
        assert [unit.name for unit in found.chain.units] == expected
        assert_predicted(found, 1.03)
    assert not found.left_out
    found.apply(model)
    for each in (model, plain):
        y = each(x)
        y.square().mean().backward()
    for mine, eager in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, eager.grad)


def test_stages_need_no_more_than_a_checkpoint_of_every_block():
    model, x = Line(*[Stage(2), Stage(9), Stage(2)]), torch.randn(512, WIDTH)
    every = copy.deepcopy(model)
    for stage in every.units:
        for i, block in enumerate(stage.blocks):
            stage.blocks[i] = fusedckpt.checkpoint_module(block)
    plan(model, x, policy="memory", progress=False).apply(model)

    def peak(each):
        each(x).square().mean().backward()
        each.zero_grad()
        return peak_bytes(lambda: each(x).square().mean().backward())

    assert peak(model) <= peak(every)


def count_forwards(model, x, **options):
    calls = count_calls(model)
    plan(model, x, progress=False, **options)
    return next(calls)


def test_nesting_takes_one_more_forward():
    x = torch.randn(64, WIDTH)

    def difference(model, other, units):
        # times of steps that are alike are measured once
        return count_forwards(model, x, policy="all") - count_forwards(
            other, x, policy="all", units=units
        )

    listed = [f"units.{i}.blocks.{j}" for i in range(2) for j in range(3)]
    assert difference(Line(*[Stage(2), Stage(2)]), Line(*[Stage(3), Stage(3)]), listed) == 1
    # blocks of one container are known without
    assert difference(Line(*blocks(4)), Line(*blocks(5)), names("units", 5)) == 0


def test_more_segments_than_blocks_are_refused():
    model, x = Line(*[ExpertBlocks(), ExpertBlocks()]), torch.randn(8, WIDTH)
    with pytest.raises(ValueError, match="from uniform:1 to uniform:2, got 'uniform:5'"):
        plan(model, x, policy="uniform:5", progress=False)


def test_neighbors_of_very_many_units_are_joined(monkeypatch):
    monkeypatch.setattr("fusedckpt.planning.grouping.MOST_UNITS", 8)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 15
    model, x = nn.Sequential(*map(copy.deepcopy, layers)), torch.randn(256, WIDTH)
    plain = copy.deepcopy(model)
    for policy in ("none", "all", "sqrt", "memory"):
        found = plan(model, x, policy=policy, progress=False)
        assert len(found.chain.units) == 8
        assert [name for unit in found.chain.units for name in unit.modules] == [
            str(i) for i in range(30)
        ]
        assert_predicted(found, 1.03)
    found.apply(model)
    for each in (model, plain):
        each(x).square().mean().backward()
    for mine, eager in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, eager.grad)
