"""Plan random models within random budgets, and compare what was claimed with what is.

    python tests/budgets.py --runs 200 --seed 1 [--model llama] [--rounds 0]

Prints a line per run: what was asked, predicted and measured in the loop that follows, in MiB, the
extra time that the plan claims, its error, and what it takes, in per cent of the forward; the ratio
of the two after x, or ~ where the plan's page has a prediction. Exits with 1 if a
budget was exceeded. Peaks are of a step of its own, times medians of steps in turns.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from plan_models import convolutional, transformer
from torch import Tensor, nn
from zoo import Residual

import fusedckpt
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.planning.rules import by_rule
from fusedckpt.reporting.trial import tensors_of

Made = tuple[nn.Module, dict[str, Any]]


def _mlp(width: int) -> Residual:
    return Residual(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


class Called(nn.Module):
    """Modules, called by a function of them and the input."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **parts: Any):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.call(self, x)


def _coded(model: Any, x: Tensor) -> Tensor:
    # an activation and a residual in the model's own code
    for layer in model.layers:
        x = x + layer(x).relu() * 0.5
    return x


def _dense(model: Any, x: Tensor) -> Tensor:
    # each layer gets the outputs of all layers before it
    features = [model.stem(x)]
    for layer in model.layers:
        features.append(layer(torch.cat(features, 1)))
    return torch.cat(features, 1)


def _unet(model: Any, x: Tensor) -> Tensor:
    # down and up again, with skip connections
    skips = []
    for i, block in enumerate(model.down):
        x = block(nn.functional.max_pool2d(x, 2) if i else x)
        skips.append(x)
    for block, skip in zip(model.up, skips[-2::-1], strict=True):
        x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], 1))
    return x


def _siamese(model: Any, x: Tensor) -> Tensor:
    # one tower for two inputs, and a head of units that run once
    y = -x
    for unit in model.tower:
        x, y = unit(x), unit(y)
    x = x - y
    for unit in model.head:
        x = unit(x)
    return x


def _recurrent(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(x)[0]
    return x


def _double(before: int, after: int) -> nn.Module:
    """Return convolutions that end in an in-place ReLU."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(True),
        nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(True),
    )  # fmt: skip


def unet(width: int, depth: int) -> nn.Module:
    """Return a U-Net."""
    sizes = [width * 2**i for i in range(depth)]
    down = [_double(a, b) for a, b in zip([3, *sizes], sizes, strict=False)]
    ups = zip(sizes[:0:-1], sizes[-2::-1], strict=True)
    return Called(_unet, down=down, up=[_double(a + b, b) for a, b in ups])


def densenet(growth: int, depth: int) -> nn.Module:
    """Return a DenseNet's block."""
    layers = [
        nn.Sequential(
            nn.BatchNorm2d(growth * (i + 1)), nn.ReLU(),
            nn.Conv2d(growth * (i + 1), growth, 3, padding=1),
        )
        for i in range(depth)
    ]  # fmt: skip
    return Called(_dense, stem=nn.Conv2d(3, growth, 3, padding=1), layers=layers)


def chain(draw: random.Random) -> Made:
    """Draw a chain of layers, in one Sequential or in several."""
    width, rows = draw.choice([48, 64, 128]), draw.choice([512, 1024, 2048])
    layers: list[nn.Module] = []
    x = torch.randn(rows, width)
    for _ in range(draw.randint(4, 14)):
        after = draw.choice([width, width, 64, 96, 160])
        linear = nn.Linear(width, after)
        layers += draw.choice([
            [linear, nn.GELU()],
            [nn.LayerNorm(width), linear, nn.ReLU()],
            [linear, nn.Dropout(0.1), nn.Tanh()],
            [linear, nn.BatchNorm1d(after), nn.SiLU()],
            [_mlp(width), linear],
        ])  # fmt: skip
        width = after
    if draw.random() < 0.5:
        at = draw.randrange(1, len(layers))
        layers = [nn.Sequential(*layers[:at]), nn.Sequential(*layers[at:])]
    return nn.Sequential(*layers), {"input": x}


# options of transformers' configurations
HF: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 172, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 128},
    "gemma2": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
    | {"head_dim": 16, "attn_implementation": "eager"},
    "bloom": {"hidden_size": 64, "attn_implementation": "eager"},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "decoder_start_token_id": 0},
    "recurrent_gemma": {"hidden_size": 64, "intermediate_size": 192, "lru_width": 64}
    | {"num_key_value_heads": 2, "attention_window_size": 64},
    "vit": {"hidden_size": 64, "intermediate_size": 256, "image_size": 64, "patch_size": 8}
    | {"num_labels": 10},
    "resnet": {"embedding_size": 16, "hidden_sizes": (16, 32), "depths": (2, 3)}
    | {"layer_type": "basic", "num_labels": 10},
    "wav2vec2-conformer": {"hidden_size": 48, "intermediate_size": 96, "conv_dim": (32, 32)}
    | {"conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    | {"layerdrop": 0.0, "mask_time_prob": 0.0},
}
_IMAGES = "ForImageClassification"
AUTO = {"t5": "ForSeq2SeqLM", "vit": _IMAGES, "resnet": _IMAGES, "wav2vec2-conformer": ""}
INPUTS = {
    "vit": {"pixel_values": (8, 3, 64, 64)},
    "resnet": {"pixel_values": (8, 3, 64, 64)},
    "wav2vec2-conformer": {"input_values": (2, 4000)},
}


