"""What the demo can train: its own transformer, or one of transformers' classes, on real bytes.

Small random configurations, nothing is downloaded: every model learns from the standard library's
sources. Llama and GPT-2 predict the next byte, BERT masked bytes, and ViT the byte that follows a
window which it sees as a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.model import HEAD_DIM, VOCAB, Transformer

__all__ = ["MODELS", "Sizes", "Task"]

IGNORED = -100


class Sizes(NamedTuple):
    """Of a model: layers, width, bytes in a row, and the own model's kind of MLP."""

    layers: int
    dim: int
    seq: int
    mlp: str


class Task(NamedTuple):
    """A model and what it learns.

    make: builds the model. batch: turns tokens and their followers, [batch, seq] each, into what
    the model gets and its targets.
    """

    make: Callable[[Sizes], nn.Module]
    batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def loss(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, taken in float32."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)


def checkpoint(model: nn.Module) -> None:
    """Put torch's non-reentrant checkpoint around every block."""
    if isinstance(model, Transformer):
        model.checkpointing = True
    else:
        # the older name is deprecated since transformers 5.23
        old, options = "gradient_checkpointing_enable", {"use_reentrant": False}
        getattr(model, "activation_checkpointing_enable", getattr(model, old))(options)


def _own(sizes: Sizes) -> nn.Module:
    return Transformer(*sizes)


def _hidden(sizes: Sizes) -> dict[str, Any]:
    heads = sizes.dim // HEAD_DIM
    return {
        "hidden_size": sizes.dim,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "attn_implementation": "sdpa",
    }


def _llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    inner = 64 * math.ceil(8 * sizes.dim / 3 / 64)
    config = LlamaConfig(
        vocab_size=VOCAB,
        intermediate_size=inner,
        max_position_embeddings=sizes.seq,
        use_cache=False,
        **_hidden(sizes),
    )
    return LlamaForCausalLM(config)


def _gpt2(sizes: Sizes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # without dropout, so that all ways of training can be compared
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=sizes.seq,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **_hidden(sizes),
    )
    return GPT2LMHeadModel(config)


def _bert(sizes: Sizes) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    # one more than there are bytes stands for a masked one
    config = BertConfig(
        vocab_size=VOCAB + 1,
        intermediate_size=4 * sizes.dim,
        max_position_embeddings=sizes.seq,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **_hidden(sizes),
    )
    return BertForMaskedLM(config)


def _vit(sizes: Sizes) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    side = _side(sizes.seq)
    config = ViTConfig(
        image_size=side,
        patch_size=2,
        num_channels=1,
        intermediate_size=4 * sizes.dim,
        **_hidden(sizes),
    )
    config.num_labels = VOCAB
    return ViTForImageClassification(config)


def _side(seq: int) -> int:
    """Return the side of the largest square picture of even side that a row of bytes fills."""
    return 2 * (math.isqrt(seq) // 2)


def _next(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return tokens, targets


def _masked(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    # every seventh byte, as one in seven is what BERT masks
    hidden = torch.arange(tokens.shape[1], device=tokens.device) % 7 == 3
    return tokens.where(~hidden, VOCAB), tokens.where(hidden, IGNORED)


def _pictures(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    side = _side(tokens.shape[1])
    seen = tokens[:, -(side * side) :].view(-1, 1, side, side)
    return seen / 128.0 - 1.0, targets[:, -1]


MODELS: dict[str, Task] = {
    "own": Task(_own, _next),
    "llama": Task(_llama, _next),
    "gpt2": Task(_gpt2, _next),
    "bert": Task(_bert, _masked),
    "vit": Task(_vit, _pictures),
}
