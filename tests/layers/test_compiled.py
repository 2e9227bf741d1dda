"""Blocks under torch.compile: one graph, eager's gradients, and no more bytes saved than fused.

Only torch's compiled graphs are looked at: what they save, and the GEMMs that they run.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lora_cases
import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from support import as_tuple, compare, gemms, needs_inductor, randn, run_ranks, saved_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import register_quantised
from fusedckpt.fusing.accuracy import Errors

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


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(D, FF, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FF, D, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A norm and an MLP with a residual, as models have them: two modules."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(D), GatedMLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Projections(nn.Module):
    """A norm with q, k and v."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        n = self.norm(x)
        return self.q(n), self.k(n), self.v(n)


def written_out() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D))


MODELS = {
    "four blocks": lambda: nn.Sequential(*[Block() for _ in range(4)]),
    "four written out": lambda: nn.Sequential(*[written_out() for _ in range(4)]),
    "norm, q, k, v": Projections,
    "linear, activation": lambda: nn.Sequential(nn.Linear(D, FF), nn.GELU()),
}


def compiled(fn: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(fn, fullgraph=True, backend=backend)


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
        errors = Errors(mine.dtype)
        errors.add(mine, theirs, true)
        assert errors.problem() is None, errors.problem()


def fused_of(make: Any, save: str) -> tuple[nn.Module, nn.Module]:
    """Return a model, and a copy that is fused."""
    model = make()
    fused = copy.deepcopy(model)
    fusedckpt.fuse(fused, save=save, verify=False)
    return model, fused


@numbers_regions
@pytest.mark.parametrize("save", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_saves_no_more_than_fused(name, save):
    eager, fused = fused_of(MODELS[name], save)
    run, x = compiled(fused), randn(T, D)
    assert_as_eager(run, fused.parameters(), eager, x)
    found, most = saved_bytes(run, [x]), saved_bytes(fused, [x])
    assert found <= 1.02 * most, (found, most)
    if name == "four blocks" and save == "inputs":
        # their inputs; torch recomputes that of one of them, by one GEMM
        assert found in (3 * 4 * T * D, 4 * 4 * T * D)


@numbers_regions
@needs_inductor
def test_saves_no_more_than_fused_by_inductor():
    eager, fused = fused_of(Projections, "inputs")
    run, x = compiled(fused, "inductor"), randn(T, D)
    assert_as_eager(run, fused.parameters(), eager, x)
    assert saved_bytes(run, [x]) <= 1.02 * saved_bytes(fused, [x])


@numbers_regions
@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_recomputes_as_many_gemms(save):
    """But for one, however many blocks there are, in place of a saved tensor."""
    _, fused = fused_of(lambda: nn.Sequential(Block(), Block()), save)
    run, x = compiled(fused), randn(T, D)

    def step(model):
        model(x).sin().sum().backward()

    step(run)
    found, most = len(gemms(lambda: step(run))), len(gemms(lambda: step(fused)))
    assert most <= found <= most + 1


@numbers_regions
@pytest.mark.parametrize("case", [c for c in CASES if "norm" in c.name], ids=lambda c: c.name)
def test_norms_save_as_much_as_fused(case):
    # weights are none of what is saved
    x, *weights = [t if t is None or t.dim() > 1 else nn.Parameter(t) for t in case.inputs((T,))]
    run = compiled(case.fused)
    assert saved_bytes(run, [x, *weights]) <= saved_bytes(case.fused, [x, *weights])


@pytest.mark.parametrize("case", lora_cases.CASES, ids=lambda case: case.name)
def test_lora(case):
    inputs, run = case.inputs((T,), D, FF), compiled(case.fused)
    compare(run, case.eager, partial(case.inputs, (T,), D, FF))
    assert saved_bytes(run, inputs) <= 1.02 * saved_bytes(case.fused, inputs)


@pytest.mark.parametrize("save", LEVELS)
@pytest.mark.parametrize("drops", [(0.3, 0.0), (0.3, 0.2)], ids=["hidden", "both"])
def test_dropout(drops, save):
    options: dict[str, Any] = dict(zip(("dropout", "output_dropout"), drops, strict=True))
    norm = fusedckpt.RMSNorm(D, dtype=torch.float64)
    block = fusedckpt.GatedMLP(
        D, FF, norm=norm, residual=True, save=save, dtype=torch.float64, **options
    )
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


class Rounded(Tensor):
    """A quantised weight that torch.compile traces."""

    @staticmethod
    def __new__(cls, rows: Tensor, scale: Tensor) -> Rounded:
        return Tensor._make_wrapper_subclass(cls, rows.shape, dtype=scale.dtype, device=rows.device)

    def __init__(self, rows: Tensor, scale: Tensor):
        self.rows, self.scale = rows, scale

    def dequantize(self) -> Tensor:
        return self.rows.to(self.scale.dtype) * self.scale[:, None]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["rows", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Rounded:
        return cls(inner["rows"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].rows, args[0].scale)
        if func is torch.ops.aten.t.default:
            return args[0].dequantize().t()
        raise NotImplementedError(func)


register_quantised(Rounded, Rounded.dequantize)


@pytest.mark.parametrize("save", LEVELS)
def test_quantised(save):
    norm = fusedckpt.RMSNorm(D)
    fused, eager = (
        fusedckpt.GatedMLP(D, FF, norm=norm, residual=True, save=save) for _ in range(2)
    )
    held = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        w = getattr(fused, name).weight.detach()
        scale = w.abs().amax(1) / 127
        weight = Rounded((w / scale[:, None]).round().to(torch.int8), scale)
        held += [weight.rows, weight.scale]
        getattr(fused, name).weight = nn.Parameter(weight, requires_grad=False)
        getattr(eager, name).weight = nn.Parameter(weight.dequantize())
    run, x = compiled(fused), randn(T, D)
    ours, theirs = (gradients(m, x, [norm.weight]) for m in (run, eager))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    # the compiled graph saves the weight's own tensors, which the module holds
    own = sum(t.nbytes for t in held)
    assert saved_bytes(run, [x]) <= 1.02 * saved_bytes(fused, [x]) + own


def test_tensor_parallel(tmp_path):
    """See compiled_ranks.py."""
    import compiled_ranks

    run_ranks(compiled_ranks.main, tmp_path)


TRANSFORMS = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum()),
    "vmap": lambda model: torch.func.vmap(lambda x: model(x)),
    "jvp": lambda model: lambda x: torch.func.jvp(model, (x,), (x.cos(),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_compile(name):
    """torch.func takes no checkpoint."""
    eager, fused = fused_of(Block, "inputs")
    x = randn(T, D, requires_grad=False)
    found, wanted = (TRANSFORMS[name](model) for model in (fused, eager))
    torch.testing.assert_close(compiled(found)(x), wanted(x))


@numbers_regions
def test_inside_a_compiled_checkpoint():
    """At "inputs" the outer checkpoint alone saves."""
    _, fused = fused_of(MODELS["four blocks"], "inputs")
    x = randn(T, D)
    run = compiled(lambda x: checkpoint(fused, x, use_reentrant=False))
    assert saved_bytes(run, [x]) == 4 * T * D


@numbers_regions
def test_a_written_norm_is_not_mistaken():
    """What was written between the norm and its readers is what they read."""

    class Written(Block):
        def forward(self, x):
            n = self.norm(x)
            n.mul_(1.5)
            return x + self.mlp(n)

    eager, fused = fused_of(Written, "inputs")
    assert_as_eager(compiled(fused), fused.parameters(), eager, randn(T, D))
