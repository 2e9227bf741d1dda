"""Gradients in float32: added to `.grad` by the GEMM, and seen by all that reads gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support import DEVICE, randn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from zoo import SwiGLU

import fusedckpt
from fusedckpt import accumulate_in_fp32
from fusedckpt.allocations import profiled
from fusedckpt.autograd import accumulation
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.functional import experts, linear_cross_entropy
from fusedckpt.memory import peak_bytes

BF16 = torch.bfloat16
ROWS, DIM, HIDDEN = 6, 32, 48


@pytest.fixture(autouse=True)
def unused_after(monkeypatch):
    """Let backwards of other tests look for no marks."""
    monkeypatch.setattr(accumulation, "is_used", False)


def ones(value: float, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full((1, 1), value, dtype=dtype, device=DEVICE)


def scalar(**options) -> fusedckpt.Linear:
    layer = fusedckpt.Linear(1, 1, bias=False, device=DEVICE, dtype=BF16, **options)
    accumulate_in_fp32(layer)
    return layer


def test_256_and_1_are_257():
    layer = scalar()
    for value in (256.0, 1.0):
        layer(ones(value)).backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.item() == 257


class HeadLoss(nn.Linear):
    def forward(self, x):
        target = torch.arange(len(x), device=x.device)
        return linear_cross_entropy(x, self.weight, target, self.bias, chunks=2, reduction="sum")


class FixedRoutes(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 2 * f, d) / d**0.5)
        self.down = nn.Parameter(torch.randn(3, d, f) / f**0.5)

    def forward(self, x):
        index = torch.arange(2 * len(x), device=x.device).view(-1, 2) % 3
        return experts(x, index, torch.ones_like(index, dtype=x.dtype), self.gate_up, self.down)


class LoraSiLU(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.base = nn.Linear(d, f, bias=False).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, d))
        self.b = nn.Parameter(torch.randn(f, 4))

    def forward(self, x):
        weight = fusedckpt.LoRA(self.base.weight, self.a, self.b, 0.5)
        return fusedckpt.functional.linear_act(x, weight, activation="silu")


def gated(d: int, f: int, **options) -> nn.Module:
    return fusedckpt.GatedMLP(d, f, norm=nn.RMSNorm(d), residual=True, **options)


LAYERS = {
    "linear": lambda d, f: fusedckpt.Linear(d, f, activation="gelu"),
    "mlp": lambda d, f: fusedckpt.MLP(d, f, norm=nn.LayerNorm(d), residual=True),
    "gated_mlp": lambda d, f: gated(d, f, bias=True),
    "chunks": lambda d, f: gated(d, f, chunks=2),
    "preact": lambda d, f: gated(d, f, save="preact"),
    "norm_linear": lambda d, f: fusedckpt.NormLinear(
        nn.RMSNorm(d), nn.Linear(d, d), nn.Linear(d, f, bias=False)
    ),
    "rms_norm": lambda d, f: fusedckpt.RMSNorm(d),
    "layer_norm": lambda d, f: fusedckpt.LayerNorm(d),
    "norm of two dimensions": lambda d, f: fusedckpt.LayerNorm((ROWS, d)),
    "head": lambda d, f: HeadLoss(d, f),
    "experts": FixedRoutes,
    "lora": LoraSiLU,
}


def made(name: str, d: int = DIM, f: int = HIDDEN) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name](d, f).to(DEVICE, BF16)


def loss_of(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    parts = y if isinstance(y, tuple) else (y,)
    return torch.stack([part.float().square().sum() for part in parts]).sum()


def backward(layer: nn.Module, x: Tensor) -> None:
    loss_of(layer, x).backward()


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", LAYERS)
def test_sums_are_added_in_place_and_never_rounded(name, path):
    layer = made(name)
    accumulate_in_fp32(layer)
    shape = (2, ROWS, DIM) if name == "norm of two dimensions" else (ROWS, DIM)
    batches = [randn(*shape, dtype=BF16, requires_grad=False) for _ in range(3)]
    expected = dict[str, Tensor]()
    for x in batches:
        layer.zero_grad()
        backward(layer, x)
        for key, grad in gradients(layer).items():
            # at least one element has more than the eight bits of bfloat16
            assert not torch.equal(grad, grad.to(BF16).float()), key
            expected[key] = expected.get(key, 0) + grad.double()
    layer.zero_grad(set_to_none=False)
    places = {key: (grad, grad.data_ptr(), grad._version) for key, grad in gradients(layer).items()}
    for x in batches:
        backward(layer, x)
    assert places
    for key, (grad, address, version) in places.items():
        assert layer.get_parameter(key).grad is grad
        assert grad.data_ptr() == address
        assert grad._version > version
        error = (grad.double() - expected[key]).norm()
        assert error <= 8 * torch.finfo(torch.float32).eps * expected[key].norm().clamp(min=1)


WEIGHTS = ("linear", "mlp", "gated_mlp", "chunks", "preact", "norm_linear", "head", "experts")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the allocator rounds sizes")
@pytest.mark.parametrize("name", WEIGHTS)
def test_backward_allocates_nothing_of_a_weights_size(name):
    layer = made(name, 256, 256)
    accumulate_in_fp32(layer)
    x = randn(2, 256, dtype=BF16)

    def large_blocks() -> int:
        changes = profiled(loss_of(layer, x).backward).changes
        return sum(change.nbytes >= 2 * 256 * 256 for change in changes)

    with forced_path("aten"):
        backward(layer, x)
        in_place = large_blocks()
        # autograd adds what the layer returns
        handles = [p.register_hook(lambda grad: None) for p in layer.parameters()]
        returned = large_blocks()
        for handle in handles:
            handle.remove()
        layer.requires_grad_(False)
        # a GEMM may copy its operands
        of_dx = large_blocks()
    assert in_place == of_dx
    assert returned > of_dx


class TiedPair(nn.Module):
    """A weight that two layers read, and an embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(HIDDEN, DIM)
        self.head = HeadLoss(DIM, HIDDEN, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(torch.arange(len(x), device=x.device)) + x) + self.head(x)


