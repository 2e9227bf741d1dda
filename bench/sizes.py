"""Named sizes that cases run at, readable without torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DEFAULT_TOKENS", "SIZES", "Size"]

DEFAULT_TOKENS = {"cpu": 4096, "cuda": 8192}


class Size(NamedTuple):
    """A model's widths: dim D, hidden F, and that of its key and value projections."""

    dim: int
    hidden: int
    kv: int
    tokens: int | None = None


# the models' published configurations: hidden_size, intermediate_size, and
# num_key_value_heads * head_dim
SIZES: dict[str, tuple[Size, ...]] = {
    "tiny": (Size(32, 80, 16, tokens=48),),
    "cpu": (Size(512, 2048, 512), Size(768, 3072, 768)),
    "gpt2": (Size(768, 3072, 768),),
    "llama-3.2-1b": (Size(2048, 8192, 512),),
    "llama-3-8b": (Size(4096, 14336, 1024),),
    "qwen2.5-7b": (Size(3584, 18944, 512),),
}
