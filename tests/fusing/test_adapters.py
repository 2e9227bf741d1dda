"""fuse on models with peft's adapters: plain LoRA runs fused as it stands, the rest is named."""

import copy
import pickle

import pytest
import torch
from support import saved_bytes
from torch import nn
from zoo import SwiGLU

import fusedckpt

peft = pytest.importorskip("peft")
D, F = 16, 24


class ProjectionAndMLP(nn.Module):
    """A projection, and an MLP; no embedding: its input is a tensor."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(D, D)
        self.mlp = SwiGLU(D, F, down_bias=True)

    def forward(self, x):
        x = x + self.proj(x)
        return x + self.mlp(x)


def config(**options):
    given = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.LoraConfig(**given | options)


def adapted(**options):
    torch.manual_seed(0)
    return peft.get_peft_model(ProjectionAndMLP().double(), config(**options)).train()


def step(model, x):
    torch.manual_seed(1)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return y.detach(), {name: grad.clone() for name, grad in grads.items()}


def assert_equal_steps(model, eager, x=None):
    x = torch.randn(3, 5, D, dtype=torch.float64) if x is None else x
    (y, grads), (expected, wanted) = step(model, x), step(eager, x)
    torch.testing.assert_close(y, expected)
    # by the names that parameters have in either
    torch.testing.assert_close(grads, wanted)


def test_plain_lora():
    model = adapted()
    eager = copy.deepcopy(model)
    report = fusedckpt.fuse(model)
    assert set(report.kinds.values()) == {"mlp", "linear"}
    assert not report.left
    assert_equal_steps(model, eager)
    assert not report.fallbacks
    x = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    mlp = model.base_model.model.mlp
    # of the input alone, whatever the number of adapters
    assert saved_bytes(lambda x: mlp(x * 1), [x]) == 5 * D * 8


def test_adapters_after_fuse():
    torch.manual_seed(0)
    model = ProjectionAndMLP().double()
    before = fusedckpt.fuse(model)
    model = peft.get_peft_model(model, config(init_lora_weights=True)).train()
    eager = copy.deepcopy(model)
    fusedckpt.unfuse(eager)
    assert_equal_steps(model, eager)
    assert not before.fallbacks
    report = fusedckpt.fuse(model)
    assert (len(report.already), len(report.swapped)) == (1, 1)
    assert_equal_steps(model, eager)
    assert not report.fallbacks


def test_switching_adapters():
    model = adapted()
    model.add_adapter("other", config(r=2))
    model.add_adapter("dora", config(use_dora=True))
    eager = copy.deepcopy(model)
    report = fusedckpt.fuse(model, verify=False)
    both = model, eager
    for one in both:
        one.set_adapter("other")
    assert_equal_steps(*both)
    for one in both:
        one.base_model.set_adapter(["default", "other"])
    assert_equal_steps(*both)
    assert not report.fallbacks
    with model.disable_adapter(), eager.disable_adapter():
        x = torch.randn(3, D, dtype=torch.float64)
        torch.testing.assert_close(model(x), eager(x))
    for one in both:
        one.merge_adapter()
    torch.testing.assert_close(model(x), eager(x))
    assert not report.fallbacks
    for one in both:
        one.unmerge_adapter()
        one.set_adapter("dora")
    assert_equal_steps(*both)
    assert report.fallbacks


def test_merged_while_disabled_is_unmerged_by_peft():
    model = adapted()
    eager = copy.deepcopy(model)
    fusedckpt.fuse(model, verify=False)
    x = torch.randn(3, D, dtype=torch.float64)
    for one in (model, eager):
        one.merge_adapter()
        with one.disable_adapter():
            one.last = one(x)
    torch.testing.assert_close(model.last, eager.last)
    assert not model.base_model.model.mlp.up_proj.merged


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "Dora"),
        ({"lora_bias": True}, "bias"),
    ],
)
def test_other_adapters_are_named(options, reason):
    model = adapted(**options)
    eager = copy.deepcopy(model)
    report = fusedckpt.fuse(model)
    assert not report.swapped
    assert reason in str(report)
    assert_equal_steps(model, eager)


def test_other_methods_are_named():
    names = ["proj", "gate_proj", "up_proj", "down_proj"]
    options = peft.IA3Config(target_modules=names, feedforward_modules=["down_proj"])
    torch.manual_seed(0)
    model = peft.get_peft_model(ProjectionAndMLP(), options)
    report = fusedckpt.fuse(model)
    assert not report.swapped
    assert "ia3" in str(report)


def test_a_hooked_layer_is_called():
    model, x = adapted(), torch.randn(3, D, dtype=torch.float64)
    for path in ("", ".base_layer", ".lora_A.default", ".lora_dropout.default"):
        report, seen = fusedckpt.fuse(model, verify=False), []
        layer = model.base_model.model.get_submodule(f"mlp.up_proj{path}")
        handle = layer.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        step(model, x)
        assert seen
        assert report.fallbacks
        handle.remove()


@pytest.mark.parametrize("scale", [float("inf"), torch.tensor(0.5, dtype=torch.float64)])
def test_odd_scales_run_as_peft_does(scale):
    model = adapted()
    eager = copy.deepcopy(model)
    report = fusedckpt.fuse(model, verify=False)
    for layer in (*model.modules(), *eager.modules()):
        if hasattr(layer, "scaling"):
            layer.scaling["default"] = scale
    x = torch.randn(3, D, dtype=torch.float64)
    torch.testing.assert_close(model(x), eager(x), equal_nan=True)
    assert "scale" in str(report.fallbacks)


def quantized_mlp(dtype, **options):
    """An MLP of bitsandbytes' linears, with float32 biases, and the same fused."""
    bnb = pytest.importorskip("bitsandbytes")
    model = SwiGLU(D, F, down_bias=True)
    for name, linear in model.named_children():
        has_bias = linear.bias is not None
        given = linear.in_features, linear.out_features, has_bias
        setattr(model, name, bnb.nn.Linear4bit(*given, **options))
    eager = model.to(dtype).to("cpu")
    eager.down_proj.bias.data = eager.down_proj.bias.data.float()
    fused = copy.deepcopy(eager)
    return eager, fused, fusedckpt.fuse(fused, verify=False)


