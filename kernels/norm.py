"""RMSNorm and LayerNorm over rows, forward and backward from x alone: no statistic is ever stored.

A row of up to MAX_BLOCK columns stays in registers; in backward one of up to MAX_GRAD_BLOCK, or
half that in float32, beside a program's share of dw. Longer rows have kernels of their own, in
`long_norm_kernels.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .int8 import PackedRows
from .long_norm_kernels import split_norm_grad_kernel, wide_grad_kernel, wide_stats_kernel
from .norm_kernels import NormGrad, NormOperands, norm_grad_kernel, norm_kernel, wide_norm_kernel
from .partials import sum_partials
from .runtime import arch, cdiv, next_power_of_2
from .warp_norm_kernels import warp_norm_grad_kernel

MAX_BLOCK = 16384
MAX_GRAD_BLOCK = 8192
# columns of rows whose gradient has a warp for each row
WARP_COLUMNS = 768
# a wide row's chunk, and the tile of its gradients
CHUNK = 4096
WIDE_TILE = {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8}
# programs of the gradient of wide rows that a multiprocessor is given: four times those that fit
WIDE_PROGRAMS = 8
# bytes of shared memory that a block of norm_grad takes beside its tiles, for reductions and itself
BESIDE_TILES = 2048


class NormRule(NamedTuple):
    """The formula of a norm: y = xhat * (offset + weight) + bias."""

    # "rms" or "layer"
    kind: str
    # added to the mean square, or to the variance
    eps: float
    # added to the weight
    offset: float = 0.0
    # "llama" rounds xhat to x's dtype before the weight
    cast: str = "torch"

    @property
    def constexprs(self) -> dict[str, bool]:
        """The rule's compile-time half, as the kernels name it."""
        return {"LAYER": self.kind == "layer", "ROUND": self.cast == "llama"}


