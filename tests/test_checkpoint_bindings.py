"""Names that stand for something else by the time of the backward (C8)."""

import pytest
import torch
from checkpoints import same, step
from support import DEVICE, randn
from torch import nn

from fusedckpt import Checkpoint, checkpoint

WEIGHT = randn(4, 6, requires_grad=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.to(DEVICE)

    def forward(self, x):
        return self.fc2(self.fc1(x.sin()).tanh() * self.scale).sin()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_replaced_between_forward_and_backward(kind):
    """Autograd goes by the tensors that the forward read, and so does the recompute."""
    net, x = Net(), randn(4, 6)
    expected = step(net, x)
    y = checkpoint(net, x)
    if kind == "parameter":
        net.fc1.bias = nn.Parameter(torch.zeros(6, device=DEVICE))
    else:
        net.scale = torch.zeros(6, device=DEVICE)
    now = net.state_dict(keep_vars=True)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert same(grad, expected[1])
    assert all(now[key] is t for key, t in net.state_dict(keep_vars=True).items())


def test_closure_bound_anew():
    """The recompute calls what the forward called, not what the names stand for by then."""
    layers, x = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)], randn(4, 6)
    layers = nn.ModuleList(layers).to(DEVICE)

    def run(call):
        y, count = x.detach(), 0
        for layer in layers:

            def fn(z):
                nonlocal count
                count += 1
                return layer(z).sin() + y * count  # noqa: B023

            y = call(fn, y)
        assert count == 3
        loss = y.square().sum()
        grads = torch.autograd.grad(loss, [*layers.parameters()], retain_graph=True)
        again = torch.autograd.grad(loss, [*layers.parameters()])
        assert all(map(same, grads, again))
        assert count == 3
        return grads

    assert all(map(same, run(checkpoint), run(lambda fn, z: fn(z))))


def test_global_bound_anew(monkeypatch):
    x = randn(4, 6)
    y = checkpoint(lambda x: (x + WEIGHT).sin().sin(), x)
    monkeypatch.setitem(globals(), "WEIGHT", WEIGHT.clone())
    with pytest.raises(RuntimeError, match="the global 'WEIGHT' was bound to another object"):
        y.sum().backward()


def test_functional_call():
    net, x = Net(), randn(4, 6)
    given = {k: (p * 2).detach().requires_grad_(p.requires_grad) for k, p in net.named_parameters()}
    given["scale"] = torch.full((6,), 3.0, device=DEVICE)
    leaves = list(given.values())[:-1]

    def run(module):
        y = torch.func.functional_call(module, given, (x,))
        return torch.autograd.grad(y.sum(), [x, *leaves])

    assert all(map(same, run(Checkpoint(net)), run(net)))