def test_a_quantized_linear_casts_its_bias():
    eager, fused, report = quantized_mlp(torch.bfloat16, compute_dtype=torch.bfloat16)
    assert list(report.swapped) == [""]
    x = torch.randn(3, D, dtype=torch.bfloat16)
    torch.testing.assert_close(fused(x), eager(x), rtol=0.05, atol=0.05)


def test_a_quantized_linear_knows_no_autocast():
    eager, fused, _ = quantized_mlp(torch.float32, compute_dtype=torch.float32)
    x = torch.randn(3, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(x).dtype == eager(x).dtype == torch.float32


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_dropout_of_adapters(dropout):
    model = adapted(lora_dropout=dropout)
    report = fusedckpt.fuse(model, verify=False)
    x = torch.randn(3, D, dtype=torch.float64)
    first, again = step(model, x), step(model, x)
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])
    assert not report.fallbacks
    eager = copy.deepcopy(model)
    fusedckpt.unfuse(eager)
    torch.testing.assert_close(model.eval()(x), eager.eval()(x))
    is_random = not torch.equal(first[0], model(x).detach())
    assert is_random == (dropout > 0)


def test_unfuse_and_pickle():
    model = adapted()
    kinds = [type(m) for m in model.modules()]
    fusedckpt.fuse(model, verify=False)
    x = torch.randn(3, D, dtype=torch.float64)
    y = model(x)
    # a function on the way back to the model, and no pickle for peft's own hooks
    again = pickle.loads(pickle.dumps(model.base_model.model))
    torch.testing.assert_close(again(x), y)
    fusedckpt.unfuse(model)
    assert [type(m) for m in model.modules()] == kinds
    torch.testing.assert_close(model(x), y)
