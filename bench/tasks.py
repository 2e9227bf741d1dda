"""Models to train, and their data: the standard library's bytes, and scikit-learn's digits.

Small random configurations, nothing is downloaded. Llama and GPT-2 predict the next byte, BERT
masked bytes, and ViT the byte that follows a window which it sees as a picture.
"""

from __future__ import annotations

import math
import sysconfig
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models import HEAD_DIM, VOCAB, Transformer

LIMIT = 4 * 2**20
IGNORED = -100
Batch = tuple[Tensor, Tensor]


def stdlib_text(folder: Path | None = None, limit: int = LIMIT) -> Tensor:
    """The first `limit` bytes of the standard library's top-level modules, joined in name order.

    Raises ValueError where this Python ships no sources (a frozen or zipped library).
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise ValueError(f"no text to train on: {folder} holds no Python sources")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches_of(chosen: Namespace, count: int, text: Tensor | None = None) -> list[Batch]:
    """Draw random windows of a text as batches, by default of the standard library's."""
    text = stdlib_text() if text is None else text
    if len(text) <= chosen.seq:
        raise ValueError(f"seq {chosen.seq} needs a longer text than one of {len(text)} bytes")
    generator, found = torch.Generator().manual_seed(chosen.seed), []
    for _ in range(count):
        starts = torch.randint(len(text) - chosen.seq, (chosen.batch, 1), generator=generator)
        window = text[starts + torch.arange(chosen.seq + 1)].long().to(chosen.device)
        inputs, targets = _TURNED.get(chosen.model, _next)(window)
        if inputs.is_floating_point():
            inputs = inputs.to(getattr(torch, chosen.dtype))
        found.append((inputs, targets))
    return found


def digits(side: int) -> Batch:
    """Return scikit-learn's handwritten digits `[n, 1, side, side]`, and their labels `[n]`."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pictures).float().view(-1, 1, 8, 8)
    return F.interpolate(x, size=(side, side), mode="bilinear"), torch.from_numpy(labels).long()


def needs(command: str, *packages: str) -> None:
    """Raise ValueError for a package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            name = package.replace("sklearn", "scikit-learn")
            raise ValueError(f"{command} needs {name}: pip install {name}")


def loss(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, taken in float32."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)


def _options(kind: str, seq: int) -> dict[str, Any]:
    """Return a configuration's own options: no dropout, so that ways can be compared."""
    rates = {
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    }
    own = {
        "llama": {"vocab_size": VOCAB, "max_position_embeddings": seq, "use_cache": False},
        "gpt2": {"vocab_size": VOCAB, "n_positions": seq, "use_cache": False},
        # one more than there are bytes stands for a masked one
        "bert": {"vocab_size": VOCAB + 1, "max_position_embeddings": seq},
        "vit": {"image_size": _side(seq), "patch_size": 2, "num_channels": 1, "num_labels": VOCAB},
    }
    return own[kind] | dict.fromkeys(rates.get(kind, ()), 0.0)


CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
}


def model_of(chosen: Namespace) -> nn.Module:
    """Build the model that was chosen."""
    if chosen.model == "own":
        model = Transformer(chosen.layers, chosen.dim, chosen.seq, chosen.mlp)
    else:
        import transformers

        config, kind = (getattr(transformers, name) for name in CLASSES[chosen.model])
        options = _options(chosen.model, chosen.seq)
        gated = 64 * math.ceil(8 * chosen.dim / 3 / 64)
        if chosen.model != "gpt2":
            options["intermediate_size"] = gated if chosen.model == "llama" else 4 * chosen.dim
        options |= {
            "hidden_size": chosen.dim,
            "num_hidden_layers": chosen.layers,
            "num_attention_heads": chosen.dim // HEAD_DIM,
            "attn_implementation": "sdpa",
        }
        model = kind(config(**options))
    return model.to(chosen.device, getattr(torch, chosen.dtype))


def _example(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of six layers of 256, and 8 x 256 bytes of text as its inputs and labels."""
    sizes = {"layers": 6, "dim": 256, "seq": 256, "batch": 8, "dtype": "float32"}
    chosen = Namespace(model=kind, seed=0, device="cpu", **sizes)
    inputs, _ = batches_of(chosen, 1)[0]
    return model_of(chosen), {"input_ids": inputs, "labels": inputs}


# for bench ways --model bench.tasks:llama
llama, gpt2 = partial(_example, "llama"), partial(_example, "gpt2")


def _side(seq: int) -> int:
    """Return the side of the largest square picture of even side that a row of bytes fills."""
    return 2 * (math.isqrt(seq) // 2)


# turn windows of tokens, each with one more than `seq`, into a model's inputs and targets
def _next(window: Tensor) -> Batch:
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _masked(window: Tensor) -> Batch:
    tokens = window[:, :-1]
    # every seventh byte, as BERT masks one in seven
    hidden = torch.arange(tokens.shape[1], device=tokens.device) % 7 == 3
    return tokens.where(~hidden, VOCAB), tokens.where(hidden, IGNORED)


def _pictures(window: Tensor) -> Batch:
    side = _side(window.shape[1] - 1)
    seen = window[:, -1 - side * side : -1].reshape(-1, 1, side, side)
    return seen / 128.0 - 1.0, window[:, -1]


_TURNED: dict[str, Callable[[Tensor], Batch]] = {"bert": _masked, "vit": _pictures}
