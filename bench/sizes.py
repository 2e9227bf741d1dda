"""Named sizes that cases run at, readable without torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DEFAULT_TOKENS", "SEQUENCE", "SIZES", "Size"]

DEFAULT_TOKENS = {"cpu": 4096, "cuda": 8192}
# tokens that attend to one another, in cases with attention
SEQUENCE = 2048


class Size(NamedTuple):
    """A model's widths: dim D, hidden F, that of its key and value projections, and of a head."""

    dim: int
    hidden: int
    kv: int
    head_dim: int = 64
    tokens: int | None = None


# The models' published configurations (config.json on the Hugging Face hub, by the name below):
# hidden_size, intermediate_size, num_key_value_heads * head_dim, head_dim. GPT-2's and ViT-L/16's
# hidden layer is four times as wide as the model, and every head has keys and values of its own.
SIZES: dict[str, tuple[Size, ...]] = {
    "tiny": (Size(32, 80, 16, 8, tokens=48),),
    "cpu": (Size(512, 2048, 512), Size(768, 3072, 768)),
    # openai-community/gpt2: n_embd 768, n_inner null, n_head 12
    "gpt2": (Size(768, 3072, 768),),
    # google/vit-large-patch16-224; Dosovitskiy et al., arXiv 2010.11929, table 1
    "vit-l": (Size(1024, 4096, 1024),),
    # meta-llama/Llama-3.2-1B: 8 of 32 heads have keys and values
    "llama-3.2-1b": (Size(2048, 8192, 512),),
    # Qwen/Qwen2.5-7B: 4 of 28 heads
    "qwen2.5-7b": (Size(3584, 18944, 512, 128),),
    # meta-llama/Meta-Llama-3-8B: 8 of 32 heads
    "llama-3-8b": (Size(4096, 14336, 1024, 128),),
}
