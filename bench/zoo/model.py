"""A model of the zoo, the sizes that its kinds share, and models of transformers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# width of the residual stream, heads, tokens and classes
D = 128
HEADS = 4
TOKENS = 64
VOCAB = 128
# the sides of pictures, in pixels, and of latents
SIDE = 64
LATENT = 16
# by name: inputs of a model, and options of its configuration
Inputs = dict[str, Any]
Options = dict[str, Any]
# a number of repeated parts -> the model and its inputs
Build = Callable[[int], tuple[nn.Module, Inputs]]
# of a model with heads as wide as D / HEADS, and an MLP of 4 D
SIZES: Options = {
    "hidden_size": D,
    "intermediate_size": 4 * D,
    "num_attention_heads": HEADS,
}


class Model(NamedTuple):
    """A model that is measured."""

    group: str
    # the package that it needs besides torch
    package: str
    # repeated parts of its checkpoint; 0: it is built whole
    repeats: int
    build: Build


def ids() -> Tensor:
    """Return the tokens of a text."""
    return torch.randint(3, VOCAB, (1, TOKENS))


def of_transformers(
    name: str, per_part: int, inputs: Callable[[], Inputs], **options: Any
) -> Build:
    """Return the function that builds a model of transformers.

    per_part: layers of a repeated part; an option that is a list has one value for each of them.
    """

    def build(parts: int) -> tuple[nn.Module, Inputs]:
        import transformers

        layers = per_part * parts
        sizes = {"num_hidden_layers": layers, "vocab_size": VOCAB, "pad_token_id": 0}
        repeated = {
            key: value * parts if isinstance(value, list) else value
            for key, value in options.items()
        }
        config = transformers.AutoConfig.for_model(name, **sizes | repeated)
        for dropout in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
            if hasattr(config, dropout):
                # a CPU has no fused attention with dropout
                setattr(config, dropout, 0.0)
        return transformers.AutoModel.from_config(config), inputs()

    return build