def peak_of_accumulation(mlp: nn.Module, x: Tensor) -> int:
    """Return the peak of a step that finds gradients."""
    for _ in range(2):
        peak = peak_bytes(lambda: mlp(x).square().sum().backward(), DEVICE)
    return peak


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the allocator rounds sizes")
@pytest.mark.parametrize("rows", [3, 7, DIM // 2, DIM // 2 + 1])
@pytest.mark.parametrize("is_gated", [False, True])
def test_peak_of_an_mlp_of_few_tokens(is_gated, rows):
    """Weights are larger than hidden layers: their gradients are made one after the other."""
    eager = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
    eager = SwiGLU(DIM, HIDDEN, bias=True) if is_gated else eager
    fused = copy.deepcopy(eager)
    fusedckpt.fuse(fused)
    x = randn(rows, DIM, requires_grad=False)
    limit = peak_of_accumulation(eager, x)
    assert peak_of_accumulation(fused, x) <= limit
    accumulate_in_fp32(fused)
    assert peak_of_accumulation(fused, x) <= limit


def test_a_tied_weight_gets_all_its_gradients():
    torch.manual_seed(0)
    layer = TiedPair().to(DEVICE, BF16)
    truth = copy.deepcopy(layer).double()
    truth.head.forward = lambda x: F.cross_entropy(
        F.linear(x, truth.head.weight), torch.arange(len(x), device=DEVICE), reduction="sum"
    )
    accumulate_in_fp32(layer)
    for _ in range(2):
        x = randn(ROWS, DIM, dtype=BF16, requires_grad=False)
        layer(x).backward()
        truth(x.double()).backward()
    error = (layer.embed.weight.grad - truth.embed.weight.grad).norm()
    assert error < 0.01 * truth.embed.weight.grad.norm()


def seen(layer: nn.Module, value: float = 1.0, **options) -> float:
    """Run a backward, and return the weight's gradient."""
    layer(ones(value)).backward(**options)
    return layer.weight.grad.item()


def test_hooks_run_once_and_see_what_they_saw_before():
    layer = scalar()
    totals = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: totals.append(p.grad.item()))
    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    nodes = []
    node.register_hook(lambda *_: nodes.append(1))
    assert seen(layer, 256) == 256
    assert seen(layer) == 257
    assert totals == [256, 257]
    assert len(nodes) == 2
    # a hook that changes the gradient of a micro-batch, not their sum
    handle = layer.weight.register_hook(lambda grad: 2 * grad)
    assert seen(layer) == 259
    handle.remove()
    assert seen(layer) == 260
    # an optimizer in backward
    layer.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    layer(ones(7)).backward()
    assert layer.weight.grad is None
    assert totals == [256, 257, 259, 260, 267]


def test_gradients_that_are_asked_for_are_returned():
    layer = scalar()
    seen(layer, 256)
    x = ones(1).requires_grad_()
    y = layer(x)
    (dw,) = torch.autograd.grad(y, layer.weight, retain_graph=True)
    assert (dw.dtype, dw.item()) == (torch.float32, 1)
    y.backward(inputs=[x], retain_graph=True)
    assert layer.weight.grad.item() == 256
    y.backward(retain_graph=True)
    y.backward(create_graph=True)
    assert layer.weight.grad.item() == 258


@pytest.mark.parametrize("watch", ["flops", "profile", "checkpoint", "compile"])
def test_watched_backwards_add_in_float32(watch):
    layer = scalar()
    call = layer
    if watch == "checkpoint":
        call = lambda x: fusedckpt.checkpoint(layer, x)  # noqa: E731
    if watch == "compile":
        call = torch.compile(layer, backend="aot_eager")
    for value in (256.0, 1.0):
        y = call(ones(value))
        if watch == "flops":
            with FlopCounterMode(display=False) as counter:
                y.backward()
            assert counter.get_total_flops() == 2
        elif watch == "profile":
            with torch.profiler.profile():
                y.backward()
        else:
            y.backward()
    assert layer.weight.grad.item() == 257


def test_gradients_of_another_layout_are_left_to_autograd():
    layer = fusedckpt.Linear(2, 2, bias=False, device=DEVICE, dtype=BF16)
    accumulate_in_fp32(layer)
    layer.weight.grad = torch.full((2, 2), 256.0, device=DEVICE).t()
    layer(torch.ones(1, 2, dtype=BF16, device=DEVICE)).sum().backward()
    assert layer.weight.grad.eq(257).all()


def test_clipping_scaling_and_steps():
    """What a loop calls between two steps."""
    layer = fusedckpt.MLP(DIM, HIDDEN, device=DEVICE, dtype=torch.float16)
    truth = copy.deepcopy(layer).float()
    accumulate_in_fp32(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
    x = randn(ROWS, DIM, dtype=torch.float16, requires_grad=False)
    for _ in range(2):
        scaler.scale(layer(x).float().square().mean() / 2).backward()
        (truth(x.float()).square().mean() / 2).backward()
    # of float16 gradients it refuses this
    scaler.unscale_(optimizer)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (layer, truth)]
    torch.testing.assert_close(*norms, rtol=0.01, atol=0)
    before = layer.fc1.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(layer.fc1.weight, before)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad.dtype == torch.float32 and not p.grad.any() for p in layer.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in layer.parameters())