def transformers_model(kind: str, draw: random.Random, fused: bool = False) -> Made:
    """Draw a model of transformers."""
    import transformers

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
    names = {"t5": "num_layers", "gpt2": "n_layer", "bloom": "n_layer"}
    layers = names.get(kind, "num_hidden_layers")
    options = {"num_attention_heads": 4, layers: draw.choice([3, 6]), **HF[kind]}
    if kind == "resnet":
        options = HF[kind]
    elif kind not in INPUTS:
        options |= {"vocab_size": draw.choice([128, 1000]), **special}
    config = transformers.AutoConfig.for_model(kind, **options)
    auto = getattr(transformers, f"AutoModel{AUTO.get(kind, 'ForCausalLM')}")
    model = auto.from_config(config).train()
    if fused:
        fusedckpt.fuse(model)
    if kind in INPUTS:
        return model, {name: torch.randn(size) for name, size in INPUTS[kind].items()}
    tokens = torch.randint(3, 128, (draw.choice([2, 4]), 128))
    has_labels = kind == "t5" or draw.random() < 0.7
    return model, {"input_ids": tokens, **({"labels": tokens} if has_labels else {})}


def _library(kind: str, fused: bool = False) -> Callable[[random.Random], Made]:
    return lambda draw: transformers_model(kind, draw, fused)


MODELS: dict[str, Callable[[random.Random], Made]] = {
    **{f"chain {i}": (lambda _, seed=i: chain(random.Random(seed))) for i in range(12)},
    **{kind: _library(kind) for kind in ("llama", "gpt2", "vit")},
    "vit fused": _library("vit", fused=True),
    **{kind: _library(kind) for kind in ("t5", "resnet")},
    "convolutions": lambda draw: (
        convolutional(6, flat=draw.random() < 0.5),
        {"input": torch.randn(16, 1, 28, 28)},
    ),
    "code between": lambda draw: (
        Called(_coded, layers=[nn.Linear(128, 128) for _ in range(draw.choice([6, 12]))]),
        {"x": torch.randn(1024, 128)},
    ),
    "transformer": lambda draw: (
        transformer(draw.choice([4, 8])),
        {"tokens": torch.randint(128, (4, 64))},
    ),
    "densenet": lambda draw: (densenet(16, draw.choice([4, 8])), {"x": torch.randn(4, 3, 24, 24)}),
    "unet": lambda draw: (unet(12, draw.choice([3, 4])), {"x": torch.randn(4, 3, 32, 32)}),
    "siamese": lambda draw: (
        Called(_siamese, tower=[_mlp(64), _mlp(64)], head=[_mlp(64) for _ in range(3)]),
        {"x": torch.randn(512, 64)},
    ),
    "lstms": lambda draw: (
        Called(_recurrent, layers=[nn.LSTM(64, 64, batch_first=True) for _ in range(4)]),
        {"x": torch.randn(8, 24, 64)},
    ),
    **{kind: _library(kind) for kind in ("recurrent_gemma", "wav2vec2-conformer")},
    # with masks that all layers get
    **{kind: _library(kind) for kind in ("gemma2", "bloom")},
}


