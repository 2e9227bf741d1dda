"""Cases of products: GEMMs with each epilogue, and grouped GEMMs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fusedckpt.kernels import grouped_gemm, linear
from fusedckpt.kernels.activations import ACTIVATIONS
from tests.ptx.judging import DTYPES, KernelCase, Maybe, Results, beside, leaf, named, summed


@contextmanager
def precision(kind: str) -> Iterator[None]:
    """Multiply float32 in TF32 inside if the kind is "tf32"."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if kind == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def rounded(x: Tensor, kind: str) -> Tensor:
    """Round an operand of eager's product to TF32, to nearest as cuBLAS does."""
    if kind != "tf32" or x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def gemm(kind: str, m: int, n: int, k: int, name: str = "gelu", layout: str = "rows") -> Results:
    """gemm_kernel with the epilogues of a linear and of its gradient; w by rows or columns."""
    dtype = DTYPES[kind]
    x, dy, b = (torch.randn(*shape, dtype=dtype) for shape in ((m, k), (m, n), (n,)))
    w = torch.randn(n, k, dtype=dtype) / k**0.5
    w = w if layout == "rows" else w.t().contiguous().t()
    with precision(kind):
        h, z = linear.linear_then_act(x, w, b, name, keep_z=True)
        dz, db = linear.linear_act_dz(dy, x, w, b, name, needs_db=True)

    def eager(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> Sequence[Maybe]:
        z = leaf(torch.nn.functional.linear(rounded(x, kind), rounded(w, kind), b))
        h = ACTIVATIONS[name].eager(z)
        (dz,) = torch.autograd.grad(h, z, dy)
        return h.detach(), z.detach(), dz, summed(dz)

    return beside((h, z, dz, db), eager, x, w, b, dy)


def hybrid(kind: str, m: int, n: int, k: int, name: str, gated: bool = False) -> Results:
    """gemm_kernel with the epilogue of a hidden layer's gradient."""
    dtype = DTYPES[kind]
    dy, down = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype) / k**0.5
    z, up = torch.randn(m, n, dtype=dtype), torch.randn(m, n, dtype=dtype) if gated else None
    h, dz, dup = torch.empty_like(z), torch.empty_like(z), torch.empty_like(z) if gated else None
    with precision(kind):
        grads = linear.HiddenGrad(z, up, h, dz, dup)
        sums = linear.hybrid_grad(dy, down, grads, name, (True, gated))

    def eager(dy: Tensor, down: Tensor, z: Tensor, up: Maybe) -> Sequence[Maybe]:
        dh = rounded(dy, kind) @ rounded(down, kind)
        leaves = [leaf(t) for t in (z, up) if t is not None]
        h = ACTIVATIONS[name].eager(leaves[0])
        h = h * leaves[1] if gated else h
        dz, *rest = torch.autograd.grad(h, leaves, dh)
        dup = rest[0] if rest else None
        return h.detach(), dz, dup, summed(dz), None if dup is None else summed(dup)

    return beside((h, dz, dup, *sums), eager, dy, down, z, up)


def grouped(
    kind: str, experts: int, rows: int, k: int, n: int, layout: str = "rows", adds: bool = False
) -> Results:
    """Products of experts and their gradients: some without a row, one of one row, free rows."""
    dtype, few = DTYPES[kind], [rows // 3, rows // 3, rows // 3 + 1]
    ends = few + [rows - 5] * (experts - len(few))
    x, dy = torch.randn(rows, k, dtype=dtype), torch.randn(rows, n, dtype=dtype)
    w = torch.randn(len(ends), k, n, dtype=dtype) / k**0.5
    w = w if layout == "rows" else w.mT.contiguous().mT
    bias = None if adds else torch.randn(len(ends), n, dtype=dtype)
    scores = None if adds else torch.rand(rows)
    y = torch.randn(rows, n, dtype=dtype) if adds else torch.empty(rows, n, dtype=dtype)
    shape = len(ends), k, n
    dw = torch.zeros(shape, dtype=torch.float32) if adds else torch.empty(shape, dtype=dtype)
    y_before, dw_before, on_device = y.clone(), dw.clone(), torch.tensor(ends, dtype=torch.int32)
    with precision(kind):
        grouped_gemm.grouped_gemm(x, w, on_device, y, bias, scores, adds)
        grouped_gemm.grouped_grad(x, dy, on_device, dw, adds)

    def eager(
        x: Tensor, w: Tensor, bias: Maybe, scores: Maybe, y: Tensor, dw: Tensor, dy: Tensor
    ) -> Sequence[Maybe]:
        # what is not added to is written whole, with zeros where no expert has rows
        y, dw, begin = *(t.clone() if adds else torch.zeros_like(t) for t in (y, dw)), 0
        x, w, dy = (rounded(t, kind) for t in (x, w, dy))
        for expert, end in enumerate(ends):
            total = x[begin:end] @ w[expert]
            if bias is not None and scores is not None:
                total = total + (scores[begin:end, None] * bias[expert]).to(y.dtype)
            y[begin:end] = y[begin:end] + total if adds else total
            dw[expert] += x[begin:end].T @ dy[begin:end]
            begin = end
        return y, dw

    return beside((y, dw), eager, x, w, bias, scores, y_before, dw_before, dy)


def product_cases(arch: str) -> list[KernelCase]:
    """Return the cases of products on a chip: Hopper's long contractions have another tile."""
    deep = 1040 if arch == "sm_90" else 208
    return [
        named(gemm, "bf16", 150, 144, 80),
        named(gemm, "bf16", 150, 144, 112, layout="columns"),
        named(gemm, "bf16", 150, 144, deep),
        named(gemm, "bf16", 150, 144, deep, name="mish"),
        named(gemm, "f16", 150, 144, deep),
        named(gemm, "bf16", 100, 99, 75),
        named(gemm, "f16", 70, 99, 75, name="mish", layout="columns"),
        named(gemm, "f32", 100, 96, 48),
        named(gemm, "tf32", 100, 96, 80),
        named(gemm, "tf32", 100, 96, 80, layout="columns"),
        named(gemm, "tf32", 100, 99, 41),
        named(hybrid, "bf16", 150, 144, 80, "silu", gated=True),
        named(hybrid, "bf16", 150, 144, 80, "gelu"),
        named(hybrid, "bf16", 150, 136, deep, "gelu", gated=True),
        named(hybrid, "bf16", 150, 136, deep, "silu", gated=True),
        named(hybrid, "bf16", 100, 99, 75, "silu", gated=True),
        named(hybrid, "bf16", 100, 99, 75, "gelu"),
        named(hybrid, "f32", 80, 80, 48, "gelu", gated=True),
        named(hybrid, "tf32", 80, 80, 48, "gelu", gated=True),
        *(
            named(grouped, kind, 65, 90, 48, 80, layout=layout, adds=layout == "columns")
            for kind in ("bf16", "f16", "f32", "tf32")
            for layout in ("rows", "columns")
        ),
        *(
            named(grouped, kind, 65, 90, deep, 144, layout=layout, adds=layout == "columns")
            for kind in ("bf16", "f16")
            for layout in ("rows", "columns")
        ),
        named(grouped, "bf16", 5, 90, 75, 99),
        named(grouped, "bf16", 5, 90, 75, 99, layout="columns", adds=True),
    ]
