"""Models to train, and their data: the standard library's bytes, and scikit-learn's digits.

Small random configurations, nothing is downloaded. Llama and GPT-2 predict the next byte, BERT
masked bytes, and ViT the digit that it sees.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models import CLASSES, HEAD_DIM, VOCAB, Transformer
from bench.workload import Batch

LIMIT = 4 * 2**20
IGNORED = -100
# pictures, or bytes of windows, that no step sees
HELD_OUT = 256
# of a ViT, in patches of two by two pixels
SIDE = 8
KINDS = ("own", "llama", "gpt2", "bert", "vit")
Pair = tuple[Tensor, Tensor]


class Task(NamedTuple):
    """A model by name, its sizes, and where it is trained."""

    # a name of KINDS
    kind: str
    # transformer blocks
    layers: int
    # width of the residual stream
    dim: int
    # bytes per sequence; a ViT sees pictures of SIDE x SIDE
    seq: int
    # sequences or pictures per step
    batch: int
    # of the own model: "gelu" or "swiglu"
    mlp: str
    # of the model
    dtype: torch.dtype
    # of the model and its batches
    device: torch.device

    def model(self) -> nn.Module:
        """Build the model, with random weights."""
        if self.kind == "own":
            model: nn.Module = Transformer(self.layers, self.dim, self.seq, self.mlp)
        else:
            import transformers

            config, kind = (getattr(transformers, name) for name in _CLASSES[self.kind])
            model = kind(config(**self._options()))
        return model.to(self.device, self.dtype)

    def _options(self) -> dict[str, Any]:
        """Return the options of a configuration: no dropout, so that ways can be compared."""
        cacheless = {"vocab_size": VOCAB, "use_cache": False}
        pictures = {"image_size": SIDE, "patch_size": 2, "num_channels": 1, "num_labels": CLASSES}
        options: dict[str, Any] = {
            "llama": {**cacheless, "max_position_embeddings": self.seq},
            # its default tokens are beyond the vocabulary of bytes
            "gpt2": {
                **cacheless,
                "n_positions": self.seq,
                "bos_token_id": None,
                "eos_token_id": None,
            },
            # one more than there are bytes stands for a masked one
            "bert": {"vocab_size": VOCAB + 1, "max_position_embeddings": self.seq},
            "vit": pictures,
        }[self.kind]
        gated = 64 * math.ceil(8 * self.dim / 3 / 64)
        if self.kind != "gpt2":
            options["intermediate_size"] = gated if self.kind == "llama" else 4 * self.dim
        return options | {
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.dim // HEAD_DIM,
            "attn_implementation": "sdpa",
            **dict.fromkeys(_DROPOUTS.get(self.kind, ()), 0.0),
        }

    def batches(self, count: int, seed: int) -> list[Batch]:
        """Draw batches of the data to train on. Raises ValueError for a seq beyond the text."""
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "vit":
            pictures, labels = digits(SIDE)
            shape = count, self.batch
            places = torch.randint(len(labels) - HELD_OUT, shape, generator=generator)
            return [self._batch(pictures[rows], labels[rows]) for rows in places]
        text, _ = self._texts()
        return [self._windows(text, self.batch, generator) for _ in range(count)]

    def held_out(self) -> Batch:
        """Return data that is in no batch."""
        if self.kind == "vit":
            pictures, labels = digits(SIDE)
            return self._batch(pictures[-HELD_OUT:], labels[-HELD_OUT:])
        _, text = self._texts()
        return self._windows(text, HELD_OUT // 8, torch.Generator().manual_seed(0))

    def _texts(self) -> Pair:
        text = stdlib_text()
        edge = len(text) * 9 // 10
        if len(text) - edge <= self.seq:
            size = len(text) - edge
            raise ValueError(f"seq {self.seq} needs a longer text than one of {size} bytes")
        return text[:edge], text[edge:]

    def _windows(self, text: Tensor, count: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - self.seq, (count, 1), generator=generator)
        window = text[starts + torch.arange(self.seq + 1)].long()
        return self._batch(*_TURNED.get(self.kind, _next)(window))

    def _batch(self, x: Tensor, target: Tensor) -> Batch:
        dtype = self.dtype if x.is_floating_point() else None
        return Batch((x.to(self.device, dtype),), {}, target.to(self.device))


def loss(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, taken in float32 of half precision."""
    logits = output if isinstance(output, Tensor) else output.logits
    wide = logits.flatten(0, -2)
    wide = wide if wide.dtype == torch.float64 else wide.float()
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED)


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


def digits(side: int) -> Pair:
    """Return scikit-learn's digits `[n, 1, side, side]` of deviation 1, shuffled, and labels."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(pictures).float().view(-1, 1, 8, 8)[order]
    x = F.interpolate(x, size=(side, side), mode="bilinear")
    return (x - x.mean()) / x.std(), torch.from_numpy(labels).long()[order]


def needs(command: str, *packages: str) -> None:
    """Raise ValueError for a package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            name = package.replace("sklearn", "scikit-learn")
            raise ValueError(f"{command} needs {name}: pip install {name}")


_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
}
_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


# turn windows of tokens, each with one more than `seq`, into a model's inputs and targets
def _next(window: Tensor) -> Pair:
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _masked(window: Tensor) -> Pair:
    tokens = window[:, :-1]
    # every seventh byte, as BERT masks one in seven
    hidden = torch.arange(tokens.shape[1]) % 7 == 3
    return tokens.where(~hidden, VOCAB), tokens.where(hidden, IGNORED)


_TURNED: dict[str, Callable[[Tensor], Pair]] = {"bert": _masked}
