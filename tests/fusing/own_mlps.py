"""MLPs of many classes and spellings, which fuse finds by what they compute."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo import GEGLU

D, H = 12, 20
CONSTANT = math.sqrt(2 / math.pi)


class Written(nn.Module):
    """An activation of a class of its own, its constant to as many digits as it is given."""

    def __init__(self, constant=CONSTANT):
        super().__init__()
        self.constant = constant

    def forward(self, z):
        return 0.5 * z * (1 + torch.tanh(self.constant * z * (1 + 0.044715 * z * z)))


class Conv1D(nn.Module):
    def __init__(self, out, features):
        super().__init__()
        self.nf = out
        self.weight = nn.Parameter(torch.randn(features, out) * features**-0.5)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], self.nf)


class Plain(nn.Module):
    def __init__(self, act=None, linear=nn.Linear, p=None, out=D):
        super().__init__()
        make = linear if linear is not Conv1D else lambda i, o: Conv1D(o, i)
        # in an order that says nothing
        self.second = make(H, out)
        self.act = act or nn.GELU()
        self.first = make(D, H)
        if p is not None:
            self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


class Gated(nn.Module):
    """The activated half is `v`, which stands second."""

    def __init__(self, act=None, bias=False, features=D):
        super().__init__()
        self.w = nn.Linear(features, H, bias)
        self.v = nn.Linear(features, H, bias)
        self.o = nn.Linear(H, features, bias)
        self.act = act or nn.SiLU()

    def forward(self, x):
        return self.o(self.w(x) * self.act(self.v(x)))


class Packed(nn.Module):
    def __init__(self, first="gate", bias=True):
        super().__init__()
        self.wi = nn.Linear(D, 2 * H, bias)
        self.wo = nn.Linear(H, D, bias)
        self.act = nn.GELU(approximate="tanh")
        self.first = first

    def forward(self, x):
        a, b = self.wi(x).chunk(2, dim=-1)
        gate, up = (a, b) if self.first == "gate" else (b, a)
        return self.wo(self.act(gate) * up)


class DropsInside(Plain):
    def forward(self, x):
        return self.second(self.drop(self.act(self.first(x))))


class DropsBefore(Plain):
    def forward(self, x):
        return self.second(self.act(self.drop(self.first(x))))


class DropsAfter(Plain):
    def forward(self, x):
        return self.drop(super().forward(x))


class Rate(Plain):
    """Whisper's way: a number and a function."""

    dropout = 0.0

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        h = F.dropout(self.act(self.first(x)), self.dropout, self.training)
        return self.second(h)


class Inheriting(nn.Linear):
    """As libraries have them, to build it from a configuration."""

    def reset_parameters(self):
        nn.init.normal_(self.weight)


class DroppingSequential(nn.Sequential):
    def __init__(self, p=0.0):
        layers = nn.Linear(D, H), nn.GELU(), nn.Dropout(p), nn.Linear(H, D), nn.Dropout(p)
        super().__init__(*layers)


class Inlined(Plain):
    """OPT's layer: the MLP's linears beside a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        return x + super().forward(self.norm(x))


class QuickGELU(nn.Module):
    def forward(self, z):
        return z * torch.sigmoid(1.702 * z)


class SquaredReLU(nn.Module):
    def forward(self, z):
        return F.relu(z, inplace=True) ** 2


class InList(nn.Module):
    """The layers in a list, the activation in the first of them."""

    def __init__(self, p=0.0):
        super().__init__()
        self.net = nn.ModuleList([GEGLU(D, H), nn.Dropout(p), nn.Linear(H, D)])

    def forward(self, x, *args, **kwargs):
        for layer in self.net:
            x = layer(x)
        return x


class Raw(nn.Module):
    """No linears: weights as [in, out] and [out, in], a bias that is added."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(D, H))
        self.b1 = nn.Parameter(torch.randn(H))
        self.w2 = nn.Parameter(torch.randn(D, H))

    def forward(self, x):
        return torch.tanh(x @ self.w1 + self.b1) @ self.w2.t()


class Split(nn.Module):
    """It knows its sizes by number."""

    def __init__(self, features=96, hidden=120):
        super().__init__()
        self.features, self.hidden = features, hidden
        self.up, self.down = nn.Linear(features, 2 * hidden), nn.Linear(hidden, features)

    def forward(self, x):
        rows = x.reshape(-1, self.features)
        gate, up = self.up(rows).split([self.hidden, self.hidden], dim=-1)
        return self.down(F.silu(gate.float()).to(up.dtype) * up).view(x.shape)


def is_fused(module, x):
    # torch 2.11 takes the name from a node whose output is gone
    y = module(x)
    name = y.grad_fn.name()
    return name.endswith("Backward") and "LayerFunction" in name
