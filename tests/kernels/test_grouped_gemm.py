"""Grouped products beside a loop over experts, in all layouts of weights: the rule of errors."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE, HALF, squared
from torch import Tensor

from fusedckpt.kernels.runtime import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("kernels need Triton", allow_module_level=True)

from fusedckpt.kernels.grouped_gemm import grouped_gemm, grouped_grad

DTYPES = (torch.float32, *HALF)
# rows of each expert, K, N: several tiles, none, one expert, one row; 4 last rows are of no expert
SIZES = [((40, 0, 33, 1, 0), 45, 70), ((0, 0, 0), 3, 5), ((17,), 64, 130), ((0, 1), 1, 1)]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5).to(DEVICE, dtype)


def agree(ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    """Hold the rule of support.compare."""
    assert ours.isfinite().all()
    mine, eager = (squared(t.double() - truth) ** 0.5 for t in (ours, theirs))
    count, scale = truth.numel() ** 0.5, squared(truth) ** 0.5
    assert mine <= 2 * eager + 8 * torch.finfo(torch.float32).eps * max(count, scale)


def parts(counts: tuple[int, ...]) -> tuple[Tensor, list[slice]]:
    ends = torch.tensor(counts).cumsum(0).int().to(DEVICE)
    return ends, [slice(e - c, e) for e, c in zip(ends.tolist(), counts, strict=True)]


def products(rows, x, w, y, bias=None, scores=None):
    """Write what grouped_gemm adds to y in a loop."""
    for e, part in enumerate(rows):
        z = x[part] @ w[e]
        if bias is not None:
            z = z + (bias[e] if scores is None else scores[part, None] * bias[e])
        y[part] = (y[part] + z).to(y.dtype)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(sizes, turned, dtype):
    counts, k, n = sizes
    ends, rows = parts(counts)
    shape = (len(counts), k, n) if turned else (len(counts), n, k)
    w, bias = draw(*shape, dtype=dtype), draw(len(counts), n, dtype=dtype)
    x, total = (draw(sum(counts) + 4, width, dtype=dtype) for width in (k, n))
    scores = torch.rand(len(x), device=DEVICE)
    w = w if turned else w.mT
    for extra, adds in (((), False), ((bias,), False), ((bias, scores), True)):
        first = total if adds else torch.zeros_like(total)
        theirs = products(rows, x, w, first.clone(), *extra)
        truth = products(rows, *(t.double() for t in (x, w, first, *extra)))
        ours = total.clone() if adds else torch.empty_like(total)
        grouped_gemm(x, w, ends, ours, *extra, adds=adds)
        own = slice(0, sum(counts))
        agree(ours[own], theirs[own], truth[own])
        # rows of no expert are not written
        assert not adds or torch.equal(ours[own.stop :], total[own.stop :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_weights(sizes, dtype):
    counts, m, n = sizes
    ends, rows = parts(counts)
    x, dy = (draw(sum(counts) + 4, width, dtype=dtype) for width in (m, n))

    def grads(x, dy, start, dtype):
        return torch.stack([start + x[part].t() @ dy[part] for part in rows]).to(dtype)

    for wide, start in ((dtype, 0.0), (torch.float32, 0.5)):
        dw = torch.full((len(counts), m, n), start, dtype=wide, device=DEVICE)
        grouped_grad(x, dy, ends, dw, adds=bool(start))
        theirs = grads(x.to(wide), dy.to(wide), start, wide)
        agree(dw, theirs, grads(x.double(), dy.double(), start, torch.float64))
        again = torch.full_like(dw, start)
        grouped_grad(x, dy, ends, again, adds=bool(start))
        assert torch.equal(again, dw)
