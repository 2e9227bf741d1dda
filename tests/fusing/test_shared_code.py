"""An MLP written inside a layer saves the first linear's input, whatever made that."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, calls, gemms, peak_of_step, randn, saved_bytes
from torch import nn
from torch.utils.checkpoint import CheckpointError
from zoo import Doubled, LlamaRMSNorm, LoraLinear

from fusedckpt import fuse, unfuse
from fusedckpt.layers.notes import NO_NOTES, notes_of, set_notes
from fusedckpt.memory import saved_tensors

T, D, WIDE = 6, 8, 32
# bytes of a tensor of D values for each of T tokens in float64
ROWS = 8 * T * D


class InlineBlock(nn.Module):
    """A residual block whose MLP is written in its forward, behind a gate, which is no norm."""

    def __init__(self, between: Any, bias: bool = True):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.fc1, self.fc2 = nn.Linear(D, WIDE, bias), nn.Linear(WIDE, D, bias)
        self.gate, self.act, self.drop = nn.Linear(D, WIDE, bias), nn.GELU(), nn.Dropout(0.0)
        self.between = between

    def read(self, x):
        return x.sigmoid() * self.scale

    def forward(self, x):
        y = self.read(x)
        return x + self.fc2(self.between(self, y))


def own_gelu(z):
    return z * 0.5 * (1 + torch.erf(z / 2**0.5))


BETWEEN = {
    "module": lambda m, y: m.act(m.fc1(y)),
    "function": lambda m, y: F.gelu(m.fc1(y)),
    "dropout": lambda m, y: m.drop(m.act(m.fc1(y))),
    "function and dropout": lambda m, y: m.drop(F.silu(m.fc1(y))),
    "gate": lambda m, y: F.silu(m.gate(y)) * m.fc1(y),
    "module's gate": lambda m, y: m.act(m.gate(y)) * m.fc1(y),
    "square": lambda m, y: F.relu(m.fc1(y)).square(),
    "written out": lambda m, y: own_gelu(m.fc1(y)),
    "in place": lambda m, y: m.fc1(y).relu_(),
    "transposed": lambda m, y: F.gelu(m.fc1(y.transpose(0, 1))).transpose(0, 1),
}


def pair(between: Any, bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager: Any = InlineBlock(between, bias).to(DEVICE, dtype)
    fused = copy.deepcopy(eager)
    # else the whole block runs again, as one without attention may
    report = fuse(fused, mlp=False, attention=False)
    assert report.left == {}
    return eager, fused


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    y = model(x)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)]


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
def test_no_wide_tensor_is_saved(name, bias):
    eager, fused = pair(BETWEEN[name], bias)
    x = randn(2, T // 2, D, dtype=torch.float64)
    # twice: the first call of a layer shows whether its code reads a linear's result
    for _ in range(2):
        assert_same(results(fused, x), results(eager, x))
    # sigmoid's result, and the gate's, which fc1 reads
    assert saved_bytes(fused, [x]) <= 3 * ROWS < saved_bytes(eager, [x]) * 0.6
    # one GEMM for each wide linear, for two readers each
    wide = 2 if "gate" in name else 1
    num_gemms = [len(gemms(lambda model=model: results(model, x))) for model in (eager, fused)]
    assert num_gemms[1] - num_gemms[0] == wide


def strided(m, y):
    """Return what a linear makes of a part of a tensor that a reshape need not copy."""
    return F.gelu(m.fc1(torch.cat((y, y), -1).sin()[..., :D]))


def test_a_part_of_a_tensor_is_not_copied():
    eager, fused = pair(strided)
    x = randn(2, T // 2, D, dtype=torch.float64)
    for _ in range(2):
        assert_same(results(fused, x), results(eager, x))
    # sigmoid's result, and the sine's argument and result, of twice the width
    assert saved_bytes(fused, [x]) <= (2 + 2 * 2) * ROWS


def test_the_peak_falls():
    eager = nn.Sequential(*[InlineBlock(BETWEEN["function"]) for _ in range(6)]).to(DEVICE)
    fused, x = copy.deepcopy(eager), randn(128, D)
    fuse(fused, mlp=False, attention=False)
    saved = [saved_bytes(m, [x]) for m in (eager, fused)]
    peaks = [peak_of_step(m, x) for m in (eager, fused)]
    assert peaks[0] - peaks[1] >= 0.8 * (saved[0] - saved[1]) > 0


@pytest.mark.parametrize("frozen", ["fc1", "fc2", "scale", "gate"])
def test_frozen_parameters(frozen):
    eager, fused = pair(BETWEEN["gate"])
    x = randn(T, D, dtype=torch.float64)
    for model in (eager, fused):
        getattr(model, frozen).requires_grad_(False)
    assert_same(results(fused, x), results(eager, x))
    assert saved_bytes(fused, [x]) <= 3 * ROWS


def test_a_frozen_linear_keeps_no_wider_input():
    class NarrowHidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.act, self.up = nn.Linear(WIDE, D), nn.GELU(), nn.Linear(D, WIDE)

        def forward(self, x):
            return self.up(self.act(self.down(x * 2)))

    narrow = NarrowHidden()
    narrow.down.requires_grad_(False)
    model = nn.Sequential(narrow, nn.Identity()).to(DEVICE, torch.float64)
    x, fused = randn(T, WIDE, dtype=torch.float64), copy.deepcopy(model)
    fuse(fused, mlp=False, attention=False)
    assert saved_bytes(fused, [x]) <= saved_bytes(model, [x])


class WritesInline(InlineBlock):
    """Writes to the first linear's input, or result, before the activation reads that."""

    def __init__(self, what: str):
        super().__init__(None)
        self.what = what

    def forward(self, x):
        y = self.read(x).detach().requires_grad_() if self.what == "input" else self.read(x)
        z = self.fc1(y)
        with torch.no_grad():
            (y if self.what == "input" else z).mul_(2)
        return self.fc2(self.act(z))


