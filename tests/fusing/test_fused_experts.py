"""Experts after `fuse`: calls that run fused, calls that do not, and modules that are left."""

import copy
from itertools import product

import pytest
import torch
from quantized_weight import forget, quantize
from support import DEVICE, randn, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.fusing.accuracy import Errors

transformers = pytest.importorskip("transformers")
T, D, E, K = 12, 16, 4, 2


def experts(name="Qwen3Moe", implementation="eager", **options):
    """Return a model's experts with random weights."""
    torch.manual_seed(0)
    module = __import__(f"transformers.models.{_folder(name)}.modeling_{_folder(name)}")
    for part in ("models", _folder(name), f"modeling_{_folder(name)}"):
        module = getattr(module, part)
    sizes = {"hidden_size": D, "moe_intermediate_size": 24, "intermediate_size": 24}
    config = getattr(transformers, f"{name}Config")(
        **{**sizes, "num_experts": E, "num_local_experts": E, **options},
        experts_implementation=implementation,
    )
    made = getattr(module, f"{name}Experts")(config).to(DEVICE)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def _folder(name):
    return {"Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss", "Mixtral": "mixtral"}[name]


def inputs(dtype=torch.float32):
    x = torch.randn(T, D, device=DEVICE).to(dtype).requires_grad_()
    scores, index = torch.rand(T, E, device=DEVICE).topk(K)
    return x, index, scores.to(dtype).requires_grad_()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_under_autocast_and_by_name(name, implementation):
    """By the error rule, over draws; by name as well as by position."""
    eager = experts(name, implementation)
    fused = copy.deepcopy(eager)
    assert list(fuse(fused).swapped) == [""]
    sums = [Errors(torch.float32) for _ in range(3)]
    for _ in range(4):
        given, found = inputs(), []
        for module in (fused, eager, copy.deepcopy(eager).double()):
            is_truth = module is not fused and module is not eager
            if is_truth:
                module.config._experts_implementation = "eager"
            x, index, scores = [
                t.double() if is_truth and t.is_floating_point() else t for t in given
            ]
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=not is_truth):
                y = module(x, index, scores)
            found.append([y, *torch.autograd.grad(y.sin().sum(), (given[0], given[2]))])
        for errors, ours, theirs, truth in zip(sums, *found, strict=True):
            errors.add(ours.detach(), theirs.detach(), truth.detach())
    assert [errors.problem() for errors in sums] == [None] * 3
    names = ("hidden_states", "top_k_index", "top_k_weights")
    if name == "GptOss":
        names = ("hidden_states", "router_indices", "routing_weights")
    assert torch.equal(fused(**dict(zip(names, given, strict=True))), fused(*given))
    assert not fusedckpt.fuse(fused).fallbacks


def test_levels_chunks_and_undo():
    module, given = experts(), inputs()
    expected, kind = module(*given), type(module)
    attributes = set(vars(module))
    report = fuse(module, save="preact", chunks=2)
    assert report.swapped == {"": "Qwen3MoeExperts -> experts (silu, 2 chunks)"}
    assert "fused as experts, save=preact" in repr(module)
    torch.testing.assert_close(module(*given), expected)
    own = 4 * T * (D + K) + 8 * T * K

    def call(x, index, scores):
        return module(x, index, scores)

    assert saved_bytes(call, given) == own + 4 * T * K * 2 * 24
    with fusedckpt.saving("inputs"):
        assert saved_bytes(call, given) == own
    unfuse(module)
    assert (type(module), set(vars(module))) == (kind, attributes)
    assert fuse(module, experts=False).swapped == {}


def test_expert_parallel_tokens_and_changes():
    """Tokens of other ranks add nothing; with another activation its own forward runs."""
    module = experts()
    eager = copy.deepcopy(module)
    report = fuse(module)
    x, index, scores = inputs()
    index[:3] = E
    torch.testing.assert_close(module(x, index, scores), eager(x, index, scores))
    module.act_fn = eager.act_fn = nn.ReLU()
    torch.testing.assert_close(module(x, index, scores), eager(x, index, scores))
    assert report.fallbacks == {"": ("child", "act_fn")}


