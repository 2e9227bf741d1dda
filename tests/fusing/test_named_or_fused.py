"""Every module with a weight matrix and an activation that fuse does not swap is named."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn

from fusedckpt import fuse

D, H = 12, 20
ACT2FN = {"gelu": nn.GELU()}


def snake(z):
    return z + torch.sin(z) ** 2


class Learnt(nn.Module):
    """xIELU's way: parameters and buffers of one element."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(1)), nn.Buffer(torch.tensor(0.5))

    def forward(self, z):
        return torch.where(z > 0, F.softplus(self.alpha) * z * z, self.beta * torch.expm1(z))


class XIELUActivation(Learnt):
    pass


class Snake(nn.Module):
    def forward(self, z):
        return snake(z)


class Two(nn.Module):
    def __init__(self, act: Any = None):
        super().__init__()
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D)
        self.act = act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class TwoInputs(Two):
    def forward(self, x, mask):  # pyright: ignore[reportIncompatibleMethodOverride]  # on purpose
        return super().forward(x) * mask


class Clamped(nn.Module):
    """MiniMax's: gate and up are clamped, and up is shifted."""

    def __init__(self, limit=7.0):
        super().__init__()
        self.both, self.down, self.limit = nn.Linear(D, 2 * H), nn.Linear(H, D), limit

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return self.down((up + 1) * (gate * torch.sigmoid(1.702 * gate)))


class ClampedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = (nn.Parameter(torch.randn(4, D, n)) for n in (2 * D, D))

    def forward(self, x, index):
        gate, up = (x @ self.both[index]).chunk(2, dim=-1)
        return (up * gate * torch.sigmoid(gate)) @ self.down[index]


class Gates(nn.Module):
    """An attention whose output a linear gates."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.gate = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).mT + mask
        return scores.softmax(-1) @ self.v(x) * self.gate(x).sigmoid_()


class Head(nn.Module):
    """RoBERTa's classification head."""

    def __init__(self):
        super().__init__()
        self.dense, self.out = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.dense(x[:, 0])))


class ByTable(Head):
    def forward(self, x):
        return self.out(ACT2FN["gelu"](self.dense(x[:, 0])))


class ByFunction(Two):
    def forward(self, x):
        return self.down(snake(self.up(x)))


class InDict(nn.Module):
    """A layer whose MLP's linears are in a dict."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mlp = nn.ModuleDict({"up": nn.Linear(D, H), "act": nn.ELU(), "down": nn.Linear(H, D)})

    def forward(self, x):
        return self.mlp["down"](self.mlp["act"](self.mlp["up"](self.norm(x))))


class Wrapped(nn.Module):
    """A linear with limits: no linear of torch's."""

    def __init__(self, *sizes):
        super().__init__()
        self.linear = nn.Linear(*sizes)

    def forward(self, x):
        return self.linear(x) * 2


class OfWrapped(Two):
    def __init__(self):
        super().__init__(nn.SiLU())
        self.up, self.down = Wrapped(D, H), Wrapped(H, D)


class PReLUBeside(TwoInputs):
    """The activation has a weight, and is no layer beside."""

    def __init__(self):
        super().__init__(nn.PReLU())


NO = "is no activation that can be fused"
NAMED = {
    "learnt activation": (lambda: Two(XIELUActivation()), f"act: XIELUActivation() {NO}"),
    "learnt, of no known name": (lambda: Two(Learnt()), f"act: Learnt() {NO}"),
    "learnt, two inputs": (lambda: TwoInputs(Learnt()), "more than one tensor"),
    "weight of PReLU": (PReLUBeside, "more than one tensor"),
    "unknown": (lambda: Two(Snake()), f"act: Snake() {NO}"),
    "unknown, two inputs": (lambda: TwoInputs(Snake()), "more than one tensor"),
    "unknown function": (ByFunction, NO),
    "attribute": (lambda: TwoInputs(torch.sigmoid), "more than one tensor"),
    "clamped": (Clamped, NO),
    "experts": (ClampedExperts, "its weights are 3-dimensional"),
    "gates": (Gates, "more than one tensor"),
    "head": (Head, "its result has the shape [2, 2]"),
    "table": (ByTable, "its result has the shape [2, 2]"),
    "in a dict": (
        InDict,
        "its linears and activation are written inside this layer's forward (beside norm)",
    ),
    "wrapped linears": (OfWrapped, ""),
    "in a Sequential": (
        lambda: nn.Sequential(nn.Linear(D, H), Snake(), nn.Linear(H, D)),
        f"Snake() {NO}",
    ),
}


