"""Blocks under torch.compile: one graph, eager's gradients, and no more bytes saved than fused.

Only torch's compiled graphs are looked at: what they save, and the GEMMs that they run.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from adapted_cases import LORA
from cases import CASES
from quantized_weight import Int8Rows, quantize
from support import (
    DEVICE,
    as_tuple,
    assert_near,
    compare,
    gemms,
    leaves_of,
    randn,
    saved_bytes,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import MLPBlock, SwiGLU

import fusedckpt
from fusedckpt import register_quantized

T, D, FF = 48, 16, 48
LEVELS = ("inputs", "gate", "preact")
# a CPU's generator, which torch.compile saves for each dropout; fused layers save a seed
STATE = 5056

pytestmark = pytest.mark.usefixtures("fresh", "on_aten")
# torch 2.11 gives the regions of a compiled graph numbers by other means
numbers_regions = pytest.mark.skipif(torch.__version__ < "2.13", reason="saves a norm's result")


@pytest.fixture
def fresh():
    torch._dynamo.reset()


def block(kind=MLPBlock):
    """A norm and an MLP with a residual, as models have them: two modules."""
    return kind(nn.RMSNorm(D), SwiGLU(D, FF))


class Projections(nn.Module):
    """A norm with q, k and v."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        n = self.norm(x)
        return self.q(n), self.k(n), self.v(n)


MODELS = {
    "blocks": lambda: nn.Sequential(*[block() for _ in range(3)]),
    "written out": lambda: nn.Sequential(
        nn.LayerNorm(D), nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D)
    ),
    "norm, q, k, v": Projections,
    "linear, activation": lambda: nn.Sequential(nn.Linear(D, FF), nn.GELU()),
}


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def gradients(model: Any, x: Tensor, weights: Any) -> list[Tensor]:
    """Return the gradients of x and of the weights."""
    x = x.detach().requires_grad_()
    total = torch.stack([y.sin().sum() for y in as_tuple(model(x))]).sum()
    return list(torch.autograd.grad(total, [x, *weights]))


def assert_as_eager(ours: Any, weights: Any, eager: nn.Module, x: Tensor) -> None:
    """Assert gradients by the error rule."""
    truth = copy.deepcopy(eager).double()
    columns = zip(
        gradients(ours, x, weights),
        gradients(eager, x, eager.parameters()),
        gradients(truth, x.double(), truth.parameters()),
        strict=True,
    )
    for mine, theirs, true in columns:
        assert_near(mine, theirs, true)


def fused_of(make: Any, save: str) -> tuple[nn.Module, nn.Module]:
    """Return a model, and a copy that is fused."""
    model = make().to(DEVICE)
    fused = copy.deepcopy(model)
    fusedckpt.fuse(fused, save=save, verify=False)
    return model, fused


@numbers_regions
@pytest.mark.parametrize(
    ("name", "save"),
    [
        *(("blocks", save) for save in LEVELS),
        ("written out", "inputs"),
        ("linear, activation", "preact"),
        ("norm, q, k, v", "inputs"),
    ],
)
def test_saves_no_more_than_fused(name, save):
    """And recomputes as many GEMMs but for one, however many blocks there are."""
    eager, fused = fused_of(MODELS[name], save)
    run, x = compiled(fused), randn(T, D)
    assert_as_eager(run, fused.parameters(), eager, x)
    found, most = saved_bytes(run, [x]), saved_bytes(fused, [x])
    assert found <= 1.02 * most, (found, most)
    if name == "blocks" and save == "inputs":
        # their inputs; torch recomputes that of one of them, by one GEMM
        assert found in (2 * 4 * T * D, 3 * 4 * T * D)
    if name == "blocks":
        found, most = (len(gemms(lambda m=m: m(x).sin().sum().backward())) for m in (run, fused))
        assert most <= found <= most + 1


