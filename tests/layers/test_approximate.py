"""Approximate derivatives in layers: bytes exactly, four-step gradients, refusals."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from own_classes import SwiGLU
from support import DEVICE, compare, flops, randn, saved_bytes
from torch import nn
from torch.utils import checkpoint as stock

import fusedckpt
from fusedckpt import LoRA, NormSpec
from fusedckpt.functional import linear_act, mlp, regelu2, resilu2
from fusedckpt.kernels.codes import APPROXIMATE

EXACT = {"gelu": F.gelu, "silu": F.silu}
OURS = {"gelu": regelu2, "silu": resilu2}
each = pytest.mark.parametrize("name", EXACT)
T, D, H = 24, 16, 42
CODES = T * math.ceil(H / 4)


def four_steps(name):
    """Return the activation whose gradient is dy times the slope of x."""

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return EXACT[name](x)

        @staticmethod
        def backward(ctx, dy):
            boundaries, slopes = (dy.new_tensor(t, dtype=dy.dtype) for t in APPROXIMATE[name])
            return dy * slopes[(ctx.saved_tensors[0][..., None] > boundaries).sum(-1)]

    return Reference.apply


def weight(*shape, requires_grad=False):
    return nn.Parameter(randn(*shape).detach() / 4, requires_grad=requires_grad)


@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (2, 3, 64), (4, 0), (0, 3)])
@each
def test_function_saves_two_bits_an_element(name, shape, path):
    x = randn(shape)
    rows, n = math.prod(shape[:-1]), shape[-1] if shape else 1
    assert saved_bytes(OURS[name], [x]) == rows * math.ceil(n / 4)
    compare(OURS[name], four_steps(name), lambda: [randn(shape)])
    y = OURS[name](x.detach())
    assert y.shape == x.shape
    assert not y.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_function_in_other_dtypes(dtype, path):
    z = torch.randn(9, 65, dtype=dtype, device=DEVICE).t().requires_grad_()
    # products of eager half precision are rounded as ours: from float32, once
    assert saved_bytes(regelu2, [z]) == 65 * 3
    grads = [torch.autograd.grad(fn(z).sum(), z)[0] for fn in (regelu2, four_steps("gelu"))]
    torch.testing.assert_close(*grads, rtol=torch.finfo(dtype).eps, atol=0)


# wanted gradients of x, fc1, fc2, A of fc1, A of fc2: bytes per call besides parameters
MASKS = {
    "frozen": ("x", CODES),
    "first": ("x w1", 4 * T * D + CODES),
    "bias": ("x b1", CODES),
    "lora first": ("x a1", 4 * T * D + CODES),
    # the hidden layer is read: z in place of codes, and exact
    "last": ("x w2", 4 * T * H),
    "lora last": ("x a2", 4 * T * H),
    "all": ("x w1 b1 w2 a1 a2", 4 * T * (D + H)),
    "last alone": ("w2", 4 * T * H),
}


def operands(wanted):
    shapes = {"x": (T, D), "w1": (H, D), "b1": (H,), "w2": (D, H), "a1": (3, D), "a2": (3, H)}
    found = {k: weight(*shape, requires_grad=k in wanted.split()) for k, shape in shapes.items()}
    return {**found, "x": randn(T, D, requires_grad="x" in wanted.split())}


def run(x, w1, b1, w2, a1, a2, *, b, act=None, **options):
    """Run an MLP with adapters; act: in torch's own ops, with this activation."""
    (up, down), scale = b, 0.5
    if act is None:
        return mlp(x, LoRA(w1, a1, up, scale), b1, LoRA(w2, a2, down, scale), None, **options)
    h = act(F.linear(x, w1, b1) + scale * F.linear(F.linear(x, a1), up))
    return F.linear(h, w2) + scale * F.linear(F.linear(h, a2), down)


@pytest.mark.parametrize("mask", MASKS)
def test_mlp_saves_codes_where_nothing_reads_the_hidden_layer(mask):
    wanted, nbytes = MASKS[mask]
    chunks = 3 if mask in ("lora first", "all") else 1
    b = weight(H, 3), weight(D, 3)
    options = {"b": b, "save": "preact", "approximate": True, "chunks": chunks}
    given = operands(wanted)
    assert saved_bytes(lambda *a: run(*a, **options), list(given.values())) == nbytes
    act = F.gelu if "w2" in wanted or "a2" in wanted else four_steps("gelu")

    def eager(*a):
        return run(*a, b=[t.to(a[0].dtype) for t in b], act=act)

    compare(lambda *a: run(*a, **options), eager, lambda: list(operands(wanted).values()))


@each
def test_linear_act_and_norm(name, path):
    w1, w2, bias = weight(H, D), weight(D, H), weight(H, requires_grad=True)
    options = {"save": "preact", "approximate": True}
    norm = NormSpec("layer", weight(D), weight(D))

    def ours(x):
        y = linear_act(x, w1, bias, name, **options)
        return mlp(x, w1, bias, w2, None, name, norm=norm, residual=True, **options), y

    def eager(x):
        cast = [None if t is None else t.to(x.dtype) for t in (w1, bias, w2, *norm[1:3])]
        n = F.layer_norm(x, (D,), cast[3], cast[4])
        y = four_steps(name)(F.linear(x, *cast[:2]))
        return x + F.linear(four_steps(name)(F.linear(n, *cast[:2])), cast[2]), y

    compare(ours, eager, lambda: [randn(2, 12, D)])
    # x of the norm, and two codes
    assert saved_bytes(ours, [randn(T, D)]) == 4 * T * D + 2 * CODES
    # no GEMM is run again
    x = randn(T, D)
    assert flops(lambda: sum(y.sum() for y in ours(x)).backward()) == 2 * T * D * H * 6


