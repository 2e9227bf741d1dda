"""The launches that test_compile compiles: every kernel, on meta tensors, at models' sizes."""

import torch

from fusedckpt.kernels import linear, norm
from fusedckpt.kernels.activations import ACTIVATIONS


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


def norms() -> None:
    for n in (64, 4096, 8192, 16384):
        x, w = meta(4096, n), meta(n)
        for kind, cast in (("rms", "torch"), ("rms", "llama"), ("layer", "torch")):
            rule = norm.NormRule(kind, 1e-6, 0.0, cast)
            b = w if kind == "layer" else None
            norm.norm(x, x, w, b, rule, torch.bfloat16)
            norm.norm_grad(x, x, x, w, rule, (True, True, kind == "layer"))
        norm.norm(x, None, None, None, rule, torch.bfloat16)
        norm.norm_grad(x, None, x, None, rule, (False, True, False))


def everything() -> None:
    linears("gelu", "mish")
    linears("gelu", sizes=(8192, 11008, 1024))
    # rows of 1001 bf16 elements are not 16-byte aligned: pointer loads
    linears("gelu", sizes=(431, 333, 1001))
    linears(*ACTIVATIONS, kernel="split")
    linears("gelu", dtype=torch.float16)
    linears("gelu", dtype=torch.float32)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    linears("gelu", dtype=torch.float32)
    linears("gelu", dtype=torch.float32, sizes=(431, 333, 1001))
    norms()