@pytest.mark.parametrize(("make", "reason"), NAMED.values(), ids=list(NAMED))
@pytest.mark.parametrize("verify", [True, False])
def test_an_activation_beside_a_weight_matrix_is_named(make, reason, verify):
    # at this level nothing is recomputed
    report = fuse(make().to(DEVICE), norm=False, verify=verify, save="preact")
    assert not report.swapped
    assert [reason in found for found in report.left.values()] == [True]


class Capped(nn.Module):
    """A model that caps its logits."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.final_logit_softcap = nn.Embedding(8, D), nn.Linear(D, 8), 3.0

    def forward(self, ids):
        logits = self.head(self.body(ids)) / self.final_logit_softcap
        return torch.tanh(logits) * self.final_logit_softcap


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma, self.proj = nn.Parameter(torch.ones(D)), nn.Linear(D, D)

    def forward(self, x):
        return self.proj(x) * self.gamma / 2


class Above(nn.Module):
    """A linear, and an MLP that is swapped for itself."""

    def __init__(self):
        super().__init__()
        self.proj, self.mlp = nn.Linear(D, D), Two(nn.SiLU())

    def forward(self, x):
        return x + self.mlp(x + self.proj(x))


class Sines(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalize, self.eps = True, 1e-6

    def forward(self, mask):
        at = mask.cumsum(-1)
        return (at / (at[..., -1:] + self.eps)).sin() if self.normalize else at.sin()


class NoForward(nn.Module):
    """As base classes of models have none."""


class PreNormModel(NoForward):
    pass


@pytest.mark.parametrize("make", [Capped, Scale, Above, Sines, PreNormModel, Snake, Learnt])
def test_what_has_none_is_not_mentioned(make):
    assert fuse(make().to(DEVICE)).left == {}


class Layer(nn.Module):
    """A layer that calls linears and an activation beside other layers."""

    def __init__(self, beside, **linears):
        super().__init__()
        self.beside, self.act = beside, nn.GELU()
        for name, sizes in linears.items():
            setattr(self, name, nn.Linear(*sizes))

    def forward(self, x):
        for linear in [one for one in self.children() if isinstance(one, nn.Linear)]:
            x = self.act(linear(self.beside(x)))
        return x


INSIDE = (
    "its linears and activation are written inside this layer's forward (beside beside): fuse "
    "takes them from a module of their own, or where an activation module reads a linear after a "
    "fused norm"
)
BESIDE = {
    "pre-norm": (nn.LayerNorm(D), {"up": (D, H), "down": (H, D)}),
    "in another order": (nn.LayerNorm(D), {"down": (H, D), "up": (D, H)}),
    "gated": (nn.LayerNorm(D), {"gate": (D, H), "up": (D, H), "down": (H, D)}),
    "packed": (nn.LayerNorm(D), {"both": (D, 2 * H), "down": (H, D)}),
    "attention": (nn.MultiheadAttention(D, 2), {"up": (D, H), "down": (H, D)}),
    "a narrow one": (nn.LayerNorm(H), {"down": (H, D), "up": (D, H)}),
    "a norm inside": (nn.LayerNorm(H), {"up": (D, H), "down": (H, D)}),
    "a convolution": (nn.Conv1d(D, D, 1), {"up": (D, H), "down": (H, D)}),
    "one linear": (nn.LayerNorm(D), {"dense": (D, D)}),
    "a head": (nn.LayerNorm(D), {"dense": (D, D), "decoder": (D, 2 * D)}),
    "q, k, v": (nn.LayerNorm(D), {"q": (D, D), "k": (D, D), "v": (D, D)}),
}


@pytest.mark.parametrize(("beside", "linears"), BESIDE.values(), ids=list(BESIDE))
def test_what_is_written_inside_a_layer_is_said_to_be(beside, linears):
    model = Layer(beside, **linears).to(DEVICE)
    assert fuse(model, norm=False, save="preact").left == {"": INSIDE}
