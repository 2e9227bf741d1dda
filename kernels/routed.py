"""Rows routed to experts: sorted by expert, gathered, and summed per token.

A value with K rows of N features for each of T tokens is a matrix [T, K N], so that it is cut into
chunks of tokens as any other value is. Its memory is the rows sorted by expert, [T K, N]; the rows
of no expert come last, and are never multiplied: products have zeros there, or, of torch's kernel,
arbitrary numbers.

Triton's kernels sort in three launches: blocks of slots count their experts, counts of earlier
blocks are added up, and every slot gets its row.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .runtime import cdiv, jit_kernel, load, next_power_of_2, row_blocks, store, tl, triton

# slots of a program; tiles of experts that are counted, and of blocks and experts that are added up
SLOTS_OF_BLOCK = 64
EXPERTS = tl.constexpr(64)
SCAN_TILE: dict[str, Any] = {"BLOCK": 64, "EXPERTS": 16}


class Route(NamedTuple):
    """How the slots of `index` [T, K] are sorted by expert."""

    # [T K]: the slot of every row
    order: Tensor
    # [T K]: the token of every row
    tokens: Tensor
    # [T, K]: the row of every slot
    places: Tensor
    # [E], int32: where each expert's rows end
    ends: Tensor
    # the experts that have rows, with these; None where reading them would wait for the device
    pieces: tuple[tuple[int, slice], ...] | None
    # multiplies: "torch", "triton", or None for a loop over the pieces
    kernel: str | None = None
    # whether Triton's kernels move and gate rows
    runs_triton: bool = False

    @property
    def count(self) -> int:
        """How many rows experts have."""
        return self.pieces[-1][1].stop if self.pieces else 0


def has_kernel(device: torch.device, dtype: torch.dtype, *features: int) -> bool:
    """Whether F.grouped_mm is a kernel for these, not a loop that waits for the device."""
    if device.type != "cuda" or torch.version.hip or dtype != torch.bfloat16:
        return False
    # rows begin at multiples of 16 bytes
    is_aligned = all(n % 8 == 0 for n in features)
    # below sm_90 and on sm_120 torch multiplies in a loop, which reads the ends of rows on the host
    return is_aligned and torch.cuda.get_device_capability(device)[0] in (9, 10)


def kernel_for(path: str, device: torch.device, dtype: torch.dtype, *features: int) -> str | None:
    """Return the kernel of grouped products: "torch", ours ("triton"), or None for a loop."""
    # on meta, one op of the loop's bytes in place of an op for each expert
    if has_kernel(device, dtype, *features) or (device.type == "meta" and path == "aten"):
        return "torch"
    return None if path == "aten" or 0 in features else "triton"


@triton.jit
def experts_of(index, slots, num_slots, num_experts):
    """Return the experts of slots: num_experts for a negative index, one more for none."""
    number = tl.load(index + slots, slots < num_slots, num_experts)
    # after the last slot too, so that these are counted behind all others
    expert = tl.where(number < num_experts, number, num_experts + 1)
    return tl.where(number < 0, num_experts, expert).to(tl.int32)


@jit_kernel
def count_kernel(index, counts, num_slots, num_experts, width, BLOCK: tl.constexpr):
    """Count a block's slots by expert."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = experts_of(index, slots, num_slots, num_experts)
    for start in range(0, width, EXPERTS):
        experts = start + tl.arange(0, EXPERTS)
        count = tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
        tl.store(counts + tl.program_id(0) * width + experts, count, experts < width)


