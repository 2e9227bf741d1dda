"""fuse: norms with a gate, of any class, by the formula that they compute."""

import copy

import pytest
import torch
from support import DEVICE, compare, randn, saved_bytes
from torch import nn
from torch.nn import functional as F

import fusedckpt
from fusedckpt import fuse, unfuse

N = 24


class GatedNorm(nn.Module):
    """Rounds as Mamba 2's, in groups; the gate may be missing."""

    def __init__(self, group_size=N, activation="silu"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))
        self.variance_epsilon = 1e-5
        self.group_size, self.activation = group_size, activation

    def forward(self, hidden_states, gate=None):
        dtype = hidden_states.dtype
        wide = hidden_states.float()
        if gate is not None:
            wide = wide * getattr(F, self.activation)(gate.float())
        rows = wide.unflatten(-1, (-1, self.group_size))
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * rows.flatten(-2).to(dtype)


class GatedAfter(nn.Module):
    """Rounds as Qwen3-Next's, three times."""

    def __init__(self, activation=F.silu):
        super().__init__()
        self.weight, self.eps, self.activation = nn.Parameter(torch.ones(N)), 1e-6, activation

    def forward(self, x, gate):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype) * self.activation(gate.float())).to(x.dtype)


class PlusGate(GatedAfter):
    def forward(self, x, gate):
        return super().forward(x, gate) + gate


class ResidualNorm(GatedAfter):
    """A norm of a sum, not of a product."""

    def forward(self, x, residual=None):
        x = x if residual is None else x + residual
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


FOUND = {
    "first": (GatedNorm, "norm(x * silu(gate))"),
    "groups": (lambda: GatedNorm(8), "norm(x * silu(gate)), 3 groups"),
    "gelu": (lambda: GatedNorm(activation="gelu"), "norm(x * gelu(gate))"),
    "after": (GatedAfter, "norm(x) * silu(gate)"),
    "sigmoid": (lambda: GatedAfter(torch.sigmoid), "norm(x) * sigmoid(gate)"),
}


@pytest.mark.parametrize(("make", "change"), FOUND.values(), ids=list(FOUND))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gated_norms_are_found(make, change, dtype):
    norm = make().to(DEVICE, dtype)
    eager, kind = copy.deepcopy(norm), type(norm)
    assert fuse(norm).swapped == {"": f"{kind.__name__} -> gated_rms_norm ({change})"}

    def run(module):
        return lambda x, gate, w: torch.func.functional_call(module, {"weight": w}, (x, gate))

    shapes = (2, 9, N), (2, 9, N), (N,)
    compare(run(norm), run(eager), lambda: [randn(*shape, dtype=dtype) for shape in shapes])
    inputs = [randn(2, 9, N, dtype=dtype) for _ in range(2)]
    # by name, too
    norm(inputs[0], **{[*norm._fusedckpt_names][1]: inputs[1]})
    assert not fusedckpt.layers.fallbacks.take_fallback(norm)
    saved = saved_bytes(lambda x, gate: norm(x * 1, gate * 1), inputs)
    assert saved == 2 * inputs[0].nbytes
    unfuse(norm)
    assert type(norm) is kind
    assert saved_bytes(lambda x, gate: norm(x * 1, gate * 1), inputs) >= 2 * saved


@pytest.mark.parametrize("make", [PlusGate, ResidualNorm])
def test_other_forwards_of_two_tensors_are_no_gated_norms(make):
    norm = make().to(DEVICE)
    x, gate = randn(2, 3, N), randn(2, 3, N)
    expected = norm(x, gate)
    assert "gated" not in str(fuse(norm).swapped)
    assert torch.equal(norm(x, gate), expected)


def test_without_a_gate_or_with_another_dtype_its_own_forward_runs():
    norm = GatedNorm().to(DEVICE)
    eager = copy.deepcopy(norm)
    fuse(norm)
    x = randn(2, 3, N)
    assert torch.equal(norm(x), eager(x))
    norm.group_size = eager.group_size = 12
    assert torch.equal(norm(x, x), eager(x, x))
    assert fusedckpt.layers.fallbacks.take_fallback(norm).key == "changed"


class Scan(torch.autograd.Function):
    """A scan that saves its inputs only, as kernels of fla do."""

    @staticmethod
    def forward(ctx, x, decay):
        ctx.save_for_backward(x, decay)
        return (x * decay).cumsum(1)

    @staticmethod
    def backward(ctx, dy):
        x, decay = ctx.saved_tensors
        sums = dy.flip(1).cumsum(1).flip(1)
        return sums * decay, (sums * x).sum((0, 1))


class NormedMixer(nn.Module):
    """A mixer whose scan `fuse` does not know, so that it is not recomputed as a whole."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(N, 2 * N), nn.Linear(N, N)
        self.decay, self.norm = nn.Parameter(torch.rand(N)), GatedNorm(8)

    def forward(self, x):
        y, gate = self.first(x).chunk(2, -1)
        return self.last(self.norm(Scan.apply(y, self.decay), gate))


def test_a_mixer_that_is_not_recomputed_saves_its_gated_norms_inputs():
    mixer = NormedMixer().to(DEVICE)
    eager = copy.deepcopy(mixer)
    report = fuse(mixer)
    assert "norm" in report.swapped
    x = randn(2, 8, N)
    token = 2 * 8 * 4 * N
    # the input; gate and y, halves of one tensor; the scan's result; the last linear's input
    assert saved_bytes(mixer, [x]) == token * (1 + 2 + 1 + 1)
    assert saved_bytes(eager, [x]) >= token * (1 + 2 + 1 + 1 + 3)
    grads = [
        torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
        for module in (mixer, eager)
    ]
    torch.testing.assert_close(*grads)
