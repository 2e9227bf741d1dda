"""The estimate of a step: bytes of the real one, on tensors without memory."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from quantized_weight import Int8Rows
from report_models import CASES, case
from torch import nn
from torch.nn import functional as F
from zoo import Lambda

import fusedckpt
from fusedckpt.__main__ import main
from fusedckpt.autograd import private_memory
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels import routed, runtime
from fusedckpt.reporting.factory import made_by_factory
from fusedckpt.reporting.without_memory import MetaRun, on_meta

BATCH, SEQ, DIM = 2, 24, 16


@pytest.fixture(autouse=True)
def aten():
    with forced_path("aten"):
        yield


class MaskedAttention(nn.Module):
    """Reads a mask of integers, adds gradients of one tensor from several, and attends."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x, lengths):
        n = self.norm(x)
        q = self.q(n).unflatten(-1, (2, -1)).transpose(1, 2)
        positions = torch.arange(x.shape[1], device=x.device)
        mask = positions < lengths[:, None]
        # a mask of ones is none
        mask = None if mask.all() else mask[:, None, None]
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        y = x + self.out(F.silu(n) * y.transpose(1, 2).flatten(2))
        return y * y + n


def masked():
    return MaskedAttention(), (torch.randn(1, SEQ, DIM), torch.ones(1, dtype=torch.long))