class DoubledExperts(nn.Module):
    """Experts whose result is doubled: recognized, but not equal."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 48, D))
        self.down_proj = nn.Parameter(torch.randn(E, D, 24))
        self.act_fn = nn.SiLU()

    def forward(self, x, index, scores):
        return 2 * fusedckpt.functional.experts(x, index, scores, self.gate_up_proj, self.down_proj)


class Squashed(DoubledExperts):
    def _apply_gate(self, z):
        gate, up = z.chunk(2, -1)
        return self.act_fn(gate) * up.tanh()


class CappedExperts(DoubledExperts):
    """Equal to silu up to the limit."""

    def __init__(self):
        super().__init__()
        self.limit = 100.0

    def _apply_gate(self, z):
        gate, up = z.chunk(2, -1)
        return self.act_fn(gate).clamp(max=self.limit) * up


class NormedExperts(DoubledExperts):
    def __init__(self):
        super().__init__()
        self.post_expert_norm = nn.LayerNorm(D)


class WithoutWeights(DoubledExperts):
    """With an expert that returns its input, as LongCat's."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E + 1, 48, D))


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (DoubledExperts, "differs"),
        (Squashed, "gating"),
        (CappedExperts, "gating"),
        (WithoutWeights, "shapes"),
        (NormedExperts, "parameters"),
    ],
)
def test_left_and_named(kind, key):
    report = fuse(kind().to(DEVICE), norm=False)
    assert report.swapped == {}
    assert report.left[""].key == key
    assert report.kinds == {"": "experts"}


