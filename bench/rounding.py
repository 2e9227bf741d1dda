"""Compare the errors of gradients where inputs are kept in fewer bits.

A small Llama in bfloat16, each layer in a checkpoint, or its layers fused: the forward is exact,
and backward recomputes from inputs as they were kept. The error of a parameter's gradient against
float64, over several batches, is divided by that of the eager model in bfloat16. At most 2 is the
rule for store="int8"; a table has the largest and the median ratio of all parameters, and how many
are above 2.

Cases: random weights; more layers; some channels or a token of the embedding many times larger, as
channels of trained models are; a model trained here on the documentation of Python, of half the
width.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bench.env import environment
from bench.options import Options
from bench.results import Row, append
from bench.tables import Columns, show, sources
from fusedckpt import checkpoint, fuse
from fusedckpt.kernels import int8
from fusedckpt.reporting.progress import progress

FILE = "rounding.jsonl"
# the text is read as bytes
VOCABULARY = 256
LIMIT = 2.0


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-6) for _ in range(2))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 6 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x [B, T, D]."""
        b, t, d = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Stack(nn.Module):
    """A language model of bytes; call: runs a layer."""

    def __init__(self, dim: int, layers: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.places = nn.Parameter(torch.randn(1024, dim) * 0.1)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        # a token whose embedding is so many times larger, and by how much
        self.hot_token = -1
        self.factor = 1.0

    def states(self, ids: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """Return the last hidden state of ids [B, T]."""
        x = self.embedding(ids) + self.places[: ids.shape[1]]
        if self.hot_token >= 0:
            scale = torch.ones_like(x[:1, :, :1])
            scale[:, self.hot_token] = self.factor
            x = x * scale
        for layer in self.layers:
            x = call(layer, x)
        return x

    def forward(self, ids: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """Return the loss of each next byte."""
        logits = self.head(self.norm(self.states(ids, call)))
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).to(wide), ids[:, 1:].flatten())


def grouped(x: Tensor, size: int) -> Tensor:
    """Return x in float32 as groups of the last dimension, [..., size]."""
    return x.detach().float().unflatten(-1, (-1, size))


def int8_of(size: int, x: Tensor) -> Tensor:
    """Return x rounded to int8 in groups, each with a scale in float16."""
    groups = grouped(x, size)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float().clamp(min=2.0**-24)
    return ((groups / scale).round().clamp(-127, 127) * scale).flatten(-2).to(x.dtype)


def fp8_of(size: int, x: Tensor) -> Tensor:
    """Return x rounded to float8 (e4m3) in groups, each with a scale in float32."""
    groups = grouped(x, size)
    scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
    values = (groups / scale).to(torch.float8_e4m3fn).float()
    return (values * scale).flatten(-2).to(x.dtype)


def run_eager(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer as it is."""
    return layer(x)


def run_rounded(rounded: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer in a checkpoint that keeps its input rounded: hooks see only the input."""
    with saved_tensors_hooks(rounded, lambda saved: saved):
        return checkpoint(layer, x)


def run_int8(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer in a checkpoint with store="int8"."""
    return checkpoint(layer, x, store="int8")


def as_it_is(model: Stack, ids: Tensor) -> Stack:
    """Return a model that is not changed."""
    return model


def fused(store: str | None, model: Stack, ids: Tensor) -> Stack:
    """Return a copy of a model with fused layers, after its first training call."""
    copy = deepcopy(model).train()
    fuse(copy, store=store)
    copy(ids, run_eager)
    return copy


class Format(NamedTuple):
    """A way to keep inputs: of layers in checkpoints, or of fused layers."""

    bits: float
    run: Callable[[nn.Module, Tensor], Tensor] = run_eager
    # returns the model to run
    prepare: Callable[[Stack, Tensor], Stack] = as_it_is


FORMATS: Mapping[str, Format] = {
    "bfloat16": Format(16, run_eager),
    'store="int8"': Format(8 + 16 / int8.GROUP, run_int8),
    "fuse": Format(16, prepare=partial(fused, None)),
    'fuse(store="int8")': Format(8 + 16 / int8.GROUP, prepare=partial(fused, "int8")),
    "int8, groups of 32": Format(8.5, partial(run_rounded, partial(int8_of, 32))),
    "int8, groups of 128": Format(8.125, partial(run_rounded, partial(int8_of, 128))),
    "fp8 (e4m3), groups of 128": Format(8.25, partial(run_rounded, partial(fp8_of, 128))),
}


class Case(NamedTuple):
    """A model, and the changes to its channels and tokens."""

    layers: int = 8
    seed: int = 1
    # of the embedding: some channels, and one token, so many times larger
    channels: float = 1
    token: float = 1
    is_trained: bool = False


CASES: Mapping[str, Case] = {
    "plain": Case(),
    "plain, seed 2": Case(seed=2),
    "24 layers": Case(layers=24),
    "channels x 50": Case(channels=50),
    "channels x 200": Case(channels=200),
    "channels x 1000": Case(channels=1000),
    "channels x 1000, seed 2": Case(channels=1000, seed=2),
    "a token x 200": Case(token=200),
    "a token and channels x 200": Case(token=200, channels=200),
    "24 layers, channels x 200": Case(layers=24, channels=200),
    "trained": Case(is_trained=True),
}
# of a model's channels
HOT = 3


def text() -> Tensor:
    """Return the bytes of Python's documentation of its own words."""
    topics = pydoc_data.topics.topics
    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([*joined.encode("utf-8", "replace")], dtype=torch.int64)


def batch_of(data: Tensor, sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """Return random parts of a text [sequences, length]."""
    starts = torch.randint(0, len(data) - length, (sequences,), generator=generator)
    return torch.stack([data[start : start + length] for start in starts])


def trained(model: Stack, data: Tensor, steps: int, length: int) -> list[float]:
    """Train a model in float32 by AdamW; return the losses."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    losses = []
    with progress("training", steps) as begin:
        for step in range(steps):
            begin(f"loss {losses[-1]:.2f}" if losses else "")
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1 - step / steps)
            loss = model(batch_of(data, 8, length, generator), run_eager)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def model_of(case: Case, chosen: Namespace, data: Tensor) -> tuple[Stack, list[float]]:
    """Return the model of a case in bfloat16, and the losses of its training."""
    torch.manual_seed(case.seed)
    dim = chosen.dim // 2 if case.is_trained else chosen.dim
    model = Stack(dim, case.layers, max(1, dim // 32))
    losses = trained(model, data, chosen.steps, chosen.seq) if case.is_trained else []
    with torch.no_grad():
        hot = torch.randperm(dim)[:HOT]
        model.embedding.weight[:, hot] *= case.channels
    if case.token > 1:
        model.hot_token, model.factor = chosen.seq // 3, case.token
    return model.bfloat16(), losses


def hottest(model: Stack, ids: Tensor) -> tuple[float, float]:
    """Return the largest channel's magnitude beside the median one's: at the input, at the end."""
    ratios = []

    def noted(layer: nn.Module, x: Tensor) -> Tensor:
        sizes = x.float().square().mean((0, 1)).sqrt()
        ratios.append((sizes.max() / sizes.median()).item())
        return layer(x)

    with torch.no_grad():
        model.states(ids, noted)
    return ratios[0], max(ratios)


def gradients_of(
    model: Stack, run: Callable[[nn.Module, Tensor], Tensor], batches: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of each parameter for all batches, in float64."""
    parameters = [*model.parameters()]
    found = [torch.autograd.grad(model(ids, run), parameters) for ids in batches]
    return [torch.stack([g.double() for g in grads]) for grads in zip(*found, strict=True)]


def errors_of(found: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Return the relative error of each parameter's gradient."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)]


def measured(name: str, chosen: Namespace, data: Tensor, facts: Row) -> list[Row]:
    """Return the rows of a case, one a format."""
    case = CASES[name]
    model, losses = model_of(case, chosen, data)
    generator = torch.Generator().manual_seed(100 + case.seed)
    batches = [batch_of(data, 1, chosen.seq, generator) for _ in range(chosen.batches)]
    truth = gradients_of(deepcopy(model).double(), run_eager, batches)
    start, most = hottest(model, batches[0])
    shared = {
        **facts,
        "command": "rounding",
        "case": name,
        "dtype": "bfloat16",
        "layers": case.layers,
        "dim": model.norm.weight.numel(),
        "seq": chosen.seq,
        "batches": chosen.batches,
        "hottest_at_start": start,
        "hottest": most,
        "losses": losses[:: max(1, len(losses) // 20)],
        "steps": len(losses),
    }
    rows: list[Row] = []
    eager: list[float] = []
    for label, kept in FORMATS.items():
        found = gradients_of(kept.prepare(model, batches[0]), kept.run, batches)
        errors = errors_of(found, truth)
        eager = eager or errors
        ratios = [a / b for a, b in zip(errors, eager, strict=True)]
        rows.append(
            {
                **shared,
                "name": label,
                "bits": kept.bits,
                "largest_error": max(errors),
                "median_error": median(errors),
                "largest_ratio": max(ratios),
                "median_ratio": median(ratios),
                "above_limit": sum(ratio > LIMIT for ratio in ratios),
                "parameters": len(ratios),
                "failure": None,
                "is_wrong": not math.isfinite(max(ratios)),
                "both_ms": [],
                "saved_bytes": None,
                "peak_bytes": None,
            }
        )
    return rows


COLUMNS: Columns = {
    "kept as": lambda row: row["name"],
    "bits": lambda row: f"{row['bits']:g}",
    "largest\nerror": lambda row: f"{row['largest_error']:.4f}",
    "median\nerror": lambda row: f"{row['median_error']:.4f}",
    "largest,\nx eager": lambda row: f"{row['largest_ratio']:.2f}",
    "median,\nx eager": lambda row: f"{row['median_ratio']:.2f}",
    "above 2": lambda row: f"{row['above_limit']} of {row['parameters']}",
}


def title_of(row: Row) -> str:
    """Return the model of a row, and how much larger than the median its largest channel is."""
    return (
        f"{row['case']}: {row['layers']} layers of {row['dim']}; the largest channel is "
        f"{row['hottest_at_start']:.1f} x the median one at the input, up to "
        f"{row['hottest']:.1f} x behind"
    )


def options(add: Options) -> None:
    """Add the options."""
    add.add_argument("--case", help="one case", choices=CASES, default=None)
    add.count("dim", "width", 256)
    add.count("seq", "bytes of a sequence", 256)
    add.count("batches", "sequences, each a gradient", 4)
    add.count("steps", "of training", 600)
    add.place(FILE)


def run(chosen: Namespace) -> int:
    """Measure, print and record the cases."""
    data = text()
    facts = environment(torch.device("cpu"), torch.bfloat16)
    for name in [chosen.case] if chosen.case else CASES:
        rows = measured(name, chosen, data, facts)
        if chosen.out is not None:
            append(rows, chosen.out / FILE)
        notes = sources([rows])
        if losses := rows[0]["losses"]:
            notes.insert(0, f"trained for {rows[0]['steps']} steps to {losses[-1]:.2f}")
        show(title_of(rows[0]), COLUMNS, rows, notes)
    return 0