@jit_kernel
def scan_kernel(counts, totals, num_blocks, width, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Write the slots of some experts in all earlier blocks over their counts, and all of them."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        offsets = blocks[:, None] * width + experts[None, :]
        mask = (blocks < num_blocks)[:, None]
        rows_of_experts = tl.load(counts + offsets, mask, 0)
        tl.store(
            counts + offsets,
            before[None, :] + tl.cumsum(rows_of_experts, 0) - rows_of_experts,
            mask,
        )
        before += tl.sum(rows_of_experts, 0)
    tl.store(totals + experts, before.to(tl.int64))


@jit_kernel
def place_kernel(
    index,
    before,
    totals,
    order,
    tokens,
    places,
    ends,
    num_slots,
    num_experts,
    top_k,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write the rows of a block's slots, and the slots and tokens of these rows."""
    numbers = tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS)
    slots = tl.program_id(0) * BLOCK + numbers
    mask = slots < num_slots
    expert = experts_of(index, slots, num_slots, num_experts)
    is_before = numbers[None, :] < numbers[:, None]
    is_equal = expert[:, None] == expert[None, :]
    place = tl.sum((is_equal & is_before).to(tl.int32), 1)
    place += tl.load(before + tl.program_id(0) * EXPERTS + expert, mask, 0)
    total = tl.load(totals + experts)
    sums = tl.cumsum(total, 0)
    row = place.to(tl.int64) + tl.gather(sums - total, expert, 0)
    tl.store(places + slots, row, mask)
    tl.store(order + row, slots.to(tl.int64), mask)
    tl.store(tokens + row, (slots // top_k).to(tl.int64), mask)
    if tl.program_id(0) == 0:
        tl.store(ends + experts, sums.to(tl.int32), experts < num_experts)


@jit_kernel
def combine_kernel(rows, places, ends, y, n, top_k, num_experts, BLOCK: tl.constexpr):
    """Sum a part of one token's rows; those of no expert are not read."""
    tiles = tl.cdiv(n, BLOCK)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    rn = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + num_experts - 1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, top_k):
        place = tl.load(places + token * top_k + k)
        acc += load(rows + place * n + rn, (rn < n) & (place < end))
    store(y + token * n + rn, acc, rn < n)


def route(index: Tensor, num_experts: int, kernel: str | None, runs_triton: bool = False) -> Route:
    """Sort slots by expert; for a kernel, without waiting for the device.

    A negative index is refused, on a GPU by an assertion on the device.
    """
    if runs_triton:
        order, tokens, places, ends, negatives = sorted_rows(index, num_experts)
    else:
        experts, order = index.where(index >= 0, num_experts + 1).flatten().sort(stable=True)
        bounds = torch.arange(num_experts, device=index.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, bounds, right=True, out_int32=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        tokens = order // index.shape[-1]
        places = places.view(index.shape)
        negatives = (index < 0).sum()[None]
    # no kernel of torch's runs on a CPU, but under torch.compile, and in tests
    if index.device.type == "cpu" and kernel != "torch":
        check_negatives(int(negatives))
    elif index.device.type != "cpu":
        # a gather of one element asserts that its index is 0
        negatives.gather(0, negatives)
    pieces = pieces_of(_read(ends, order)) if kernel is None else None
    return Route(order, tokens, places, ends, pieces, kernel, runs_triton)


def _read(ends: Tensor, order: Tensor) -> list[int]:
    """Return where each expert's rows end; on meta, where none is known, of equally many rows."""
    if not ends.is_meta:
        return ends.tolist()
    return [len(order) * (expert + 1) // len(ends) for expert in range(len(ends))]


def check_negatives(count: int) -> None:
    """Refuse an index with negative elements."""
    if count:
        raise ValueError(f"experts: index must be at least 0, got {count} negative elements")


def sorted_rows(index: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Return order, tokens, places and ends, and the number of negative elements, [1]."""
    index = index.contiguous()
    numel = index.numel()
    top_k = index.shape[-1]
    # a negative index counts as one more expert, and none as another
    width: int = max(SCAN_TILE["EXPERTS"], next_power_of_2(num_experts + 2))
    blocks = cdiv(numel, SLOTS_OF_BLOCK)
    counts = index.new_empty(blocks, width, dtype=torch.int32)
    totals = index.new_empty(width, dtype=torch.int64)
    order, tokens = (index.new_empty(numel, dtype=torch.int64) for _ in range(2))
    places = index.new_empty(index.shape, dtype=torch.int64)
    ends = index.new_empty(num_experts, dtype=torch.int32)
    results: tuple[Tensor, ...] = order, tokens, places, ends
    tile: dict[str, Any] = {"BLOCK": SLOTS_OF_BLOCK}
    count_kernel[blocks,](index, counts, numel, num_experts, width, **tile)
    scan_kernel[width // SCAN_TILE["EXPERTS"],](counts, totals, blocks, width, **SCAN_TILE)
    tile["EXPERTS"] = width
    place_kernel[max(1, blocks),](
        index, counts, totals, *results, numel, num_experts, top_k, **tile
    )
    return *results, totals[num_experts : num_experts + 1]


def pieces_of(ends: list[int]) -> tuple[tuple[int, slice], ...]:
    """Return the experts that have rows, with these."""
    bounds = itertools.pairwise([0, *ends])
    return tuple([(e, slice(a, b)) for e, (a, b) in enumerate(bounds) if b > a])


def as_rows(x: Tensor, route: Route) -> Tensor:
    """Return a value as its rows, [T K, N]."""
    tokens, top_k = route.places.shape
    return x.view(tokens * top_k, x.shape[1] // top_k)


def per_token(rows: Tensor, route: Route) -> Tensor:
    """Return rows as a value, [T, K N]."""
    tokens, top_k = route.places.shape
    return rows.view(tokens, top_k * rows.shape[1])


def gather(x: Tensor, route: Route) -> Tensor:
    """Return the row of x [T, N] for every slot, [T, K N]."""
    return per_token(x.index_select(0, route.tokens), route)


def combine(x: Tensor, route: Route) -> Tensor:
    """Return the sum of each token's rows [T, K N], summed in float32, [T, N]."""
    rows = as_rows(x, route)
    if not route.runs_triton:
        # without a buffer in the order of slots, and without atomics
        return F.embedding_bag(route.places, cleared(rows, route), mode="sum")
    (m, top_k) = route.places.shape
    n = rows.shape[1]
    y = rows.new_empty(m, n)
    block = min(1024, next_power_of_2(n))
    grid = (m * cdiv(n, block),)
    tile = {"BLOCK": block}
    combine_kernel[grid](rows, route.places, route.ends, y, n, top_k, len(route.ends), **tile)
    return y


def cleared(rows: Tensor, route: Route) -> Tensor:
    """Write zeros over the rows of no expert where a kernel multiplied."""
    if route.pieces is not None:
        return rows
    foreign = torch.arange(len(rows), device=rows.device) >= route.ends[-1]
    return rows.masked_fill_(foreign[:, None], 0)


def scores_by_row(scores: Tensor, route: Route) -> Tensor:
    """Return the score of every row, as a column."""
    return scores.reshape(-1)[route.order, None]


def scores_by_slot(rows: Tensor, route: Route) -> Tensor:
    """Return a column of numbers as [T, K], with zeros for the rows of no expert."""
    return cleared(rows, route)[route.places, 0]


def blocks_of_rows(rows: Tensor) -> list[slice]:
    """Cut rows into blocks, for temporaries a few times as wide as these."""
    if rows.device.type in ("cpu", "meta"):
        return row_blocks(rows)
    step = max(1024, -(-len(rows) // 8))
    return [slice(start, start + step) for start in range(0, len(rows), step)]