def test_a_result_that_is_written_is_not_made_again():
    eager: Any = WritesInline("result").to(DEVICE, torch.float64)
    fused = copy.deepcopy(eager)
    fuse(fused, mlp=False, attention=False)
    x = randn(T, D, dtype=torch.float64)
    assert_same(results(fused, x), results(eager, x))


def test_an_input_that_is_written_is_an_error_as_ever():
    for fuses in (False, True):
        model = WritesInline("input").to(DEVICE, torch.float64)
        if fuses:
            fuse(model, mlp=False, attention=False)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(randn(T, D, dtype=torch.float64)).sum().backward()


def read_twice(m, y):
    h = F.gelu(m.fc1(y))
    return h + h.sin()


def same_linear_twice(m, y):
    return F.gelu(m.fc1(y)) + F.silu(m.fc1(2 * y))


@pytest.mark.parametrize("between", [read_twice, same_linear_twice])
def test_other_readers(between):
    eager, fused = pair(between)
    x = randn(T, D, dtype=torch.float64)
    for _ in range(2):
        assert_same(results(fused, x), results(eager, x))


def hook(model: Any) -> None:
    model.fc1.register_forward_hook(lambda module, args, y: 2 * y)


def parametrize(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.fc1, "weight", Doubled())


def adapt(model: Any) -> None:
    torch.manual_seed(1)
    model.fc1 = LoraLinear(model.fc1).requires_grad_()


def patch(model: Any) -> None:
    model.fc1.forward = lambda x: F.linear(x, model.fc1.weight).tanh()


