"""Dropout by a counter-based generator: the seed and an element's index alone decide its mask.

So only the seed is saved, and neither chunks nor layouts change a result. Element i reads half
i % 8 of the four words that Philox4x64-10 makes of the seed and the counter i // 8 + 1. numpy's
generator makes the same bits in 1.5 ns per element, where ATen's integers took 19 and F.dropout 9.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .runtime import cdiv, jit_kernel, load, row_blocks, store, tl

# counters of a program, each for eight elements
PACK_BLOCK = 256
WORDS_OF_DRAW = 8


def threshold_of(p: float) -> int:
    """Return the least word, as int32, at which an element is not zeroed."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


@jit_kernel
def dropout_kernel(x, y, seed, first, numel, threshold, scale, BLOCK: tl.constexpr):
    """Write x times 0 or `scale` into y; `first` is the index of x[0] in the whole matrix."""
    group = (first // 8 + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    zero = group * 0
    c0, c1, c2, c3 = tl.philox(tl.load(seed), group + 1, zero, zero, zero)
    # element 4 i + 2 j + k of a group is half k, the low one first, of word 2 i + j
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    low = words.to(tl.uint32)
    high = (words >> 32).to(tl.uint32)
    drawn = tl.reshape(tl.join(low, high), (BLOCK * 8,)).to(tl.int32, bitcast=True)
    start = (first // 8 + tl.program_id(0).to(tl.int64) * BLOCK) * 8 - first
    offsets = start + tl.arange(0, BLOCK * 8)
    mask = (offsets >= 0) & (offsets < numel)
    noise = tl.where(drawn >= threshold, 1.0, 0.0) * scale
    store(y + offsets, load(x + offsets, mask) * noise, mask)


def dropout(x: Tensor, p: float, seed: Tensor, first_row: int, kernel: str) -> Tensor:
    """Return x [M, N] with elements zeroed at probability p, the others divided by 1 - p.

    seed: int64, one element, on x's device; first_row: the row of the whole matrix at which x
    begins. The gradient is dx = dropout(dy).
    """
    x = x.contiguous()
    scale = 1 / (1 - p) if p < 1 else 0.0
    y = torch.empty_like(x)
    first = first_row * x.shape[1]
    n = x.shape[1]
    if kernel != "aten":
        groups = (first + x.numel() + WORDS_OF_DRAW - 1) // WORDS_OF_DRAW - first // WORDS_OF_DRAW
        numbers = first, x.numel(), threshold_of(p), scale
        dropout_kernel[(cdiv(groups, PACK_BLOCK),)](x, y, seed, *numbers, BLOCK=PACK_BLOCK)
        return y
    wide = torch.promote_types(x.dtype, torch.float32)
    for rows in row_blocks(x):
        words = drawn_words(int(seed), first + rows.start * n, x[rows].numel())
        keeps = (words >= threshold_of(p)).view(-1, n).to(x.device)
        # a product, not a selection: a dropped inf or NaN becomes NaN, as in torch
        torch.mul(x[rows], keeps.to(wide).mul_(scale), out=y[rows])
    return y


def drawn_words(seed: int, first: int, count: int) -> Tensor:
    """Return the words of elements `first` to `first + count`, as int32."""
    skipped = first % WORDS_OF_DRAW
    generator = np.random.Philox(key=seed, counter=first // WORDS_OF_DRAW)
    raw = generator.random_raw((skipped + count + 1) // 2)
    return torch.from_numpy(raw.view(np.int32))[skipped : skipped + count]