def loss_of(output: Any) -> Tensor:
    """Return a loss of whatever a model returns."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    losses = [x.float().square().mean() for x in tensors_of(output) if x.requires_grad]
    return torch.stack(losses).sum()


class Result(NamedTuple):
    """What a run found; bytes, then shares of a forward without a plan, and of error its own."""

    asked: int
    predicted: int
    measured: int
    claimed: float
    error: float
    actual: float


class Loop(NamedTuple):
    """How a model is trained.

    steps: micro-batches, whose gradients add up. has_gradients: they exist when a step begins.
    """

    model: nn.Module
    inputs: dict[str, Any]
    steps: int
    optimizer: torch.optim.Optimizer | None
    has_gradients: bool

    def clear(self) -> None:
        """Bring the gradients to where a step begins."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if self.has_gradients else None

    def planned(self, budget: int) -> fusedckpt.Plan:
        """Plan within a budget."""
        self.clear()
        options = {"accumulate": self.steps > 1, "optimizer": self.optimizer, "progress": False}
        return fusedckpt.plan(self.model, budget=budget, **options, **self.inputs)

    def peak(self) -> int:
        """Return the peak of a step."""
        model, optimizer = self.model, self.optimizer

        def loop() -> None:
            for _ in range(self.steps):
                output = model(**self.inputs)
                loss = loss_of(output)
                loss.backward()
            if optimizer is not None:
                optimizer.step()

        self.clear()
        state = [] if optimizer is None else [*tensors_of([*optimizer.state.values()])]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        held = [*model.parameters(), *model.buffers(), *tensors_of(self.inputs), *state, *gradients]
        return nbytes_of(held) + peak_bytes(loop)


def seconds_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of one forward, and of one step."""
    # of this thread, whatever else the machine does
    start = time.thread_time()
    loss = loss_of(model(**inputs))
    middle = time.thread_time()
    loss.backward()
    return middle - start, time.thread_time() - start


def extra_of(loop: Loop, found: fusedckpt.Plan, rounds: int) -> float:
    """Return the extra time of a plan, by a forward's, as the median of steps in turns."""
    plain = replace(found, items=by_rule(found.chain, "none").items)
    slower, forwards = [], []
    for _ in range(rounds):
        times = []
        for plan in (plain, found):
            plan.apply(loop.model)
            times.append(seconds_of(loop.model, loop.inputs))
            plan.undo()
        forwards.append(times[0][0])
        slower.append(times[1][1] - times[0][1])
    return statistics.median(slower) / statistics.median(forwards) if rounds else 0.0


def run(name: str, draw: random.Random, rounds: int) -> Result:
    """Plan one model within a budget, and see."""
    torch.manual_seed(draw.randrange(1 << 30))
    model, inputs = MODELS[name](draw)
    accumulate, share = draw.random() < 0.5, draw.random()
    optimizer = torch.optim.AdamW(model.parameters()) if draw.random() < 0.4 else None
    has_gradients = not accumulate and draw.random() < 0.3
    loop = Loop(model, inputs, 2 if accumulate else 1, optimizer, has_gradients)
    # the first step makes the optimizer's state
    loop.peak()
    most, least = loop.peak(), 0
    try:
        loop.planned(1)
    except ValueError as error:
        least = int(str(error).split(" bytes")[0].split()[-1])
    budget = int(least + share * (most - least))
    plan = loop.planned(budget)
    plan.apply(model)
    measured = loop.peak()
    plan.undo()
    actual = extra_of(loop, plan, rounds)
    claimed, error = (ms / plan.forward_ms for ms in (plan.extra_ms, plan.error_ms))
    error = error if plan.rounds else math.inf
    return Result(budget, plan.predicted_bytes, measured, claimed, error, actual)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    parser.add_argument("--rounds", type=int, default=15, help="of timing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    exceeded, ratios, errors = 0, [], []
    print(f"{'model':14}    asked predicted  measured     off  claimed     +-   actual")
    for i in range(args.runs):
        name = args.model or list(MODELS)[i % len(MODELS)]
        outcome = run(name, random.Random(f"{args.seed} {i}"), args.rounds)
        off, flag = outcome.predicted / outcome.measured - 1, ""
        errors.append(off)
        if outcome.measured > outcome.asked:
            exceeded, flag = exceeded + 1, "EXCEEDED"
        if args.rounds and outcome.claimed and max(outcome.claimed, outcome.actual) > 0.05:
            ratio = outcome.actual / outcome.claimed
            # the others are predicted
            if is_told := outcome.claimed >= 2 * outcome.error:
                ratios.append(ratio)
            flag += f" {'x' if is_told else '~'}{ratio:.2f}"
        mib = " ".join(f"{nbytes / 2**20:9.3f}" for nbytes in outcome[:3])
        shares = " ".join(f"{share:7.1%}" for share in (off, *outcome[3:]))
        print(f"{name:14}{mib} {shares}  {flag}", flush=True)
    off = f"predicted {min(errors):+.1%} to {max(errors):+.1%}"
    print(f"{args.runs} runs, {exceeded} budgets exceeded; {off}")
    if ratios:
        within = sum(0.8 <= x <= 1.25 for x in ratios)
        spread = f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"actual of claimed extra time: {spread}, {within} of {len(ratios)} in 0.8 to 1.25")
    return exceeded > 0


if __name__ == "__main__":
    sys.exit(main())
