"""The launches of layers on meta tensors, at every size of bench/cases.py."""

from __future__ import annotations

import torch

from bench.cases import DEFAULT_TOKENS, SIZES
from fusedckpt.kernels import linear, norm
from fusedckpt.kernels.grouped_gemm import grouped_gemm, grouped_grad
from fusedckpt.kernels.linear import HiddenGrad, hidden_grad, hybrid_grad


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def linears(
    *activations: str,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int] = (8192, 11008, 4096),
    kernel: str = "fused",
) -> None:
    """A linear with its activation, and its gradient, with a bias and without."""
    m, n, k = sizes
    x, w, b, dy = (meta(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,), (m, n)))
    for activation in activations:
        if kernel == "fused":
            linear.linear_then_act(x, w, b, activation, keep_z=True)
            linear.linear_then_act(x, w, None, activation, keep_z=False)
            linear.linear_act_dz(dy, x, w, b, activation, needs_db=True)
            linear.linear_act_dz(dy, x, w, None, activation, needs_db=False)
            continue
        for needs_db in (True, False):
            linear.hidden(dy, None, activation, kernel)
            grads = HiddenGrad(dy, None, None, torch.empty_like(dy), None)
            linear.hidden_grad(dy, grads, activation, (needs_db, False), kernel)


def hybrids(
    activation: str,
    *,
    gated: bool,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int] = (8192, 11008, 4096),
) -> None:
    """The gradient of an MLP's hidden layer, split and hybrid."""
    m, n, k = sizes
    dy, down = meta(m, k, dtype=dtype), meta(k, n, dtype=dtype)
    z, up, h = (meta(m, n, dtype=dtype) for _ in range(3))
    if gated:
        split, plain, needs_db = HiddenGrad(z, up, h, z, dup=up), None, (True, True)
    else:
        split, plain = (HiddenGrad(z, None, made, h, dup=None) for made in (z, None))
        needs_db = (True, False)
    hidden_grad(h, split, activation, needs_db, kernel="split")
    hybrid_grad(dy, down, split, activation, needs_db=needs_db)
    hybrid_grad(dy, down, plain or split, activation, needs_db=(False, False))


def grouped(
    tokens: int = 8192,
    d: int = 2048,
    f: int = 768,
    *,
    num_experts: int = 128,
    top_k: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Grouped products of a mixture of experts, and their gradients: Qwen3-30B-A3B's sizes."""
    ends, rows = meta(num_experts, dtype=torch.int32), tokens * top_k
    x, z, h = (meta(rows, n, dtype=dtype) for n in (d, 2 * f, f))
    scores, bias = meta(rows, 1, dtype=torch.float32), meta(num_experts, d, dtype=dtype)
    down = meta(num_experts, d, f, dtype=dtype).mT
    for w in (
        meta(num_experts, 2 * f, d, dtype=dtype).mT,
        meta(num_experts, d, 2 * f, dtype=dtype),
    ):
        grouped_gemm(x, w, ends, z)
        grouped_gemm(z, w.mT, ends, x)
    grouped_gemm(h, down, ends, x, bias, scores)
    grouped_gemm(x, down.mT, ends, h, adds=True)
    grouped_grad(z, x, ends, meta(num_experts, 2 * f, d, dtype=dtype))
    sums = meta(num_experts, 2 * f, d, dtype=torch.float32)
    grouped_grad(z, x, ends, sums, adds=True)
    # of a bias: scores, in rows of 16 bytes
    sums = meta(num_experts, 8, d, dtype=torch.float32)
    grouped_grad(meta(rows, 8, dtype=dtype), x, ends, sums, adds=True)


def norms(n: int) -> None:
    """The norms as layers call them: with a weight, and backward the residual's gradient."""
    x, w = meta(4096, n), meta(n)
    for kind, bias in (("rms", None), ("layer", w)):
        rule = norm.NormRule(kind, 1e-6)
        norm.norm(x, x, w, bias, rule=rule, out_dtype=torch.bfloat16)
    norm_grads(n)


def norm_grads(n: int) -> None:
    """The gradients of norms as layers call them."""
    x, w = meta(4096, n), meta(n)
    for kind in ("rms", "layer"):
        rule, needs = norm.NormRule(kind, 1e-6), (True, True, kind == "layer")
        norm.norm_grad(x, x, x, w, rule=rule, needs=needs, sums_dtype=w.dtype)


def benchmarked(*names: str) -> None:
    """Launch the kernels of `bench run` at sizes by name, at every one where none is given."""
    grouped()
    for size in dict.fromkeys(size for name in names or SIZES for size in SIZES[name]):
        tokens, d, f = size.tokens or DEFAULT_TOKENS["cuda"], size.dim, size.hidden
        norms(d)
        linears("gelu", sizes=(tokens, f, d))
        linears("gelu", sizes=(tokens, f, d), kernel="split")
        hybrids("gelu", gated=False, sizes=(tokens, f, d))
        hybrids("silu", gated=True, sizes=(tokens, f, d))
