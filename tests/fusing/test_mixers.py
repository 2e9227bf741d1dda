"""Modules found by the functions that their code calls, and scans that run once."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from support import DEVICE, randn, saved_bytes
from test_attention import statistics_bytes
from torch import nn

import fusedckpt
from fusedckpt import fuse
from fusedckpt.fusing.mixers import kinds_called
from fusedckpt.state.rng import RandomStates, everywhere

D, T = 16, 12
RUNS = []


class Scan(torch.autograd.Function):
    """A cumulative sum with a gate, which saves its inputs alone, as a kernel does."""

    @staticmethod
    def forward(ctx, x, gate):
        RUNS.append("scan")
        ctx.save_for_backward(x, gate)
        return (x * gate.sigmoid()).cumsum(1)

    @staticmethod
    def backward(ctx, dy):
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            x, gate = given
            return torch.autograd.grad((x * gate.sigmoid()).cumsum(1), given, dy)


def plain(x, gate):
    return Scan.apply(x, gate)


named = fusedckpt.region(plain, "scan")
# in the place of a package's own
package = types.ModuleType("fla.ops.some.chunk")
package.ScanFunction = type("ScanFunction", (Scan,), {"__module__": package.__name__})
exec("def chunk(x, gate):\n    return ScanFunction.apply(x, gate)", vars(package))
chunk = package.chunk


def by_transformers(name):
    """Return the function as transformers decorates its kernels."""
    hub = pytest.importorskip("transformers.integrations")
    return hub.use_kernel_func_from_hub_with_fallback(name, "no_such_package")(plain)


class ScanMixer(nn.Module):
    """Projections, a convolution over tokens, a scan, a gate."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, cache=None):
        x, gate, z = self.into(x).chunk(3, -1)
        return self.out(self.scan(F.silu(x), gate) * F.silu(z))


class NamedScan(ScanMixer):
    def scan(self, x, gate):
        return named(x, gate)


class Behind(ScanMixer):
    def scan(self, x, gate):
        return helper(x, gate)


def helper(x, gate):
    return named(x, gate)


class OfPackage(ScanMixer):
    def scan(self, x, gate):
        return chunk(x, gate)


def pair(kind):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.LayerNorm(D), kind()).to(DEVICE)
    fused = copy.deepcopy(eager)
    return eager, fused, fuse(fused)


def grads(model, x):
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("kind", [NamedScan, Behind, OfPackage])
def test_a_scan_runs_once(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, package.__name__, package)
    eager, fused, report = pair(kind)
    assert report.swapped["1"] == f"{kind.__name__} -> recomputed but for its scan"
    x = randn(2, T, D)
    torch.testing.assert_close(grads(fused, x), grads(eager, x))
    RUNS.clear()
    grads(fused, x)
    assert RUNS == ["scan"]
    assert report.fallbacks == {}
    # the norm's input, and the scan's result
    assert saved_bytes(fused, [x]) == 2 * T * 2 * D * 4
    assert isinstance(package.ScanFunction, type)


def test_a_kernel_of_transformers(monkeypatch):
    """Where it is found in the module of a model."""
    module = types.ModuleType("transformers.models.some.modeling_some")
    module.kernel = by_transformers("mamba_chunk_scan_combined")
    module.update = by_transformers("selective_state_update")
    module.convolution = by_transformers("causal_conv1d_fn")
    names = "kernel", "update", "convolution"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = {}
    for name in names:
        code = f"def scan(self, x, gate):\n    return {name}(x, gate)"
        exec(code, vars(module))
        kind = type("Kernel", (ScanMixer,), {"scan": module.scan, "__module__": module.__name__})
        eager, fused, report = pair(kind)
        found[name] = report.swapped.get("1")
        x = randn(2, T, D)
        torch.testing.assert_close(grads(fused, x), grads(eager, x))
        RUNS.clear()
        grads(fused, x)
        # what its code does not show the first step does
        assert len(RUNS) == (1 if name == "kernel" else 2)
    assert found == {
        "kernel": "Kernel -> recomputed but for its scan",
        "update": None,
        "convolution": "Kernel -> recomputed",
    }


def test_a_scan_that_saves_too_much_runs_again():
    def large(x, gate):
        RUNS.append("large")
        for _ in range(8):
            x = (x * gate.sigmoid()).sin()
        return x

    class LargeScan(ScanMixer):
        scan = staticmethod(fusedckpt.region(large, "scan"))

    eager, fused, report = pair(LargeScan)
    x = randn(2, T, D)
    torch.testing.assert_close(grads(fused, x), grads(eager, x))
    RUNS.clear()
    grads(fused, x)
    assert len(RUNS) == 2
    assert report.fallbacks["1"] == ("again", "scan")
    assert saved_bytes(fused, [x]) == 2 * T * D * 4