@lru_cache(1024)
def rows_for(n: int, share: int = 16) -> dict[str, int]:
    """Return the tile for rows of n <= MAX_BLOCK columns, of 8 elements per thread or more."""
    block_n = next_power_of_2(n)
    # sixteen where rows are long: short ones' share of dw would take more than 128 registers
    block_m = max(1, (2048 if block_n >= 1024 else 1024) // block_n)
    num_warps = max(4, min(16, block_m * block_n // (32 * share)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}


def grad_rows_for(n: int, share: int, has_halves: bool) -> dict[str, int]:
    """Return norm_grad's tile, of many warps, as each program writes a row of sums.

    has_halves: whether a thread has the same columns of both halves of a tile's rows.
    """
    block_n = next_power_of_2(n)
    if block_n < (64 if has_halves else 1024):
        return rows_for(n, share) | {"HALVES": False}
    # sums of short rows are few: two programs on a multiprocessor cover each other's waits
    num_warps = max(16 if has_halves and block_n >= 2048 else 8, block_n // (32 * share))
    block_m = num_warps * 32 * share // block_n
    halves = has_halves and block_m > 1
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "HALVES": halves}


def programs_for(m: int, block_m: int, resident: int, units: int, groups: int = 1) -> int:
    """Return how many programs share m rows, at most `resident` on each of the multiprocessors.

    Beyond one each they get 8 rows, so that their sums stay small beside the rows. Up to one each
    they are as few as take no more turns: 1,024 tiles take 8 of 132 programs, and of 128. Of more,
    some multiprocessors would have fewer than others. groups: how many times they are launched.
    """
    tiles = max(1, cdiv(m, block_m))
    most = min(tiles, max(1, min(resident * units, max(units, m // 8)) // groups))
    return most if most * groups > units else cdiv(tiles, cdiv(tiles, most))


def stages_for(column_bytes: int, target: str) -> int:
    """Return how many tiles of rows are under way in norm_grad at once, and one more.

    Then 32 KiB or more are loading, and at most 192 KiB of shared memory are taken.
    """
    if not target.startswith("sm_"):
        return 1
    return 3 if column_bytes <= 6 else 2


def bytes_per_column(*tensors: Tensor | None) -> int:
    """Return the bytes of a column of a row, in all of these together."""
    size = 0
    for t in tensors:  # a generator costs more
        size += 0 if t is None else t.element_size()
    return size


def resident_programs(tile: dict[str, int], stages: int, column_bytes: int, shared: int) -> int:
    """Return how many programs of norm_grad a multiprocessor holds at a time.

    Registers hold 16 warps with 128 for each thread; the bytes `shared` hold the tiles that load.
    """
    size = tile["BLOCK_M"] * tile["BLOCK_N"]
    loading = (stages - 1) * size * column_bytes
    # without halves four rows or more leave through as much as two bytes of each element
    beside = BESIDE_TILES + (2 * size if tile["BLOCK_M"] > 2 and not tile["HALVES"] else 0)
    fitting = shared // (loading + beside)
    return max(1, min(16 // tile["num_warps"], fitting))


# decided once for rows of equal sizes
@lru_cache(1024)
def grad_launch_for(
    sizes: tuple[int, int],
    share: int,
    kind: str,
    has_halves: bool,
    column_bytes: int,
    chip: tuple[int, int, str],
) -> tuple[int, dict[str, int]]:
    """Return norm_grad's programs, and its constants and options, for rows of sizes [M, N].

    has_halves: see `grad_rows_for`. chip: its multiprocessors, the bytes of shared memory of one,
    and the target, see `arch`.
    """
    m, n = sizes
    units, shared, target = chip
    # AMD's warps have 64 threads or 32; on sm_120 short rows spill 24 bytes with LayerNorm's sums
    lacks_halves = target.startswith("gfx") or (target == "sm_120" and kind == "layer" and n <= 128)
    tile = grad_rows_for(n, share, has_halves and not lacks_halves)
    stages = stages_for(column_bytes, target)
    resident = resident_programs(tile, stages, column_bytes, shared)
    programs = programs_for(m, tile["BLOCK_M"], resident, units)
    how = tile | {"STAGES": stages}
    if target.startswith("sm_"):
        # left to itself sm_100 takes 64 for float32 rows of 4096, and spills eight bytes
        how["maxnreg"] = 128
    return programs, how


def check_operands(matrices: Sequence[Tensor | None], vectors: Sequence[Tensor | None]) -> None:
    """Hold a launch to the layouts that the kernels read."""
    # generators cost more
    for matrix in matrices:
        assert matrix is None or matrix.stride(1) == 1 or matrix.shape[1] == 1
    for vector in vectors:
        assert vector is None or vector.is_contiguous()


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Return over how many multiprocessors persistent programs are spread."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_per_multiprocessor(device: torch.device) -> int:
    """Return the bytes of shared memory that the blocks on a multiprocessor share."""
    if device.type != "cuda":
        return sys.maxsize
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def norm(
    x: Tensor | PackedRows,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rule: NormRule,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Normalize the rows of x [M, N], or of x + residual, which is then returned beside y.

    Matrices have adjacent columns, vectors [N] are contiguous; so it is in `norm_grad`. An x in
    nine bits has no residual.
    """
    m, n = x.shape
    tile = rows_for(n)
    operand: Any = x
    if isinstance(x, PackedRows):
        if n > MAX_BLOCK:
            return norm(x.unpacked(), residual, weight, bias, rule, out_dtype)
        tile = tile | x.constexprs
        operand = x.matrix
    check_operands((x, residual), (weight, bias))
    y = x.new_empty(m, n, dtype=out_dtype)
    total = None
    if residual is not None:
        total = x.new_empty(m, n, dtype=torch.promote_types(x.dtype, residual.dtype))
    stride_rm = 0 if residual is None else residual.stride(0)
    strides = x.stride(0), stride_rm
    t = NormOperands(operand, residual, weight, bias, y, total, *strides)
    args = t, m, n, rule.eps, rule.offset
    if n > MAX_BLOCK:
        # a whole chunk of two dtypes spills eight bytes on sm_90
        block = CHUNK if residual is None or residual.dtype == x.dtype else CHUNK // 2
        wide_norm_kernel[(m,)](*args, **rule.constexprs, BLOCK=block, num_warps=8)
    else:
        grid = (cdiv(m, tile["BLOCK_M"]),)
        norm_kernel[grid](*args, **rule.constexprs, **tile)
    return y, total


def norm_grad(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor | PackedRows,
    weight: Tensor | None,
    rule: NormRule,
    needs: tuple[bool, bool, bool],
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx [M, N] (plus `dtotal`), dw [N] and db [N], each where needed.

    dw and db are rounded once, to `sums_dtype`, else they are float32.
    """
    m, n = x.shape
    share = share_for(dy, x, rule)
    fits = n * 16 <= MAX_GRAD_BLOCK * share
    if not fits and isinstance(x, PackedRows):
        x = x.unpacked()
    check_operands((dy, dtotal, x), (weight,))
    parts = 1 if fits else row_parts(dy, dtotal, x, weight, rule)
    units = num_multiprocessors(x.device)
    column_bytes = bytes_per_column(dy, dtotal, x)
    how: Mapping[str, Any] = {}
    is_warps = n == WARP_COLUMNS and fits_warps(dy, dtotal, x)
    if is_warps:
        how = warp_rows_for(column_bytes, arch())
        programs = programs_for(m, how["BLOCK_M"], 1, units)
    elif fits:
        chip = units, shared_per_multiprocessor(x.device), arch()
        # a thread has 16 bytes of a row at a time, half its share or all
        has_halves = share == 16 or dy.element_size() == x.element_size()
        programs, how = grad_launch_for((m, n), share, rule.kind, has_halves, column_bytes, chip)
    elif parts:
        programs = max(1, min(m, units // parts))
    else:
        blocks = cdiv(n, WIDE_TILE["BLOCK_N"])
        programs = max(1, min(cdiv(m, WIDE_TILE["BLOCK_M"]), cdiv(WIDE_PROGRAMS * units, blocks)))
    dx = x.new_empty(m, n) if needs[0] else None
    dw = x.new_empty(programs, n, dtype=torch.float32) if needs[1] else None
    db = x.new_empty(programs, n, dtype=torch.float32) if needs[2] else None
    strides = dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0)
    operand: Any = x
    if isinstance(x, PackedRows):
        how = {**how, **x.constexprs}
        operand = x.matrix
    t = NormGrad(dy, dtotal, operand, weight, dx, dw, db, *strides)
    numbers = m, n, rule.eps, rule.offset
    if fits:
        kernel = warp_norm_grad_kernel if is_warps else norm_grad_kernel
        kernel[(programs,)](t, *numbers, **rule.constexprs, **how)
    elif parts:
        launch_split(t, numbers, rule, parts, programs)
    else:
        launch_wide(t, numbers, rule, stages_for(column_bytes, arch()), programs)
    return dx, *sum_partials(dw, db, sums_dtype or torch.float32)


def fits_warps(dy: Tensor, dtotal: Tensor | None, x: Tensor | PackedRows) -> bool:
    """Whether warp_norm_grad takes rows of WARP_COLUMNS: in half precision, of whole vectors."""
    rows = [t for t in (dy, dtotal, x) if isinstance(t, Tensor)]
    return (
        x.element_size() == 2
        and all(t.element_size() == 2 for t in rows)
        and all(t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0 for t in rows)
        # elsewhere kernels have other registers
        and arch().startswith(("sm_", "interpreter"))
    )


@lru_cache
def warp_rows_for(column_bytes: int, target: str) -> dict[str, int]:
    """Return warp_norm_grad's tile: a row for each of eight warps, with up to 255 registers."""
    how = {"BLOCK_M": 8, "BLOCK_N": WARP_COLUMNS // 3, "PARTS": 3, "num_warps": 8}
    how["STAGES"] = stages_for(column_bytes, target)
    if target.startswith("sm_"):
        how["maxnreg"] = 255
    return how


def row_parts(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rule: NormRule
) -> int:
    """Return into how many parts split_norm_grad cuts rows, 0 where it does not fit.

    Its registers are enough for rows of whole vectors, not for LayerNorm's of x in float32; a row
    and its tile of dtotal lie in shared memory.
    """
    n = x.shape[1]
    wide = max(dy.element_size(), x.element_size())
    if rule.kind == "layer" and weight is not None:
        # weights stay in registers, which LayerNorm's sums fill
        wide = max(wide, weight.element_size())
    part = MAX_GRAD_BLOCK // 2 if wide > 2 else MAX_GRAD_BLOCK
    if dtotal is not None and arch() == "sm_100" and rule.kind == "rms":
        # there 8192 columns beside those of dtotal spill 12 bytes
        part = MAX_GRAD_BLOCK // 2
    parts = next_power_of_2(cdiv(n, part))
    rows = [t for t in (dy, dtotal, x) if t is not None]
    loading = parts * part * bytes_per_column(dy, x)
    loading += 0 if dtotal is None else part * dtotal.element_size()
    fits = (
        (rule.kind == "rms" or x.element_size() == 2)
        and n <= MAX_BLOCK
        and all(t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0 for t in rows)
        and n % 16 == 0
        and loading + BESIDE_TILES <= shared_per_multiprocessor(x.device)
        # elsewhere kernels have other registers
        and arch().startswith(("sm_", "interpreter"))
    )
    return parts if fits else 0


def launch_split(
    t: NormGrad, numbers: tuple[int, int, float, float], rule: NormRule, parts: int, programs: int
) -> None:
    """Launch the gradient of a norm over rows of several parts.

    LayerNorm's sums take so many registers that a thread's others must serve twice the elements.
    """
    part = next_power_of_2(numbers[1]) // parts
    how: dict[str, int] = rule.constexprs | {"BLOCK_N": part, "PARTS": parts, "STAGES": 2}
    warps = 8 if rule.kind == "layer" else 16
    if arch().startswith("sm_"):
        how["maxnreg"] = 255 if rule.kind == "layer" else 128
    split_norm_grad_kernel[programs, parts](t, *numbers, **how, num_warps=warps)


def launch_wide(
    t: NormGrad,
    numbers: tuple[int, int, float, float],
    rule: NormRule,
    stages: int,
    programs: int,
) -> None:
    """Launch the gradients of wide rows: four numbers of each row, then blocks of columns."""
    m, n, _, offset = numbers
    layer = rule.constexprs["LAYER"]
    stats = t.x.new_empty(4, m, dtype=torch.float32)
    # few programs, so that LayerNorm finds a row in the cache when it reads it again
    many = layer and arch().startswith("sm_")
    block = 2 * CHUNK if many else CHUNK
    how = {"LAYER": layer, "BLOCK": block, "num_warps": 32 if many else 8}
    wide_stats_kernel[(m,)](t, stats, *numbers, **how)
    grid = programs, cdiv(n, WIDE_TILE["BLOCK_N"])
    wide_grad_kernel[grid](t, stats, m, n, offset, **rule.constexprs, **WIDE_TILE, STAGES=stages)


def share_for(dy: Tensor, x: Tensor, rule: NormRule) -> int:
    """Return how many elements per thread fit 128 registers in norm_grad.

    float32 is not packed by two, and LayerNorm sums more.
    """
    wide = x.element_size() > 2 or (rule.kind == "layer" and dy.element_size() > 2)
    return 8 if wide else 16