# each function at each level, and each kind of norm and gate, once
COMPILED = {
    *("linear_act-gelu-preact", "linear_act-identity", "rms_norm-llama", "layer_norm-plain"),
    *("add_rms_norm-torch", "norm_linear-layer-bias", "mlp-layer", "mlp-rms-chunks"),
    *("gated_mlp-rms-bias", "gated_mlp-gate-rms", "gated_mlp-preact-layer-chunks"),
    *("gated_mlp-packed-preact-chunks", "linear_cross_entropy-bias", "token_logprobs-plain"),
    "token_logprobs-ids",
    *("experts-bias-preact", "lora-experts-preact-two-adapters"),
    *("lora-norm_linear", "lora-mlp-one-adapted-chunks"),
}


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_functions(name):
    """Every function is one graph, for any number of rows or for one."""
    (case,) = (case for case in [*CASES, *LORA] if case.name == name)
    dynamic = sorted(COMPILED).index(name) % 2 == 0

    def inputs():
        # weights are none of what is saved; of one kind throughout, for one compilation
        drawn = case.inputs((T,), D, FF)
        return [t if t is None or t.dim() > 1 else nn.Parameter(t) for t in drawn]

    run = torch.compile(case.fused, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    compare(run, case.eager, inputs)
    if case in LORA or ("norm" in case.name and torch.__version__ >= "2.13"):
        leaves = inputs()
        assert saved_bytes(run, leaves) <= 1.02 * saved_bytes(case.fused, leaves)


@pytest.mark.parametrize("name", ["add_layer_norm-affine", "gated_mlp-preact-layer-chunks"])
def test_compiled_autograd(name):
    (case,) = (case for case in CASES if case.name == name)
    inputs = case.inputs((3,), 4, 5, torch.float64)

    def total():
        return sum(y.sin().sum() for y in as_tuple(case.fused(*inputs)))

    expected = torch.autograd.grad(total(), leaves_of(inputs))
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    # all gradients, and some
    for wanted in (leaves_of(inputs), leaves_of(inputs)[:2]):
        with torch._dynamo.compiled_autograd._enable(compiler):
            found = torch.autograd.grad(total(), wanted)
        torch.testing.assert_close(list(found), list(expected[: len(wanted)]))


@pytest.mark.parametrize(
    ("drops", "save"), [((0.3, 0.0), "preact"), ((0.3, 0.2), "inputs"), ((0.3, 0.2), "gate")]
)
def test_dropout(drops, save):
    options: dict[str, Any] = dict(zip(("dropout", "output_dropout"), drops, strict=True))
    norm = fusedckpt.RMSNorm(D, dtype=torch.float64)
    block = fusedckpt.GatedMLP(
        D, FF, norm=norm, residual=True, save=save, dtype=torch.float64, **options
    ).to(DEVICE)
    run, x = compiled(block), randn(T, D, dtype=torch.float64)
    count = sum(p > 0 for p in drops)
    assert saved_bytes(run, [x]) <= 1.02 * saved_bytes(block, [x]) + count * STATE

    def total(x):
        torch.manual_seed(3)
        return run(x).sin().sum()

    # backward recomputes what the same draws dropped
    (dx,) = torch.autograd.grad(total(x), x)
    toward, step = torch.randn_like(x), 1e-5
    ends = [total((x + sign * step * toward).detach().requires_grad_()) for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close((dx * toward).sum(), slope, rtol=1e-6, atol=1e-6)


class Rounded(Int8Rows):
    """A quantized weight that torch.compile traces: nothing is counted."""

    def dequantize(self) -> Tensor:
        return self.int_data.to(self.scale.dtype) * self.scale[:, None]


register_quantized(Rounded, Rounded.dequantize)


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_quantized(save):
    norm = fusedckpt.RMSNorm(D)
    fused, eager = (
        fusedckpt.GatedMLP(D, FF, norm=norm, residual=True, save=save).to(DEVICE) for _ in range(2)
    )
    held = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        w = quantize(getattr(fused, name).weight)
        weight = Rounded(w.int_data, w.scale)
        held += [weight.int_data, weight.scale]
        getattr(fused, name).weight = nn.Parameter(weight, requires_grad=False)
        getattr(eager, name).weight = nn.Parameter(weight.dequantize())
    run, x = compiled(fused), randn(T, D)
    ours, theirs = (gradients(m, x, [norm.weight]) for m in (run, eager))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    # the compiled graph saves the weight's own tensors, which the module holds
    own = sum(t.nbytes for t in held)
    assert saved_bytes(run, [x]) <= 1.02 * saved_bytes(fused, [x]) + own


TRANSFORMS = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum()),
    "vmap": lambda model: torch.func.vmap(lambda x: model(x)),
    "jvp": lambda model: lambda x: torch.func.jvp(model, (x,), (x.cos(),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_compile(name):
    """torch.func takes no checkpoint."""
    if name == "jvp" and DEVICE.type == "cuda":
        pytest.skip("torch compiles no jvp of its norms on CUDA")
    eager, fused = fused_of(block, "inputs")
    x = randn(T, D, requires_grad=False)
    found, wanted = (TRANSFORMS[name](model) for model in (fused, eager))
    torch.testing.assert_close(compiled(found)(x), wanted(x))


@numbers_regions
def test_inside_a_compiled_checkpoint():
    """At "inputs" the outer checkpoint alone saves."""
    _, fused = fused_of(MODELS["blocks"], "inputs")
    x = randn(T, D)
    run = compiled(lambda x: checkpoint(fused, x, use_reentrant=False))
    assert saved_bytes(run, [x]) == 4 * T * D


@numbers_regions
def test_a_written_norm_is_not_mistaken():
    """What was written between the norm and its readers is what they read."""

    class WrittenNorm(MLPBlock):
        def forward(self, x):
            n = self.norm(x)
            n.mul_(1.5)
            return x + self.mlp(n)

    eager, fused = fused_of(lambda: block(WrittenNorm), "inputs")
    assert_as_eager(compiled(fused), fused.parameters(), eager, randn(T, D))
