"""Units are the deepest repeated blocks of a model, whatever the nesting of its containers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from plan_models import assert_predicted
from torch import nn

import fusedckpt
from fusedckpt import plan
from fusedckpt.memory import peak_bytes

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(count):
    return nn.ModuleList(Block() for _ in range(count))


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


class Listed(nn.Module):
    """Modules of a list, one after the other."""

    def __init__(self, modules):
        super().__init__()
        self.entries = nn.ModuleList(modules)

    def forward(self, x):
        for entry in self.entries:
            x = entry(x)
        return x


class Experts(nn.Module):
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
        self.middle = Listed(blocks(2))
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
        lambda: Listed([Stage(2), Stage(3)]),
        [
            *(*names("entries.0.blocks", 2), "entries.0.merge"),
            *(*names("entries.1.blocks", 3), "entries.1.merge"),
        ],
    ),
    "stages of groups of blocks": (
        lambda: Listed([Listed([Stage(2), Stage(2)]), Listed([Stage(2), Stage(1)])]),
        [
            name
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))
            for name in (
                *names(f"entries.{i}.entries.{j}.blocks", 1 if i and j else 2),
                f"entries.{i}.entries.{j}.merge",
            )
        ],
    ),
    "blocks of experts": (lambda: Listed([Experts(), Experts()]), names("entries", 2)),
    "stages of blocks of experts": (
        lambda: Listed([Listed([Experts(), Experts()]), Listed([Experts(), Experts()])]),
        [*names("entries.0.entries", 2), *names("entries.1.entries", 2)],
    ),
    "down, middle and up": (
        Mirrored,
        [
            *(*zigzag("down.0", 2), *zigzag("down.1", 1), *names("middle.entries", 2)),
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
    model, x = Listed([Stage(2), Stage(9), Stage(2)]), torch.randn(512, WIDTH)
    every = copy.deepcopy(model)
    for stage in every.entries:
        for i, block in enumerate(stage.blocks):
            stage.blocks[i] = fusedckpt.checkpoint_module(block)
    plan(model, x, policy="memory", progress=False).apply(model)

    def peak(each):
        each(x).square().mean().backward()
        each.zero_grad()
        return peak_bytes(lambda: each(x).square().mean().backward())

    assert peak(model) <= peak(every)


def count_forwards(model, x, **options):
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    plan(model, x, progress=False, **options)
    handle.remove()
    return len(calls)


def test_nesting_takes_one_more_forward():
    x = torch.randn(64, WIDTH)

    def difference(model, other, units):
        # times of steps that are alike are measured once
        return count_forwards(model, x, policy="all") - count_forwards(
            other, x, policy="all", units=units
        )

    listed = [f"entries.{i}.blocks.{j}" for i in range(2) for j in range(3)]
    assert difference(Listed([Stage(2), Stage(2)]), Listed([Stage(3), Stage(3)]), listed) == 1
    # blocks of one container are known without
    assert difference(Listed(blocks(4)), Listed(blocks(5)), names("entries", 5)) == 0


def test_more_segments_than_blocks_are_refused():
    model, x = Listed([Experts(), Experts()]), torch.randn(8, WIDTH)
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