@pytest.mark.parametrize("change", [hook, parametrize, adapt, patch])
@pytest.mark.parametrize("name", ["module", "function"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_linears_of_other_code(change, name, when):
    torch.manual_seed(0)
    eager: Any = InlineBlock(BETWEEN[name]).to(DEVICE, torch.float64)
    fused = copy.deepcopy(eager)
    if when == "after":
        fuse(fused, mlp=False, attention=False)
    change(eager)
    change(fused)
    if when == "before":
        fuse(fused, mlp=False, attention=False)
    x = randn(T, D, dtype=torch.float64)
    for _ in range(2):
        assert_same(results(fused, x), results(eager, x))


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_dropout_draws_as_torch_does(rate):
    eager, fused = pair(BETWEEN["dropout"])
    x, found = randn(T, D, dtype=torch.float64), []
    for model in (eager, fused):
        model.drop.p = rate
        torch.manual_seed(3)
        found.append(results(model, x))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("name", ["module", "function", "gate"])
def test_autocast(name):
    eager, fused = pair(BETWEEN[name], dtype=torch.float32)
    x, found = randn(T, D), []
    for model in (eager, fused):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            found.append(results(model, x))
    assert_same(found[1], found[0])
    with torch.autocast(DEVICE.type, torch.bfloat16), saved_tensors() as saved:
        fused(x)
    assert (T, WIDE) not in [storage.shape for storage in saved.storages]


class ChannelNorm(nn.Module):
    """A LayerNorm over channels, as ConvNeXt's code has it."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ResponseNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((1, 1, 1, WIDE), 0.5))

    def forward(self, x):
        length = x.norm(dim=(1, 2), keepdim=True)
        return self.gamma * (x * length / (length.mean(-1, keepdim=True) + 1e-6)) + x


class Picture(nn.Module):
    """As ConvNeXt V2's block, with a norm over channels before the linear."""

    def __init__(self):
        super().__init__()
        self.norm, self.grn, self.act = ChannelNorm(), ResponseNorm(), nn.GELU()
        self.up, self.down = nn.Linear(D, WIDE), nn.Linear(WIDE, D)

    def forward(self, x):
        y = self.up(self.norm(x * 2).permute(0, 2, 3, 1))
        return x + self.down(self.grn(self.act(y))).permute(0, 3, 1, 2)


def test_a_norm_over_channels_is_a_norm():
    torch.manual_seed(0)
    eager, x = Picture().to(DEVICE, torch.float64), randn(2, D, 3, 3, dtype=torch.float64)
    fused = copy.deepcopy(eager)
    report = fuse(fused)
    assert report.left == {}
    assert "     1 x ChannelNorm -> saves its input" in str(report).splitlines()
    assert_same(results(fused, x), results(eager, x))
    # the norm's input, and a number for each pixel
    assert saved_bytes(fused, [x]) == 8 * (x.numel() + x.numel() // D)
    assert saved_bytes(eager, [x]) > 15 * 8 * x.numel()


class ScaleNorm(nn.Module):
    """A norm with one weight, which no LayerNorm or RMSNorm computes."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return nn.functional.normalize(x, dim=-1) * self.g


def test_a_norm_that_saves_its_input_is_not_left():
    report = fuse(nn.Sequential(ScaleNorm(), nn.Linear(D, D)))
    assert report.shared["0"] == "ScaleNorm -> saves its input"
    assert report.left == {}


class NormAroundNorm(nn.Module):
    """Calls a norm without weights, and scales its result by its own weight, in two roundings."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.gamma = inner, nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x):
        return self.inner(x) * (self.gamma + 1.0)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(D, D)

    def forward(self, x):
        q = self.q(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q)[:, 0]


class AttendsTo(nn.Module):
    """Attention that reads a norm of another class, or an activation of a linear's result."""

    def __init__(self, before: str):
        super().__init__()
        norm = NormAroundNorm(nn.LayerNorm(D, elementwise_affine=False))
        self.fc, self.act = (nn.Linear(D, D), nn.Sigmoid()) if before == "linear" else (norm, None)
        self.attends = Attends()

    def forward(self, x):
        y = self.fc(x.tanh())
        return self.attends(y if self.act is None else self.act(y))


@pytest.mark.parametrize(("before", "more"), [("norm", 2 * 8 * T), ("linear", ROWS)])
def test_attention_saves_the_recipe_of_its_input_unless_that_has_a_gemm(before, more):
    torch.manual_seed(0)
    eager = AttendsTo(before).double().to(DEVICE)
    fused, x = copy.deepcopy(eager), randn(1, T, D, dtype=torch.float64)
    assert "recomputed but for attention" in fuse(fused).swapped["attends"]
    assert_same(results(fused, x), results(eager, x))
    # beside tanh's result: the statistics of torch's norm, or attention's input
    assert saved_bytes(fused, [x]) == saved_bytes(fused.attends, [x]) + more


class ScaledReaders(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.norm, self.q, self.k = NormAroundNorm(inner), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = x * 2
        y = self.norm(x)
        return x + self.q(y) - self.k(y)


@pytest.mark.parametrize(
    ("inner", "num_rows"), [(nn.LayerNorm(D, elementwise_affine=False), 2), (LlamaRMSNorm(D), 0)]
)
def test_a_norm_around_a_norm_saves_its_input(inner, num_rows):
    torch.manual_seed(0)
    eager = ScaledReaders(copy.deepcopy(inner)).to(DEVICE, torch.float64)
    fused = copy.deepcopy(eager)
    x = randn(2, T // 2, D, dtype=torch.float64)
    report = fuse(fused)
    assert (report.left, report.swapped) == ({}, {})
    assert report.shared["norm"] == "NormAroundNorm -> saves its input"
    assert_same(results(fused, x), results(eager, x))
    # the norm's input, and the statistics of its rows where torch's function makes them
    assert saved_bytes(fused, [x]) == ROWS + num_rows * 8 * T < saved_bytes(eager, [x]) / 2


@pytest.mark.parametrize("options", [{"save": "preact"}, {"linear": False}, {"skip": "norm"}])
def test_a_norm_inside_is_fused_where_the_one_around_is_not_asked_for(options):
    model = ScaledReaders(nn.LayerNorm(D, elementwise_affine=False))
    assert [*fuse(model, **options).swapped] == ["norm.inner"]


def test_one_picture():
    """torch's linear reads its pixels without a copy, as they lie behind the norm."""
    torch.manual_seed(0)
    eager, x = Picture().to(DEVICE, torch.float64), randn(1, D, 3, 3, dtype=torch.float64)
    fused = copy.deepcopy(eager)
    fuse(fused)
    for _ in range(2):
        assert_same(results(fused, x), results(eager, x))
    assert saved_bytes(fused, [x]) < 2 * x.nbytes < 15 * x.nbytes < saved_bytes(eager, [x])


def test_a_layer_without_such_functions_is_looked_at_once():
    class TwoResults(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, WIDE), nn.Linear(WIDE, D)

        def forward(self, x):
            return self.a(x), self.b(x.repeat(1, WIDE // D))

    model = TwoResults().to(DEVICE)
    fuse(model, mlp=False, attention=False)
    assert notes_of(model).shares_code
    model(randn(T, D))
    assert not notes_of(model).shares_code
    unfuse(model)
    assert type(model) is TwoResults
    assert notes_of(model) is NO_NOTES


def test_calls_that_save_nothing_take_no_mode():
    _, fused = pair(BETWEEN["function"])
    x = randn(T, D, dtype=torch.float64)
    num_calls = []
    for _ in range(2):
        with torch.no_grad():
            num_calls.append(calls(lambda: fused(x)))
        set_notes(fused, shares_code=False)
    assert num_calls[0] <= num_calls[1] + 20
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), fused(x))


@pytest.mark.parametrize("place", ["linear", "activation", "product"])
def test_writes_of_which_no_function_tells(place):
    """A kernel of other code writes by an address to a tensor that would be made again."""

    def at(name, h):
        if name == place and not h.is_meta:
            ctypes.memset(h.data_ptr(), 0, h.nbytes // 2)
        return h

    def between(m, y):
        gate = at("activation", F.silu(at("linear", m.fc1(y))))
        return at("product", gate * m.fc1(y))

    eager, fused = pair(between)
    x = randn(T, D)
    expected = results(eager, x)
    message = ""
    try:
        assert_same(results(fused, x), expected)
    except CheckpointError as error:
        message = str(error)
    assert not message or "writes there without a version" in message