def test_a_checkpoint_saves_scans_by_name():
    model, x = ScanMixer().to(DEVICE), randn(2, T, D)
    model.scan = named
    for names, count in ((), 2), ("scan", 1), ("s*", 1), ("attention", 2):
        RUNS.clear()
        fusedckpt.checkpoint(model, x, save_regions=names).sum().backward()
        assert len(RUNS) == count


SDPA = F.scaled_dot_product_attention


class TwoHeads(zoo.Heads):
    def __init__(self):
        super().__init__(D, 2)


def direct(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def twice(q, k, v):
    return direct(q, k, v)


def closing():
    def inside(q, k, v):
        return twice(q, k, v)

    class Closing(TwoHeads):
        def attend(self, q, k, v):
            return inside(q, k, v)

    return Closing()


class Direct(TwoHeads):
    def attend(self, q, k, v):
        return direct(q, k, v)


class TwiceBehind(TwoHeads):
    def attend(self, q, k, v):
        return twice(q, k, v)


HELPERS = {"direct": Direct, "twice": TwiceBehind, "closed over": closing}


@pytest.mark.parametrize("kind", HELPERS.values(), ids=list(HELPERS))
def test_attention_behind_helpers(kind):
    eager, fused, report = pair(kind)
    assert "recomputed but for attention itself" in report.swapped["1"]
    x = randn(2, T, D)
    torch.testing.assert_close(grads(fused, x), grads(eager, x))
    statistics = statistics_bytes(rows=T, heads=2, width=D // 2)
    assert saved_bytes(fused, [x]) == 2 * T * 2 * D * 4 + statistics
    assert report.fallbacks == {}


def test_functions_of_other_code_are_not_looked_into():
    class Other(TwoHeads):
        def attend(self, q, k, v):
            return q + F.softmax(k, -1) * v

    class Without(Direct):
        """Its base's attention does not run."""

        attend = Other.attend

    class CallsBase(Direct):
        def attend(self, q, k, v):
            return super().attend(q, k, v) + q

    class NamesBase(Without):
        def attend(self, q, k, v):
            return Direct.attend(self, q, k, v)

    assert kinds_called(Other()) == kinds_called(Without()) == frozenset()
    assert kinds_called(CallsBase()) == kinds_called(NamesBase()) == {"attention"}
    assert kinds_called(nn.Linear(2, 2)) == frozenset()
    assert kinds_called(nn.MultiheadAttention(4, 2)) == {"attention"}


class OfATable(TwoHeads):
    """Calls a function that its code does not name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.generator = [], torch.Generator().manual_seed(0)

    def attend(self, q, k, v):
        self.calls += 1
        self.seen.append(torch.rand((), generator=self.generator).item())
        name = "scaled_dot_product_attention"
        return getattr(F, name)(q, k, v)


class NormedTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), OfATable()

    def forward(self, x, scale=1.0):
        return self.attention(self.norm(x)) * scale


@pytest.mark.parametrize("batch", ["tensor", "tuple", "dict"])
def test_found_by_running(batch):
    torch.manual_seed(0)
    eager = (
        nn.Sequential(NormedTable(), NormedTable()).to(DEVICE)
        if batch == "tensor"
        else NormedTable().to(DEVICE)
    )
    assert not any("attention" in k for k in fuse(copy.deepcopy(eager)).kinds.values())
    fused, x = copy.deepcopy(eager), randn(2, T, D)
    calls = [copy.deepcopy(m.generator.get_state()) for m in fused.modules() if hasattr(m, "seen")]
    given = {"tensor": x, "tuple": (x, 2.0), "dict": {"x": x, "scale": 2.0}}[batch]
    before = torch.get_rng_state()
    report = fuse(fused, example_inputs=given)
    changes = [c for n, c in report.swapped.items() if n.endswith("attention")]
    assert changes == ["OfATable -> recomputed but for attention itself"] * len(changes)
    assert len(changes) == (2 if batch == "tensor" else 1)
    assert "attention and mixers were found by running the batch" in str(report)
    # nothing of the run is left
    assert torch.equal(before, torch.get_rng_state())
    for module, state in zip(
        [m for m in fused.modules() if hasattr(m, "seen")], calls, strict=True
    ):
        assert module.seen == []
        assert module.calls == 0
        assert torch.equal(module.generator.get_state(), state)
    for _ in range(2):
        torch.testing.assert_close(grads(fused, x), grads(eager, x))
    assert [m.calls for m in fused.modules() if hasattr(m, "seen")] == [
        m.calls for m in eager.modules() if hasattr(m, "seen")
    ]
    assert report.fallbacks == {}


def test_a_batch_moves_no_random_state():
    class DrawingMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

        def forward(self, x):
            # a list would be put back
            next(calls)
            factor = random.random() + np.random.randn() + torch.rand(()).item()
            return self.mlp(x) * factor

    calls = itertools.count()
    model, x = DrawingMLP().to(DEVICE), randn(2, T, D)
    states = RandomStates(everywhere())
    fuse(model, example_inputs=x)
    assert next(calls) > 0
    assert not states.have_moved()


def test_a_batch_that_does_not_run():
    model = nn.Sequential(nn.LayerNorm(D), Direct()).to(DEVICE)
    report = fuse(model, example_inputs={"y": 1})
    assert "recomputed but for attention" in report.swapped["1"]
    assert "found by their code, as the model raised TypeError" in str(report)
    model = nn.Sequential(nn.LayerNorm(D), NamedScan()).to(DEVICE)
    assert "1" in fuse(model, example_inputs=randn(2, T, D)).swapped


def test_the_innermost_with_weights_and_parts_that_do_not_run():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Sequential(OfATable()), Direct()

        def forward(self, x):
            return self.first(x)

    model = Either().to(DEVICE)
    report = fuse(model, example_inputs=randn(2, T, D))
    found = {name for name, kind in report.kinds.items() if kind == "attention"}
    assert found == {"first.0", "second"}


class AttentionByHand(TwoHeads):
    """Attention in products and a softmax."""

    def attend(self, q, k, v):
        return F.softmax(q @ k.mT, -1) @ v


def test_attention_by_hand_is_found_by_its_code():
    eager, fused, report = pair(AttentionByHand)
    assert report.swapped["1"] == "AttentionByHand -> recomputed but for attention itself"
    x = randn(2, 4 * T, D)
    torch.testing.assert_close(grads(fused, x), grads(eager, x))
    # the norm's input alone: its scores are more than four times its result
    assert saved_bytes(fused, [x]) == 2 * 4 * T * D * 4
    assert report.fallbacks["1"].key == "again"
    assert "recomputed as a whole: 1 of 2" in str(report)
    assert "not run fused" not in str(report)


class SavesFiveTimes(nn.Module):
    """Saves five times its result, which is small."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(D, 4)

    def forward(self, x):
        scores = self.scores(x).sigmoid().sin().exp().tanh().topk(1).values
        return x * scores.sigmoid().exp().sin()


class CountingScan(zoo.Scan):
    """Gives something else each time, by a counter that a second run finds as the first did."""

    def __init__(self):
        super().__init__(D)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + 0.1 * self.calls


class Ticking(zoo.Scan):
    """Gives something else each time, by a global variable."""

    def forward(self, x):
        return super().forward(x) * next(TICKS)


TICKS = itertools.count(1)


def test_what_saves_much_is_found_by_running():
    torch.manual_seed(0)
    parts = (
        zoo.Scan(D),
        SavesFiveTimes(),
        CountingScan(),
        Ticking(D),
        nn.Linear(D, 1),
        nn.Linear(1, D),
    )
    eager = nn.Sequential(*parts).to(DEVICE)
    fused, x = copy.deepcopy(eager), randn(2, T, D)
    report = fuse(fused, example_inputs=x)
    # torch's removal leaves the mark of a hook with keywords
    assert not nn.modules.module._has_any_global_hook()
    assert report.swapped == {"0": "Scan -> recomputed", "2": "CountingScan -> recomputed"}
    eager, fused = eager[:3], fused[:3]
    assert eager[2].calls == fused[2].calls == 0
    for _ in range(2):
        torch.testing.assert_close(grads(fused, x), grads(eager, x))
        assert fused[2].calls == eager[2].calls
    assert saved_bytes(fused[0], [x]) == x.nbytes
    assert saved_bytes(eager[0], [x]) > 4 * x.nbytes
    assert report.fallbacks == {}
    # what is fused already is no part of a module that saves much
    assert fuse(fused, example_inputs=x).swapped == {}


class Product(nn.Module):
    def forward(self, a, b):
        return torch.matmul(a, b)


class Attend(TwoHeads):
    """Its softmax is an attribute."""

    def __init__(self, softmax):
        super().__init__()
        self.to_weights = softmax

    def attend(self, q, k, v):
        return self.to_weights(q @ k.mT) @ v


class InModules(Attend):
    """Its products are modules, too."""

    def __init__(self):
        super().__init__(nn.Softmax(-1))
        self.scores, self.mix = Product(), Product()

    def attend(self, q, k, v):
        return self.mix(self.to_weights(self.scores(q, k.mT)), v)


class Renamed(TwoHeads):
    def attend(self, q, k, v):
        return renamed(q @ k.mT, -1) @ v


renamed = F.softmax
SOFTMAXES = {
    "a module": lambda: Attend(nn.Softmax(-1)),
    "in a Sequential": lambda: Attend(nn.Sequential(nn.Softmax(-1), nn.Dropout(0.0))),
    "in an own module": lambda: Attend(zoo.Line(nn.Softmax(-1), nn.Dropout(0.0))),
    "a partial": lambda: Attend(functools.partial(F.softmax, dim=-1)),
    "modules alone": InModules,
    "a global": Renamed,
}


@pytest.mark.parametrize("make", SOFTMAXES.values(), ids=list(SOFTMAXES))
def test_a_softmax_of_any_name(make):
    eager, fused, report = pair(make)
    assert report.swapped["1"].endswith("recomputed but for attention itself")
    x = randn(2, 4 * T, D)
    torch.testing.assert_close(grads(fused, x), grads(eager, x))
    assert saved_bytes(fused, [x]) == 2 * 4 * T * D * 4


def test_attention_written_beside_an_mlp_is_named():
    class AttentionAndMLP(AttentionByHand):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

        def forward(self, x):
            return self.mlp(super().forward(x))

    report = fuse(nn.Sequential(nn.LayerNorm(D), AttentionAndMLP()))
    assert report.left == {"1": ("around", "")}
    assert report.kinds["1"] == "attention"


class BiasedAttention(TwoHeads):
    """As Swin V2's: cosine attention by hand, and an MLP that computes its bias of positions."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, D), nn.ReLU(), nn.Linear(D, 2, bias=False))
        self.places: torch.Tensor
        self.register_buffer("places", torch.rand(T * T, 2))

    def attend(self, q, k, v):
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        bias = self.mlp(self.places).T.unflatten(1, (T, T))
        return (scores + 16 * torch.sigmoid(bias)).softmax(-1) @ v


def test_a_small_mlp_runs_again_with_its_attention():
    eager, fused, report = pair(BiasedAttention)
    assert report.swapped["1"].endswith("recomputed but for attention itself")
    assert report.left == {}
    x = randn(2, T, D)
    torch.testing.assert_close(grads(fused, x), grads(eager, x))
    assert saved_bytes(fused, [x]) == 2 * T * D * 4


class CallsLayers(nn.Module):
    """Computes attention by the layers of a module that would compute it, too."""

    def __init__(self):
        super().__init__()
        self.attention = Direct()

    def forward(self, x):
        heads = self.attention.qkv(x).unflatten(-1, (3, 2, -1)).movedim(-3, 0)
        y = direct(*heads.transpose(-3, -2))
        return x + self.attention.out(y.transpose(-3, -2).flatten(-2))


class CallsBoth(CallsLayers):
    def forward(self, x):
        return self.attention(super().forward(x))


def test_a_block_that_calls_the_layers_of_attention():
    eager, fused, report = pair(CallsLayers)
    x = randn(2, T, D)
    for _ in range(2):
        torch.testing.assert_close(grads(fused, x), grads(eager, x))
    assert report.swapped["1"] == "CallsLayers -> recomputed but for attention itself"
    # x, and attention's result and statistics
    statistics = statistics_bytes(rows=T, heads=2, width=D // 2)
    assert saved_bytes(fused, [x]) == 2 * T * 2 * D * 4 + statistics


def test_a_block_that_calls_attention_itself_and_a_module_of_it():
    """The module runs again, and not the block, in which that would run a third time."""
    eager, fused, report = pair(CallsBoth)
    x = randn(2, T, D)
    for _ in range(2):
        torch.testing.assert_close(grads(fused, x), grads(eager, x))
    assert "1" not in report.swapped
    assert report.swapped["1.attention"] == "Direct -> recomputed but for attention itself"


class CallsForward(nn.Module):
    """Calls no module, but their forward, which hooks do not see."""

    def __init__(self):
        super().__init__()
        self.attention = Direct()
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        return x + self.mlp.forward(self.attention.forward(x))


def test_attention_that_a_batch_shows_only_in_a_block_around():
    report = fuse(nn.Sequential(nn.LayerNorm(D), CallsForward()), example_inputs=randn(2, T, D))
    assert report.swapped["1.attention"] == "Direct -> recomputed but for attention itself"
    assert report.left == {}
