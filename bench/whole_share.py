"""`python -m bench.whole_share [model ...]`: a whole model's saved bytes left by `fuse(head=True)`.

The dense models of `bench.fused_share` with head and loss, at their published depth, and with as
many classes for each of the 256 features as published. Bytes are those of two layers and, for each
layer more, half of the difference between four layers and two.
"""

from __future__ import annotations

import sys
import warnings
from argparse import ArgumentParser
from statistics import median
from typing import NamedTuple

import torch

from bench.fused_share import DENSE, D, chosen_of, model_of, saved_by
from fusedckpt import fuse


class Whole(NamedTuple):
    """Published layers, features and classes, and the class with a head where its name differs."""

    layers: int
    features: int
    classes: int
    model: str | None = None


# config.json of the checkpoints that bench/fused_share.py names
WHOLE = {
    "llama": Whole(32, 4096, 128256),
    "mistral": Whole(32, 4096, 32768),
    "qwen2": Whole(28, 3584, 152064),
    "qwen3": Whole(36, 4096, 151936),
    "gemma": Whole(28, 3072, 256000),
    "gemma2": Whole(42, 3584, 256000),
    "gemma3": Whole(34, 2560, 262208, "Gemma3ForCausalLM"),
    "phi": Whole(32, 2560, 51200),
    "phi3": Whole(32, 3072, 32064),
    "olmo": Whole(32, 4096, 50304),
    "olmo2": Whole(32, 4096, 100352),
    "granite": Whole(40, 4096, 49155),
    "glm": Whole(40, 4096, 151552),
    "glm4": Whole(40, 4096, 151552),
    "starcoder2": Whole(32, 4608, 49152),
    "stablelm": Whole(24, 2048, 100352),
    "gpt2": Whole(12, 768, 50257, "GPT2LMHeadModel"),
    "gpt_neox": Whole(32, 4096, 50432),
    "smollm3": Whole(36, 2048, 128256),
    "exaone4": Whole(64, 5120, 102400),
}


def measured(name: str) -> tuple[float, float]:
    """Return the bytes that a training step of a model saves before and after `fuse`."""
    whole, shape, found = WHOLE[name], DENSE[name], list[tuple[int, int]]()
    kind = whole.model or shape.model.replace("Model", "ForCausalLM")
    options = {**shape.options, "vocab_size": round(whole.classes * D / whole.features)}
    for layers in (2, 4):
        torch.manual_seed(0)
        model, (ids,), kwargs = model_of(shape._replace(model=kind, options=options), layers)
        model, given = model.to(torch.bfloat16).train(), {**kwargs, "labels": ids}
        before = saved_by(model, (ids,), given).nbytes
        fuse(model, head=True)
        found.append((before, saved_by(model, (ids,), given).nbytes))
    two, four = found
    before, after = (a + (whole.layers - 2) * (b - a) / 2 for a, b in zip(two, four, strict=True))
    return before, after


def main(arguments: list[str]) -> None:
    """Print the table and its median."""
    parser = ArgumentParser(prog="python -m bench.whole_share", description=__doc__)
    names = chosen_of(parser, [*WHOLE], arguments).models
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'model':12}{'layers':>8}{'classes':>9}{'KiB before':>12}{'after':>8}{'gone':>7}")
    gone = []
    for name in names:
        whole, (before, after) = WHOLE[name], measured(name)
        gone.append(1 - after / before)
        sizes = f"{whole.layers:8}{round(whole.classes * D / whole.features):9}"
        print(
            f"{name:12}{sizes}{before / 1024:12.0f}{after / 1024:8.0f}{gone[-1]:7.1%}", flush=True
        )
    print(f"median of {len(gone)}: {median(gone):.1%} gone")


if __name__ == "__main__":
    main(sys.argv[1:])