@pytest.mark.parametrize(
    ("dtype", "path"), [(torch.float32, None), (torch.bfloat16, None), (torch.float16, "aten")]
)
def test_one_gate_that_decides_is_no_difference(dtype, path):
    """By large inputs most gates are shut or at the limit: all error is of the sums of a few."""
    module = experts("GptOss", hidden_size=32, intermediate_size=48).to(dtype)
    with forced_path(path):
        assert list(fuse(module).swapped) == [""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_limit_that_ends_is_a_difference(dtype):
    """Of values beyond those by which the gating is looked up."""
    module = experts("GptOss", hidden_size=32, intermediate_size=48)

    class Ends(type(module)):
        def _apply_gate(self, z):
            return super()._apply_gate(z).where(z[..., ::2] < 100, 7.0)

    module.__class__ = Ends
    reason = fuse(module.to(dtype)).left[""]
    assert reason.key == "differs"
    assert "at inputs of" in str(reason)


class Widened(DoubledExperts):
    """Gated in float32, and multiplied too, by its own forward alone; as Beam's and OpenAI's."""

    def __init__(self, implementation):
        super().__init__()
        self.config = Config(implementation)

    def _apply_gate(self, z):
        gate, up = z.float().chunk(2, -1)
        return (self.act_fn(gate) * up).to(z.dtype)

    def forward(self, x, index, scores):
        weights = self.gate_up_proj, self.down_proj
        if self.config._experts_implementation == "eager":
            weights = [w.to(torch.promote_types(w.dtype, torch.float32)) for w in weights]
        y = fusedckpt.functional.experts(x.to(weights[0].dtype), index, scores, *weights)
        return y.to(x.dtype)


class Config:
    def __init__(self, implementation):
        self._experts_implementation_internal = implementation

    @property
    def _experts_implementation(self):
        return self._experts_implementation_internal


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_compared_with_the_implementation_that_runs(implementation):
    module = Widened(implementation).to(DEVICE, torch.bfloat16)
    eager, report = copy.deepcopy(module), fuse(module)
    assert list(report.swapped or report.left) == [""]
    assert bool(report.swapped) == (implementation != "eager")
    if report.swapped:
        x, index, scores = inputs(torch.bfloat16)
        module(x, index, scores)
        assert not report.fallbacks
        for one in (module, eager):
            one.config._experts_implementation_internal = "eager"
        assert torch.equal(module(x, index, scores), eager(x, index, scores))
        assert report.fallbacks


def test_batched_products_are_more_exact():
    """So experts are compared with their class's own forward first."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 8}
    assert fuse(experts("Mixtral", "grouped_mm", **sizes)).swapped


@pytest.mark.parametrize(
    ("name", "is_first", "count"),
    [*product(("Qwen3Moe", "Mixtral", "GptOss"), (True, False), (1,)), ("Qwen3Moe", True, 2)],
)
def test_lora_on_experts_parameters(name, is_first, count):
    """peft's target_parameters, from before or after `fuse`: nothing dense is saved of one."""
    peft = pytest.importorskip("peft")

    def made(fuses):
        torch.manual_seed(1)
        model = nn.ModuleDict({"experts": experts(name)})
        report = fuse(model) if fuses and is_first else None
        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=names)
        model = peft.get_peft_model(model, config)
        if count == 2:
            model.add_adapter("other", config)
            model.base_model.set_adapter(["default", "other"])
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.3)
        return model, fuse(model) if fuses and not is_first else report

    (fused, report), (eager, _) = made(True), made(False)
    assert len(report.swapped) == 1

    def run(model):
        def call(x, index, scores):
            layer = model.base_model.model["experts"]
            y = layer(x, index.long(), scores)
            adapters = [p for p in model.parameters() if p.requires_grad]
            assert len(adapters) == 4 * count
            grads = torch.autograd.grad(y.sum(), adapters, retain_graph=True)
            return (y, *(grad.detach() for grad in grads))

        return call

    given = inputs()
    for ours, theirs in zip(run(fused)(*given), run(eager)(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not report.fallbacks
    own = 4 * T * (D + K) + 8 * T * K
    dense = 4 * E * 3 * 24 * D if count == 2 else 0
    layer = fused.base_model.model["experts"]
    assert saved_bytes(lambda *given: layer(*given), given) == own + dense


@pytest.mark.parametrize("is_first", [True, False])
def test_quantized_parameters(is_first):
    """They are read as they are, dense one after the other."""
    module, given = experts(), inputs()
    report = fuse(module) if is_first else None
    dense = copy.deepcopy(module)
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, quantize(getattr(module, name)))
        setattr(dense, name, nn.Parameter(getattr(module, name).dequantize()))
        forget()
    report = report or fuse(module)
    torch.testing.assert_close(module(*given), dense(*given))
    assert saved_bytes(lambda *given: module(*given), given) == 4 * T * (D + K) + 8 * T * K
    assert not report.fallbacks


def test_compiles_in_one_graph():
    module, given = experts(implementation="grouped_mm"), inputs()
    expected = module(*given)
    fuse(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), expected)
    assert saved_bytes(compiled, given) <= 4 * T * (D + K) + 8 * T * K


class DenseExperts(nn.Module):
    """Each expert gets as many rows, in products of batches, as Llama 4's."""

    def __init__(self, num_experts=3, d=16, f=24):
        super().__init__()
        self.num_experts, self.hidden_size = num_experts, d
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, d, 2 * f) / 4)
        self.down_proj = nn.Parameter(torch.randn(num_experts, f, d) / 5)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states):
        rows = hidden_states.view(self.num_experts, -1, self.hidden_size)
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, -1)
        return torch.bmm(up * self.act_fn(gate), self.down_proj).view(-1, self.hidden_size)


def test_dense_experts_are_experts_with_as_many_rows():
    eager = DenseExperts().to(DEVICE)
    fused = copy.deepcopy(eager)
    report = fuse(fused)
    assert report.swapped == {"": "DenseExperts -> experts (silu, weights as [in, out])"}
    x = randn(3 * 40, 16)
    results = []
    for module in (eager, fused):
        y = module(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])])
    torch.testing.assert_close(*results)
    # the rows; of each its expert's number and a score of one
    assert saved_bytes(fused, [x]) == x.nbytes + 3 * 40 * (8 + 4)
    assert saved_bytes(eager, [x]) > 4 * x.nbytes
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        fused(x[:-1])