def test_adamw_steps_copies_in_float32():
    """As the code of the page does."""
    page = (Path(__file__).parents[2] / "fusedckpt/layers/README.md").read_text(encoding="utf-8")
    code = page.partition("## Gradients in float32")[2].partition("```python\n")[2]
    layer = scalar()
    with torch.no_grad():
        layer.weight.fill_(256)
    steps = [[ones(256.0), ones(1.0)]] * 4
    names = {"fusedckpt": fusedckpt, "torch": torch, "model": layer, "steps": steps}
    exec(code.partition("```")[0], {**names, "loss": lambda y: y.sum()}, names)
    # four steps, each of which bfloat16 rounds to nothing
    assert 255.98 < names["copies"][0].item() < 255.99
    assert layer.weight.item() == 256
    assert layer.weight.grad is None


def test_disabled_again_gradients_have_the_parameters_dtype():
    layer = scalar()
    seen(layer, 256)
    accumulate_in_fp32(layer, enabled=False)
    assert seen(layer) == 256
    assert layer.weight.grad.dtype == BF16


def test_reports_and_plans_leave_gradients_as_they_are():
    model = nn.Sequential(*[made("gated_mlp") for _ in range(2)])
    accumulate_in_fp32(model)
    x = randn(ROWS, DIM, dtype=BF16, requires_grad=False)
    backward(model, x)
    before = {key: (grad, grad.clone()) for key, grad in gradients(model).items()}
    report = fusedckpt.report(model, x)
    assert report.gradient_bytes == 4 * sum(p.numel() for p in model.parameters())
    fusedckpt.plan(model, x, budget="1GiB")
    for key, grad in gradients(model).items():
        assert grad is before[key][0]
        assert torch.equal(grad, before[key][1])


def test_refused_arguments():
    with pytest.raises(TypeError, match="must be a Module, got Parameter"):
        accumulate_in_fp32(nn.Parameter(torch.ones(1)))