def block(**options):
    return fusedckpt.MLP(D, H, norm=nn.LayerNorm(D), residual=True, **options).to(DEVICE)


def test_module_is_the_function():
    model = block(save="preact", approximate=True).requires_grad_(False)
    assert "approximate=True" in repr(model)
    assert saved_bytes(model, [randn(T, D)]) == 4 * T * D + CODES
    assert saved_bytes(copy.deepcopy(model), [randn(T, D)]) == 4 * T * D + CODES
    one = fusedckpt.Linear(D, H, activation="silu", save="preact", approximate=True).to(DEVICE)
    assert saved_bytes(one.requires_grad_(False), [randn(T, D)]) == CODES
    for module, exact in ((fusedckpt.ReGELU2(), F.gelu), (fusedckpt.ReSiLU2(), F.silu)):
        x = randn(T, H)
        assert saved_bytes(module, [x]) == CODES
        torch.testing.assert_close(module(x), exact(x))
    # at another level nothing is approximate
    with fusedckpt.saving("inputs"):
        assert saved_bytes(model, [randn(T, D)]) == 4 * T * D


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["ours", "stock", "reentrant"])
def test_inside_checkpoints(reentrant):
    model = nn.Sequential(block(save="preact", approximate=True), fusedckpt.ReGELU2())
    model.to(DEVICE).requires_grad_(False)
    x, dy = randn(T, D), torch.randn(T, D, device=DEVICE)
    want = torch.autograd.grad(model(x), x, dy)[0]
    if reentrant is None:
        y = fusedckpt.checkpoint(model, x)
    else:
        y = stock.checkpoint(model, x, use_reentrant=reentrant)
    y.backward(dy)
    assert torch.equal(x.grad, want)


def test_other_ways_to_call():
    x = randn(T, H)
    with pytest.raises(RuntimeError, match="create_graph=True needs a derivative"):
        torch.autograd.grad(regelu2(x).sum(), x, create_graph=True)
    y = regelu2(x)
    batch = torch.randn(2, T, H, device=DEVICE)
    found = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)[0]
    for dy, grad in zip(batch, found, strict=True):
        assert torch.equal(torch.autograd.grad(y, x, dy, retain_graph=True)[0], grad)
    # transforms take the exact activation
    exact = torch.func.grad(lambda x: F.gelu(x).sum())(x)
    assert torch.equal(torch.func.grad(lambda x: regelu2(x).sum())(x), exact)


REFUSED = {
    "activation": ({"activation": "relu"}, ValueError, "activation must be one of gelu, silu"),
    "level": ({"save": "inputs"}, ValueError, "approximate=True needs save='preact'"),
    "default level": ({"save": None}, ValueError, "approximate=True needs save='preact'"),
    "kernel": ({"kernel": "hybrid"}, ValueError, "kernel must be one of split"),
    "flag": ({"approximate": "yes"}, TypeError, "approximate must be True or False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    options, error, message = REFUSED[case]
    options = {"save": "preact", "approximate": True} | options
    with pytest.raises(error, match=f"mlp: {message}"):
        mlp(randn(T, D), weight(H, D), None, weight(D, H), None, **options)
    if case not in ("default level", "kernel"):
        with pytest.raises(error, match=f"MLP: {message}"):
            fusedckpt.MLP(D, H, **options)
    with pytest.raises(TypeError, match="regelu2: x must be a tensor, got list"):
        regelu2([1.0])
    with pytest.raises(TypeError, match="resilu2: x must be floating point, got"):
        resilu2(torch.ones(3, dtype=torch.int64))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def test_fuse_makes_mlps_approximate_when_asked():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
    exact = nn.Sequential(nn.LayerNorm(D), Plain(), SwiGLU(D, H), inner)
    exact = exact.to(DEVICE).requires_grad_(False)
    coded, x = copy.deepcopy(exact), randn(T, D)
    fusedckpt.fuse(exact)
    report = fusedckpt.fuse(coded, approximate=True)
    assert report.swapped["1"] == "Plain -> mlp (gelu), approximate"
    assert report.swapped["2"] == "SwiGLU -> gated_mlp (silu)"
    assert report.swapped["3.0"] == "nn.Linear + gelu + nn.Linear -> mlp, approximate"
    assert all("approximate=True" in repr(coded[i]) for i in (1, 3))
    assert saved_bytes(coded[1], [x]) == saved_bytes(coded[3], [x]) == CODES
    assert saved_bytes(exact[1], [x]) == saved_bytes(coded[2], [x]) == 4 * T * D
    torch.testing.assert_close(coded(x), exact(x))
    with fusedckpt.saving("inputs"):
        assert saved_bytes(coded[1], [x]) == saved_bytes(coded[3], [x]) == 4 * T * D
    kept = [
        fusedckpt.plan(model, x.requires_grad_(), policy="none", progress=False).chain.units
        for model in (exact, coded)
    ]
    both = [{unit.name: unit.levels[0].kept for unit in units} for units in kept]
    for name in ("1", "3"):
        assert both[0][name] - both[1][name] == 4 * T * H - CODES
    with pytest.raises(TypeError, match="fuse: approximate must be True or False"):
        fusedckpt.fuse(coded, approximate="yes")  # type: ignore[arg-type]