def llama():
    transformers = pytest.importorskip("transformers", reason="needs the test extra")
    sizes = {"hidden_size": DIM, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


class Grouped(nn.Module):
    """Runs a grouped GEMM, whose shapes torch computes for bfloat16 alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, DIM, 32))
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        rows = x.flatten(0, 1)
        ends = torch.tensor([8, len(rows)], dtype=torch.int32, device=x.device)
        return self.mlp(F.grouped_mm(rows, self.weight, offs=ends))


def grouped():
    return Grouped(), torch.randn(1, SEQ, DIM)


def real(factory) -> tuple[Any, dict[str, Any]]:
    """Return the real model and inputs of the estimate's sizes."""
    if factory is grouped:
        return Grouped(), {"x": torch.randn(BATCH, SEQ, DIM)}
    if factory is masked:
        model, _ = masked()
        return model, {"x": torch.randn(BATCH, SEQ, DIM), "lengths": torch.zeros(BATCH).long()}
    model: Any = llama()
    model.config.use_cache = False
    ids = torch.randint(64, (BATCH, SEQ))
    return model.train(), {"input_ids": ids, "labels": ids}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made(factory, *sizes, **options):
    return made_by_factory("estimate", factory, *sizes, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("factory", [llama, masked, grouped])
def test_it_is_what_a_report_measures(factory, dtype):
    found = made(factory, BATCH, SEQ, dtype)
    with default_dtype(dtype):
        model, batch = real(factory)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = []
    for is_fused in (False, True):
        if is_fused:
            fusedckpt.fuse(model)
            fusedckpt.fuse(found.model)
        estimated = found.estimated()
        report = fusedckpt.report(model, optimizer=optimizer, **batch)
        assert estimated.sizes == report.sizes
        assert estimated.saved == report.saved
        assert estimated.fused == report.fused
        # memory within a kernel or block is not seen
        assert report.saved_bytes < estimated.peak_bytes <= report.peak_bytes
        if factory is llama and not is_fused:
            assert estimated.peak_bytes == report.peak_bytes
        saved.append(report.saved_bytes)
    assert saved[1] < saved[0]


class TiedAdapter(nn.Module):
    """A frozen linear with an adapter, a tied weight, and parameters that get no gradient."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, DIM), nn.Linear(DIM, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.base, self.unused = nn.Linear(DIM, DIM).requires_grad_(False), nn.Linear(DIM, DIM)
        self.a, self.b = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)
        self.register_buffer("scale", torch.ones(DIM))
        # neither a parameter nor a buffer
        self.offset = torch.ones(DIM)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale + self.offset
        x = self.base(x) + self.b(self.a(F.dropout(x, 0.1)))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        data = torch.randint(0, 99, (DIM, DIM), dtype=torch.int8)
        self.base = fusedckpt.Linear(DIM, DIM, bias=False)
        self.base.weight = nn.Parameter(Int8Rows(data, torch.ones(DIM)), False)
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)

    def forward(self, x):
        return self.last(torch.relu(self.base(self.first(x))))


LIVE = {
    "adapted": lambda: (TiedAdapter(), torch.randint(32, (2, 8))),
    "quantized": lambda: (Quantized(), torch.randn(2, 8, DIM)),
    "bag": lambda: (Bags("mean"), torch.randint(64, (4, 24))),
    "encoder": lambda: (nn.TransformerEncoderLayer(DIM, 2, 32), torch.randn(5, 2, DIM)),
    "checkpoint": lambda: (fusedckpt.checkpoint_module(TiedAdapter()), torch.randint(32, (2, 8))),
}


@pytest.mark.parametrize("name", [*LIVE, *CASES])
def test_a_model_that_has_memory_is_estimated_in_place(name):
    if name in LIVE:
        model, *args = LIVE[name]()
        kwargs, loss = {}, None
    else:
        model, args, kwargs, loss = case(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, momentum=0.9)
    before = dict([*model.named_parameters(), *model.named_buffers()])
    state = {key: x.clone() for key, x in model.state_dict().items() if type(x) is torch.Tensor}
    estimated = fusedckpt.estimate(model, *args, loss=loss, optimizer=optimizer, **kwargs)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[key] is x and not x.is_meta for key, x in before.items())
    assert all(p.grad is None for p in trained)
    assert all(torch.equal(model.state_dict()[key], x) for key, x in state.items())
    assert not optimizer.state
    report = fusedckpt.report(model, *args, loss=loss, optimizer=optimizer, **kwargs)
    assert estimated.sizes == report.sizes
    assert estimated.saved == report.saved
    assert estimated.resident_bytes == report.resident_bytes
    # random states of checkpoints, on the host, and the workspace of kernels
    least = 0 if name in ("checkpoint", "reentrant", "half", "bag", "quantized") else 0.95
    assert least * report.peak_bytes <= estimated.peak_bytes <= report.peak_bytes
    assert (estimated.device, estimated.is_estimate, report.is_estimate) == ("cpu", True, False)
    assert str(estimated).startswith(f"Estimated memory of one training step of {report.model}")


class NormWithGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = fusedckpt.GatedRMSNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.norm(x, self.gate(x))


class RoutedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 4), fusedckpt.Experts(4, DIM, 8 * DIM)

    def forward(self, x):
        scores, index = self.router(x).topk(2)
        return self.experts(x, index, scores.softmax(-1))


def rounded():
    return fusedckpt.checkpoint_module(nn.Linear(DIM, DIM), store="int8")


ROWS = 512
# layers whose kernels cut rows into blocks, and the dtype
IN_BLOCKS = {
    "mlp": (lambda: fusedckpt.MLP(DIM, 8 * DIM, save="preact"), torch.float32),
    "gated mlp": (lambda: fusedckpt.GatedMLP(DIM, 8 * DIM, save="preact"), torch.float32),
    "norm": (lambda: fusedckpt.RMSNorm(DIM), torch.bfloat16),
    "layer norm": (lambda: fusedckpt.LayerNorm(DIM), torch.float32),
    "gated norm": (NormWithGate, torch.bfloat16),
    "experts": (RoutedExperts, torch.float32),
    "rounded": (
        lambda: fusedckpt.checkpoint_module(nn.Linear(DIM, DIM), store="int8"),
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_temporary_tensors_of_a_block_alone_count(name, monkeypatch):
    """An estimate takes as much as the step; of all rows at once they would exceed its peak."""
    monkeypatch.setattr(runtime, "BLOCK_ELEMENTS", ROWS)
    make, dtype = IN_BLOCKS[name]
    model = make().to(dtype)
    x = torch.randn(1, ROWS, DIM, dtype=dtype)
    estimated, report = (read(model, x) for read in (fusedckpt.estimate, fusedckpt.report))
    assert estimated.saved == report.saved
    # a GPU's order of slots is another than a CPU's
    most = 1.001 if name == "experts" else 1.0
    assert 0.97 * report.peak_bytes <= estimated.peak_bytes <= most * report.peak_bytes


@pytest.mark.parametrize("way", ["eager", "fused", "fused in a checkpoint"])
def test_experts_get_rows_without_numbers(way):
    transformers = pytest.importorskip("transformers", reason="needs the test extra")
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    sizes: Any = {"hidden_size": DIM, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=8)
    config._experts_implementation = "grouped_mm"
    model: Any = qwen.Qwen3MoeSparseMoeBlock(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if way != "eager":
        assert fusedckpt.fuse(model).swapped
    if way == "fused in a checkpoint":
        model = fusedckpt.checkpoint_module(model)
    x = torch.randn(2, 8, DIM)
    estimated, report = (read(model, x) for read in (fusedckpt.estimate, fusedckpt.report))
    assert estimated.sizes == report.sizes
    assert estimated.saved == report.saved
    # a GPU's order of slots is another than a CPU's; a checkpoint saves random states on the host
    least, most = (0, 1.0) if "checkpoint" in way else (0.95, 1.01)
    assert least * report.peak_bytes <= estimated.peak_bytes <= most * report.peak_bytes


def test_quantized_experts_get_equally_many_rows():
    with MetaRun():
        index = torch.zeros(8, 2, dtype=torch.long, device="meta")
        route = routed.route(index, 4, None)
    assert route.pieces == tuple((e, slice(4 * e, 4 * e + 4)) for e in range(4))


def test_memory_of_the_model_s_size_is_not_allocated():
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 512)
    with torch.profiler.profile(profile_memory=True) as profiler:
        fusedckpt.estimate(model, x, optimizer=optimizer)
    sizes = [max(0, event.self_cpu_memory_usage) for event in profiler.key_averages()]
    assert sum(sizes) < 2**17


def vast():
    """Return a model whose embedding alone takes 32 GiB, and tokens."""
    mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    return nn.Sequential(nn.Embedding(2**24, 512), mlp), torch.zeros(1, 1, dtype=torch.long)


@pytest.mark.parametrize("command", [(), ("estimate",)])
def test_nothing_is_allocated(command, capsys):
    options = ["--batch", "64", "--seq", "1024", "--optimizer", "SGD"]
    assert main([*command, f"{__name__}:vast", *options]) == 0
    printed = capsys.readouterr().out
    assert "1 x nn.Linear + gelu + nn.Linear -> mlp" in printed
    assert "Estimate of a training step of Sequential, int64 [64, 1024]" in printed
    lines = [line.replace("│", "").split() for line in printed.splitlines()]
    assert ["parameters", *["32.0", "GiB"] * 2] in lines
    assert ["optimizer", "state", *["0", "B"] * 2] in lines
    # x, z, h and the result, whose square is the loss; x and the result
    assert ["saved", "for", "backward", "1.2", "GiB", "256.0", "MiB"] in lines


class ReadsSign(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


MAKERS = {
    "reads": lambda: (ReadsSign(4, 4), torch.randn(2, 4)),
    "linear": lambda: nn.Linear(4, 4),
    "a device": lambda: (nn.Linear(4, 4, device="cpu"), torch.randn(2, 4)),
    "frozen": lambda: (nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)),
    "number": lambda: 3,
    "three": lambda: (nn.Linear(4, 4), 1, 2, {}),
    "llama": llama,
}


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "reads",
            {"batch": 3},
            r"at .*test_estimate.py:\d+: its code reads the value of an activation",
        ),
        ("linear", {"batch": 3}, "Linear takes input, and is no language model"),
        ("a device", {"batch": 3}, "weight is on cpu: let the factory make the model of a config"),
        ("frozen", {"batch": 3}, "no parameter of Linear requires grad"),
        ("number", {"batch": 3}, "the factory must return an nn.Module, .* got int"),
        ("three", {"batch": 3}, "got Linear, int, int, dict"),
        ("llama", {"batch": 3}, "pass batch and seq"),
        ("linear", {"batch": 0}, "batch must be an integer from 1"),
        ("linear", {"optimizer": "Adams"}, "optimizer must be a class of torch.optim, got 'Adams'"),
        ("linear", {"dtype": torch.int8}, "dtype"),
    ],
)
def test_errors(name, sizes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        made(MAKERS[name], **sizes).estimated()


def test_an_estimate_needs_a_model(capsys):
    with pytest.raises(SystemExit):
        main(["--batch", "3"])
    assert "an estimate needs MODULE:FACTORY" in capsys.readouterr().err


def test_values_are_forgotten_where_numbers_are_written():
    with on_meta(MetaRun()):
        count = torch.arange(4)
        view = count[2:]
        count += 1
        assert view.sum() == 7
        assert count.is_meta
        # of a number that has no value
        count += torch.randn(4).round().long()
        for tensor in (count, view):
            with pytest.raises(RuntimeError, match="meta tensors have no values"):
                tensor.sum().item()


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bags = nn.EmbeddingBag(64, DIM, mode=mode)
        self.out = nn.Linear(DIM, 8)

    def forward(self, indices):
        return self.out(torch.tanh(self.bags(indices)))


@pytest.mark.parametrize("count", [4, 64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_save_the_bytes_of_a_cpu(mode, count):
    model, indices = Bags(mode), torch.zeros(count, 24, dtype=torch.long)
    estimated = fusedckpt.estimate(model, indices)
    assert estimated.saved == fusedckpt.report(model, indices).saved


class SparseEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, DIM, sparse=True)

    def forward(self, indices):
        return self.embedding(indices).square().mean()


OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    kind: [{}] if kind in ("Muon", "SparseAdam") else [{"foreach": False}, {"foreach": True}]
    for kind in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam"),
        *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
    if hasattr(torch.optim, kind)
}
OPTIMIZERS["AdamW"].append({"fused": True})
OPTIMIZERS["SGD"].append({"momentum": 0.9, "foreach": True})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_has_the_bytes_of_its_own_steps(kind):
    for options in OPTIMIZERS[kind]:
        layers = [nn.Linear(DIM, 8, bias=kind != "Muon"), nn.Tanh()]
        model, x = nn.Sequential(*layers), torch.randn(4, DIM)
        if kind == "SparseAdam":
            model, x = SparseEmbedding(), torch.zeros(4, 24, dtype=torch.long)
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        estimated = fusedckpt.estimate(model, x, optimizer=optimizer)
        reported = fusedckpt.report(model, x, optimizer=optimizer)
        assert estimated.sizes == reported.sizes, options
        peaks = [
            max(moment.live_bytes for moment in report.timeline if moment.phase == "optimizer")
            for report in (estimated, reported)
        ]
        # the number of different rows is a value, and not known
        assert (0.9 if kind != "SparseAdam" else 0) * peaks[1] <= peaks[0] <= peaks[1], options


def test_an_optimizer_on_a_gpu_updates_all_parameters_at_once():
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False, device="meta") for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(1, DIM, device="meta")
    one_by_one = fusedckpt.estimate(model, x, optimizer=optimizer)
    with private_memory.optimizers_of_a(torch.device("cuda")):
        at_once = fusedckpt.estimate(model, x, optimizer=optimizer)
    # the square roots of all weights, in place of one's, its denominator and its quotient
    assert at_once.peak_bytes - one_by_one.peak_bytes == 4 * DIM * DIM


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("SparseAdam", "^estimate: SparseAdam takes only sparse gradients, got a dense one"),
        ("LBFGS", r"^estimate: expected an optimizer whose step\(\) needs no closure, got LBFGS"),
    ],
)
def test_optimizers_that_take_no_such_step(optimizer, message):
    with pytest.raises(ValueError, match=message):
        made(lambda: (nn.Linear(DIM, 8), torch.randn(4, DIM)), optimizer=optimizer).estimated()


def autocasts(x):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, torch.ones(8, DIM))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(DIM, DIM), Lambda(autocasts)),
            "^estimate: autocast is enabled, and does nothing on the meta device",
        ),
        (
            lambda: nn.Sequential(nn.Linear(DIM, DIM), Lambda(lambda x: x * x.mean().item())),
            "its code reads the value of an activation",
        ),
        (lambda: nn.LSTM(DIM, DIM), "the model is an nn.LSTM"),
        (lambda: nn.Linear(DIM, 8).requires_grad_(False), "requires grad"),
        (lambda: 3, "model must be an nn.Module, got int"),
    ],
)
def test_models_that_cannot_be_estimated(model, message):
    model = model()
    with pytest.raises((TypeError, ValueError), match=message):
        fusedckpt.estimate(model, torch.randn(4, DIM))
    tensors = [*model.parameters()] if isinstance(model, nn.Module) else []
    assert not any(x.is_meta or x.grad is not None for x in tensors)


def test_autocast_and_hooks_around_are_refused():
    model, x = nn.Linear(DIM, 8), torch.randn(4, DIM)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        fusedckpt.estimate(model, x)
    model.weight.register_post_accumulate_grad_hook(lambda weight: None)
    with pytest.raises(ValueError, match="weight has hooks that run when its gradient"):
        fusedckpt.estimate(model, x)


def test_a_recompute_runs_in_the_module_it_calls():
    model, args, _, loss = case("checkpoint")
    estimated = fusedckpt.estimate(model, *args, loss=loss)
    reported = fusedckpt.report(model, *args, loss=loss)
    for report in (estimated, reported):
        modules = {moment.module for moment in report.timeline if moment.phase == "backward"}
        assert {"inner.0", "inner.1", "inner.2", "first"} <= modules
