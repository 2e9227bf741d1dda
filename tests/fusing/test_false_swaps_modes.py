"""fuse: a forward that computes something else in another mode, for other inputs or in backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn
from test_false_swaps import D, Gated, H
from torch import nn

from fusedckpt import fuse


class WithoutGradient(Gated):
    def hidden(self, x):
        with torch.no_grad():
            gate = F.silu(self.w1(x))
        return gate * self.w3(x)


class Never(Gated):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Halving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx / 2


class OwnGradient(Gated):
    def hidden(self, x):
        return Halving.apply(super().hidden(x))


class Detached(Gated):
    def hidden(self, x):
        return F.silu(F.linear(x, self.w1.weight.detach())) * self.w3(x)


class Hooking(Gated):
    def hidden(self, x):
        h = super().hidden(x)
        if h.requires_grad:
            h.register_hook(lambda dh: dh * 2)
        return h


class Doubling(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class Calling(Gated):
    def __init__(self):
        super().__init__()
        self.w1 = Doubling(D, H, bias=False)


class InFull(Gated):
    def forward(self, x):
        with torch.autocast(x.device.type if x.device.type == "cuda" else "cpu", enabled=False):
            return super().forward(x.float())


class Rounding(Gated):
    def forward(self, x):
        return super().forward(x.bfloat16().to(x.dtype))


class Buffered(Gated):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(H))

    def hidden(self, x):
        return super().hidden(x) * self.scale


class WithTensor(Gated):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones((), device=DEVICE)

    def hidden(self, x):
        return super().hidden(x) * self.scale


class InPlace(Gated):
    def forward(self, x):
        return super().forward(x.mul_(1.0))


def doubling_where(condition):
    class Doubled(Gated):
        def forward(self, x):
            y = super().forward(x)
            return y * 2 if condition(self, x) else y

    return Doubled


OTHERWISE = "Doubled computes something else"
MODES = "its forward uses an autograd.Function, or switches autocast"
LEFT = {
    "without a gradient": (WithoutGradient, f"{MODES} while training"),
    "never a gradient": (Never, f"{MODES} while training"),
    "a gradient of its own": (OwnGradient, f"{MODES} while training"),
    "detached weight": (Detached, "its forward computes detach of w1.weight"),
    "hook on a tensor": (Hooking, "its forward registers hooks on tensors while training"),
    "call of its own": (Calling, "w1: a Doubling has its own __call__"),
    "without autocast": (InFull, f"{MODES} under autocast"),
    "rounding": (Rounding, "its forward computes _to_copy"),
    "buffer": (Buffered, "reads a tensor that is neither its input nor a parameter"),
    "tensor": (WithTensor, "its forward reads scale, a Tensor that may change"),
    "in place": (InPlace, "its forward writes to a tensor that it did not create"),
    "with gradients": (
        doubling_where(lambda m, x: torch.is_grad_enabled()),
        f"{OTHERWISE} while training",
    ),
    "under autocast": (
        doubling_where(lambda m, x: torch.is_autocast_enabled("cpu")),
        f"{OTHERWISE} under autocast",
    ),
    "strided": (
        doubling_where(lambda m, x: not x.is_contiguous()),
        f"{OTHERWISE} for strided inputs",
    ),
    "two dimensions": (
        doubling_where(lambda m, x: x.dim() == 2),
        f"{OTHERWISE} for two dimensions",
    ),
    "one token": (doubling_where(lambda m, x: x.numel() == D), f"{OTHERWISE} for one token"),
    "a child's mode": (
        doubling_where(lambda m, x: m.w1.training),
        f"{OTHERWISE} while training",
    ),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=list(LEFT))
def test_left_with_a_reason(make, reason):
    # at this level nothing is recomputed
    report = fuse(make().to(DEVICE), verify=False, save="preact")
    assert report.swapped == {}
    assert reason in report.left[""]
    module = make().to(DEVICE, torch.float64)
    eager, x = copy.deepcopy(module), randn(2, 3, D, dtype=torch.float64)
    swapped = fuse(module, verify=False).swapped
    assert swapped in ({}, {"": f"{type(eager).__name__} -> recomputed"})
    for training in (True, False) if swapped else ():
        ours, theirs = (
            torch.autograd.grad(m.train(training)(x).sum(), [x, *m.parameters()], allow_unused=True)
            for m in (module, eager)
        )
        assert all(a is b or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
