"""Units that return more than the next one needs: all of these tensors are counted."""

import pytest
import torch
from plan_models import assert_as_planned
from torch import nn

WIDTH = 64


def of_first(outputs):
    return outputs[0].square().mean()


class Biases(nn.Linear):
    def __init__(self):
        super().__init__(1, 8)

    def forward(self):
        return super().forward(torch.ones(256, 256, 1)), torch.ones(256, 256, 8).tril(1)


class AttendingWithBias(nn.Module):
    """It hands on a bias and a mask without gradient, and returns scores that nobody uses."""

    def __init__(self, makes_bias):
        super().__init__()
        self.project, self.biases = nn.Linear(WIDTH, WIDTH), Biases() if makes_bias else None

    def forward(self, x, bias, mask):
        if self.biases is not None:
            bias, mask = self.biases()
        scores = (x @ x.mT / WIDTH)[..., None] * bias * mask
        return x + scores.softmax(1).mean(-1) @ self.project(x), bias, mask, scores


class PositionBiased(nn.Module):
    """Position biases as T5 and WavLM make them, in the first layer, or MPNet, before that."""

    def __init__(self, by_code):
        super().__init__()
        self.biases = Biases() if by_code else lambda: (None, None)
        self.layers = nn.ModuleList(AttendingWithBias(not i and not by_code) for i in range(4))

    def forward(self, x):
        bias, mask = self.biases()
        for layer in self.layers:
            x, bias, mask, _ = layer(x, bias, mask)
        return x, None


@pytest.mark.parametrize("policy", ["none", "all", "sqrt"])
@pytest.mark.parametrize("by_code", [False, True], ids=["the first unit's", "code's"])
def test_what_all_units_get_is_counted_once(by_code, policy):
    x = torch.randn(256, WIDTH, requires_grad=True)
    assert_as_planned(PositionBiased(by_code), x, policy, of_first, most=1.01)


OUTPUTS = {
    "twice": lambda x, y: (y, y),
    "what it keeps": lambda x, y: (2 * y, y),
    "a view": lambda x, y: (y, y[:3]),
    "its input": lambda x, y: (y, x),
    "nothing": lambda x, y: (y, None),
    "a mask": lambda x, y: (y, y > 0),
    "a loss": lambda x, y: (y, y.square().mean()),
}


class Returning(nn.Linear):
    def __init__(self, also):
        super().__init__(WIDTH, WIDTH)
        self.also = also

    def forward(self, x):
        return OUTPUTS[self.also](x, super().forward(x).relu())


class Rest(nn.Module):
    """It drops what units return besides, uses it, or returns it in the end."""

    def __init__(self, also, then):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.units, self.then = nn.ModuleList(Returning(also) for _ in range(4)), then

    def forward(self, x):
        x, others = self.first(x), []
        for unit in self.units:
            x, other = unit(x)
            if other is not None and self.then != "dropped":
                others.append(other.sum() if self.then == "used" else other.detach())
        x = self.last(x)
        return sum(others, x) if self.then == "used" else x, others


@pytest.mark.parametrize("then", ["dropped", "used", "returned"])
@pytest.mark.parametrize("also", OUTPUTS)
def test_what_else_units_return(also, then):
    policy = "none" if then == "used" else "sqrt"
    x = torch.randn(1024, WIDTH)
    assert_as_planned(Rest(also, then), x, policy, of_first, most=1.01)
