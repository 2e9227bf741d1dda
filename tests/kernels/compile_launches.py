"""The launches that test_compile compiles: every kernel, on meta tensors, at models' sizes."""

import torch

from bench.settings import DEFAULT_TOKENS, SIZES
from fusedckpt.kernels import linear, norm
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.dropout import dropout
from fusedckpt.kernels.elementwise import HiddenGrad
from fusedckpt.kernels.linear import hidden_grad, hybrid_grad


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def linears(
    *activations: str,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int] = (8192, 11008, 4096),
    kernel: str = "fused",
) -> None:
    m, n, k = sizes
    x, w, b, dy = (meta(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,), (m, n)))
    for activation in activations:
        linear.linear_act(x, w, b, activation, True, kernel)
        linear.linear_act(x, w, None, activation, False, kernel)
        linear.linear_act_dz(dy, x, w, b, None, activation, True, kernel)
        linear.linear_act_dz(dy, x, w, None, None, activation, False, kernel)


def hybrids(
    activation: str,
    *,
    gated: bool,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int] = (8192, 11008, 4096),
) -> None:
    m, n, k = sizes
    dy, down = meta(m, k, dtype=dtype), meta(k, n, dtype=dtype)
    z, up, h = (meta(m, n, dtype=dtype) for _ in range(3))
    if gated:
        grads = HiddenGrad(z, up, h, z, up)
        hidden_grad(h, grads, activation, (True, True), "split")
        hybrid_grad(dy, down, grads, activation, (True, True))
        hybrid_grad(dy, down, grads, activation, (False, False))
    else:
        hidden_grad(h, HiddenGrad(z, None, z, h, None), activation, (True, False), "split")
        hybrid_grad(dy, down, HiddenGrad(z, None, z, h, None), activation, (True, False))
        hybrid_grad(dy, down, HiddenGrad(z, None, None, h, None), activation, (False, False))


def norms(n: int) -> None:
    """The norms as layers call them: with a weight, and backward the residual's gradient."""
    x, w = meta(4096, n), meta(n)
    for kind, bias in (("rms", None), ("layer", w)):
        rule = norm.NormRule(kind, 1e-6)
        norm.norm(x, x, w, bias, rule, torch.bfloat16)
        norm.norm_grad(x, x, x, w, rule, (True, True, bias is not None), w.dtype)


def rare_norms(n: int) -> None:
    """Without this or that, with another cast, in several dtypes."""
    x, w = meta(4096, n), meta(n)
    llama, layer = norm.NormRule("rms", 1e-6, 0.0, "llama"), norm.NormRule("layer", 1e-6)
    norm.norm(x, None, w, None, llama, torch.bfloat16)
    norm.norm_grad(x, None, x, w, llama, (True, True, False))
    norm.norm(x, None, None, None, layer, torch.bfloat16)
    norm.norm_grad(x, None, x, None, layer, (False, True, False))
    # the sum of two products, and a residual stream, that were not rounded
    wide = meta(4096, n, dtype=torch.float32)
    for rule in (norm.NormRule("rms", 1e-6), layer):
        norm.norm_grad(wide, x, x, w, rule, (True, True, rule is layer))
        norm.norm_grad(wide, wide, wide, w, rule, (True, True, rule is layer))
    norm.norm(x, wide, w, None, llama, torch.float32)


def dropouts() -> None:
    """An adapter's input, and a hidden layer."""
    seed = meta(1, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n in (4096, 11008, 1001):
            dropout(meta(8192, n, dtype=dtype), 0.05, seed, 3, "split")


def benchmarked() -> None:
    """What `bench run` launches, at every size that it has."""
    for size in {size for sizes in SIZES.values() for size in sizes}:
        tokens, d, f = size.tokens or DEFAULT_TOKENS["cuda"], size.dim, size.hidden
        norms(d)
        linears("gelu", sizes=(tokens, f, d))
        linears("gelu", sizes=(tokens, f, d), kernel="split")
        hybrids("gelu", gated=False, sizes=(tokens, f, d))
        hybrids("silu", gated=True, sizes=(tokens, f, d))


def everything() -> None:
    benchmarked()
    dropouts()
    linears("gelu", "mish")
    linears("gelu", sizes=(8192, 11008, 1024))
    # rows of 1001 bf16 elements are not 16-byte aligned: pointer loads
    linears("gelu", sizes=(431, 333, 1001))
    linears(*ACTIVATIONS, kernel="split")
    linears("gelu", dtype=torch.float16)
    linears("gelu", dtype=torch.float32)
    for sizes in ((8192, 11008, 4096), (8192, 11008, 1024), (431, 333, 1001)):
        hybrids("gelu", gated=False, sizes=sizes)
        hybrids("silu", gated=True, sizes=sizes)
    hybrids("gelu", gated=True)
    hybrids("gelu", gated=True, dtype=torch.float32)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    linears("gelu", dtype=torch.float32)
    linears("gelu", dtype=torch.float32, sizes=(431, 333, 1001))
    hybrids("gelu", gated=True, dtype=torch.float32)
    for n in (64, 4096, 8192, 16384, 32768):
        norms(n)
        rare_norms(n)
