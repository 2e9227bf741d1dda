"""The largest inputs that fit a card: by estimates, and right against a measured step."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fusedckpt
from fusedckpt.__main__ import main
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.planning.max_size import WAYS, MaxSizes, Peaks, _largest, _measured_peak
from fusedckpt.reporting.versions import checkout_commit

MIB = 2**20
SLACK = 0.05


@pytest.fixture(autouse=True)
def aten():
    with forced_path("aten"):
        yield


def mlp(size):
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    return nn.Sequential(*layers), torch.randn(size, 64)


def language_model(name, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    limits = {"max_position_embeddings": 8192}
    config = transformers.AutoConfig.for_model(name, **sizes, **limits, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def llama():
    return language_model("llama", intermediate_size=96)


def mixture():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return language_model("qwen3_moe", **experts, num_key_value_heads=2, head_dim=16)


def convolutions(size):
    # oneDNN pads channels to multiples of 16 within its ops
    layers = (nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU()) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(size, 16, 16, 16)


def measured_peak(factory, way, size):
    """Return the peak of a real step at a size."""
    if factory in (llama, mixture):
        model = factory()
        # as the estimate's: keys and values of a cache would take a quarter of the peak
        model.config.use_cache = False
        ids = torch.zeros(1, size, dtype=torch.long)
        args, kwargs = (), {"input_ids": ids, "labels": ids}
    else:
        model, *args = factory(size)
        kwargs = {}
    WAYS[way](model)
    optimizer = torch.optim.SGD(model.parameters())
    return fusedckpt.report(model, *args, optimizer=optimizer, **kwargs).peak_bytes


TOKENS = {"step": 64, "grows": "seq", "batch": 1}


@pytest.mark.parametrize(
    ("factory", "left", "options"),
    [
        (mlp, {"fuse, head"}, {"step": 64}),
        (llama, set(), TOKENS),
        (mixture, set(), TOKENS | {"ways": ("eager", "fuse, head", "fuse, checkpoint, head")}),
        (convolutions, set(), {"step": 8, "ways": ("eager", "torch checkpoint")}),
    ],
    ids=["mlp", "llama", "mixture", "convolutions"],
)
def test_the_answer_fits_a_measured_step_and_a_larger_one_does_not(factory, left, options):
    """In every way that the first two take; an estimate is a lower bound, and close."""
    options = options | {"slack": SLACK, "device": "cpu", "optimizer": "SGD"}
    sizes = fusedckpt.find_max_size(factory, [16 * MIB], **options)
    assert isinstance(sizes, MaxSizes)
    assert sizes.left.keys() == left
    limit = (1 - SLACK) * 16 * MIB
    for answer in sizes.largest:
        assert answer.peak_bytes <= limit < answer.next_peak_bytes
        fitting, larger = (
            measured_peak(factory, answer.way, size)
            for size in (answer.size, round(1.1 * answer.size))
        )
        assert fitting <= 16 * MIB < larger
        # the order of slots of experts is that of a GPU: some bytes of indices
        least = 0.999 if factory is mixture else 1.0
        assert least * answer.peak_bytes <= fitting <= 1.01 * answer.peak_bytes


@pytest.mark.parametrize(
    "peak",
    [lambda n: 100 + 7 * n, lambda n: 50 + n * n, lambda n: max(900, 30 * n, 40 * n - 2000)],
    ids=["line", "parabola", "pieces"],
)
def test_few_estimates_find_the_answer(peak):
    counts = []
    peaks = Peaks(lambda size: counts.append(size) or peak(size), 1)
    for card in (1000, 10_000):
        best = max(n for n in range(2000) if peak(n) <= card)
        answer = _largest(peaks, "eager", card, slack=0.0)
        assert answer.size == best
        # the peaks grow ever faster: a line is below them
        assert card < answer.next_peak_bytes <= peak(best + 1)
    assert len(counts) <= 12


def test_nothing_fits_a_small_card():
    peaks = Peaks(lambda size: 10**6 + size, 1)
    assert _largest(peaks, "eager", 1000, slack=0.0).size == 0


def test_gradients_that_exist_take_their_bytes():
    options = {"step": 64, "ways": ["eager"], "optimizer": None}
    parameters = sum(p.nbytes for p in mlp(1)[0].parameters())
    alone, accumulated = (
        fusedckpt.find_max_size(mlp, [64 * MIB], accumulate=accumulate, **options).largest[0]
        for accumulate in (False, True)
    )
    assert accumulated.size <= alone.size
    per_sample = (alone.next_peak_bytes - alone.peak_bytes) / 64
    assert (alone.size - accumulated.size) * per_sample <= parameters + 64 * per_sample


def scratch(x):
    """Return x, by an op that allocates three tensors more, which an estimate does not see."""
    return Scratch.apply(x)


class Scratch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if not x.is_meta:
            x.repeat(8, 1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class Unseen(nn.Sequential):
    def forward(self, x):
        return super().forward(scratch(super().forward(x)))


def unseen(size):
    return Unseen(nn.Linear(64, 64), nn.GELU()), torch.randn(size, 64)


@pytest.mark.parametrize(
    ("factory", "options"),
    [(mlp, {}), (unseen, {}), (llama, TOKENS | {"accumulate": True, "ways": ["fuse, head"]})],
    ids=["mlp", "unseen", "llama"],
)
def test_measured_steps_fit_and_no_larger_one(factory, options):
    options = {"step": 64, "device": "cpu", "ways": ["fuse"]} | options
    for_cards = [4 * MIB, 6 * MIB]
    estimates = fusedckpt.find_max_size(factory, for_cards, **options)
    sizes = fusedckpt.find_max_size(factory, for_cards, measure="cpu", **options)
    assert (estimates.measured_on, sizes.measured_on) == ("", "cpu")
    for estimate, answer in zip(estimates.largest, sizes.largest, strict=True):
        limit = 0.9 * answer.card_bytes
        assert answer.peak_bytes <= limit < answer.next_peak_bytes
        assert answer.size < estimate.size if factory is unseen else answer.size <= estimate.size
    assert "measured by a step on cpu" in str(sizes)


def test_no_card_is_larger_than_the_gpu_that_measures(monkeypatch):
    properties = SimpleNamespace(total_memory=MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ValueError, match=r"a card of 2.0 MiB cannot be measured on cuda"):
        fusedckpt.find_max_size(mlp, [2 * MIB], measure="cuda")


def test_a_step_without_memory_does_not_fit(monkeypatch):
    properties = SimpleNamespace(total_memory=2 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def out_of_memory(accumulate):
        raise torch.OutOfMemoryError

    made = SimpleNamespace(measured=out_of_memory, model=nn.Linear(2, 2))
    assert _measured_peak(made, False) == 2 * MIB


def test_the_command_prints_draws_and_records(tmp_path, capsys):
    record, figure = tmp_path / "sizes.jsonl", tmp_path / "sizes.svg"
    options = ["--step", "64", "--cards", "0.02", "--ways", "eager; fuse, head; fuse"]
    files = ["--json", str(record), "--plot", str(figure)]
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    assert main(["fits", f"{__name__}:mlp", *options, *files]) == 0
    printed = capsys.readouterr().out
    assert "Largest size of a training step of Sequential, AdamW: estimated" in printed
    assert "no GPU was used" in printed
    assert "fuse, head: head: the model is no causal language model" in printed
    line = json.loads(record.read_text())
    assert line["command"] == "fits"
    assert (line["torch"], line["fusedckpt"]) == (torch.__version__, fusedckpt.__version__)
    assert line["torch_commit"] == torch.version.git_version
    assert line["commit"] == checkout_commit()
    assert figure.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grows": "width"}, "grows must be one of factory, seq, batch, got 'width'"),
        ({"step": 0}, "step must be an integer from 1"),
        ({"ways": ["fused"]}, "expected ways among eager, .* got 'fused'"),
        ({"slack": 1.0}, "slack must be from 0.0 to below 1.0, got 1.0"),
        ({"cards": []}, "expected at least one card"),
        ({"cards": ["much"]}, "find_max_size: a budget is bytes"),
        ({"optimizer": "Adams"}, "optimizer must be a class of torch.optim, got 'Adams'"),
        ({"factory": lambda: mlp(2)}, "the factory takes no size"),
        ({"measure": "meta"}, "measure must be a device with memory, got 'meta'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        fusedckpt.find_max_size(**{"factory": mlp, "cards": ["1GiB"]} | options)
