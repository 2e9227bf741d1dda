"""The estimate of a step: bytes of the real one, on tensors without memory."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedckpt
from fusedckpt.__main__ import main
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.reporting.estimate import estimate
from fusedckpt.reporting.without_memory import MetaRun, on_meta

BATCH, SEQ, DIM = 2, 24, 16


@pytest.fixture(autouse=True)
def aten():
    with forced_path("aten"):
        yield


class Masked(nn.Module):
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
    return Masked(), (torch.randn(1, SEQ, DIM), torch.ones(1, dtype=torch.long))


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


def real(factory):
    """Return the real model and inputs of the estimate's sizes."""
    if factory is grouped:
        return Grouped(), {"x": torch.randn(BATCH, SEQ, DIM)}
    if factory is masked:
        model, _ = masked()
        return model, {"x": torch.randn(BATCH, SEQ, DIM), "lengths": torch.zeros(BATCH).long()}
    model = llama()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("factory", [llama, masked, grouped])
def test_it_is_what_a_report_measures(factory, dtype):
    found = estimate(factory, BATCH, SEQ, dtype)
    with default_dtype(dtype):
        model, batch = real(factory)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (found.eager, found.fused):
        report = fusedckpt.report(model, **batch, optimizer=optimizer)
        assert step.saved_bytes == report.saved_bytes
        # memory within a kernel or block is not seen
        assert report.saved_bytes < step.least_peak_bytes <= report.peak_bytes
        if step is found.eager:
            if factory is llama:
                assert step.least_peak_bytes == report.peak_bytes
            fusedckpt.fuse(model)
    assert found.fused.saved_bytes < found.eager.saved_bytes
    sizes = report.parameter_bytes, report.gradient_bytes, report.optimizer_bytes
    assert sizes == (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes)


def vast():
    """Return a model whose embedding alone takes 32 GiB, and tokens."""
    mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    return nn.Sequential(nn.Embedding(2**24, 512), mlp), torch.zeros(1, 1, dtype=torch.long)


def test_nothing_is_allocated(capsys):
    options = ["--batch", "64", "--seq", "1024", "--optimizer", "SGD"]
    assert main([f"{__name__}:vast", *options]) == 0
    printed = capsys.readouterr().out
    assert "1 x nn.Linear + gelu + nn.Linear -> mlp" in printed
    assert "Estimate of a training step of Sequential, int64 [64, 1024]" in printed
    lines = [line.replace("│", "").split() for line in printed.splitlines()]
    assert ["parameters", *["32.0", "GiB"] * 2] in lines
    assert ["state", "of", "SGD", *["0", "B"] * 2] in lines
    # x, z, h and the result, whose square is the loss; x and the result
    assert ["saved", "for", "backward", "1.2", "GiB", "256.0", "MiB"] in lines


class Reads(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


MAKERS = {
    "reads": lambda: (Reads(4, 4), torch.randn(2, 4)),
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
        ("reads", {"batch": 3}, r"at .*test_estimate.py:\d+: the value of an activation is read"),
        ("linear", {"batch": 3}, "Linear takes input, and is no language model"),
        ("a device", {"batch": 3}, "weight is on cpu: let the factory make the model of a config"),
        ("frozen", {"batch": 3}, "no parameter of Linear requires grad"),
        ("number", {"batch": 3}, "expected of the factory an nn.Module, or .* got int"),
        ("three", {"batch": 3}, "got Linear, int, int, dict"),
        ("llama", {"batch": 3}, "expected batch and seq"),
        ("linear", {"batch": 0}, "batch must be an integer from 1"),
        ("linear", {"optimizer": "Adams"}, "optimizer must be a class of torch.optim, got 'Adams'"),
        ("linear", {"dtype": torch.int8}, "dtype"),
    ],
)
def test_errors(name, sizes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        estimate(MAKERS[name], **sizes)


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
            with pytest.raises(RuntimeError, match="meta tensors have none"):
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
    def make():
        return Bags(mode), torch.zeros(count, 24, dtype=torch.long)

    made, indices = make()
    assert estimate(make, batch=count).eager.saved_bytes == (
        fusedckpt.report(made.to("cpu"), indices.to("cpu")).saved_bytes
    )


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, DIM, sparse=True)

    def forward(self, indices):
        return self.embedding(indices).square().mean()


@pytest.mark.parametrize("optimizer", ["Adafactor", "ASGD", "NAdam", "SparseAdam"])
def test_optimizers_that_read_numbers(optimizer):
    def make():
        if optimizer == "SparseAdam":
            return Sparse(), torch.zeros(4, 24, dtype=torch.long)
        return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh()), torch.randn(4, DIM)

    model, x = make()
    kind = getattr(torch.optim, optimizer)
    reported = fusedckpt.report(model, x, optimizer=kind(model.parameters()))
    estimated = estimate(make, optimizer=optimizer)
    assert estimated.optimizer_bytes == reported.optimizer_bytes
    assert estimated.eager.saved_bytes == reported.saved_bytes
    assert 0.9 * reported.peak_bytes <= estimated.eager.least_peak_bytes <= reported.peak_bytes


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("SparseAdam", "^estimate: SparseAdam takes sparse gradients alone, got a dense one"),
        ("LBFGS", r"^estimate: expected an optimizer whose step\(\) needs no closure, got LBFGS"),
    ],
)
def test_optimizers_that_take_no_such_step(optimizer, message):
    with pytest.raises(ValueError, match=message):
        estimate(lambda: (nn.Linear(DIM, 8), torch.randn(4, DIM)), optimizer=optimizer)
