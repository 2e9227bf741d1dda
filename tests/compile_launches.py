"""The launches that test_compile compiles: every kernel, on meta tensors, at models' sizes."""

import torch

from fusedckpt.kernels import linear, norm
from fusedckpt.kernels.activations import ACTIVATIONS


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def linears(
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int] = (8192, 11008, 4096),
    activations: tuple[str, ...] = ("gelu", "silu"),
    kernels: tuple[str, ...] = ("fused", "split"),
) -> None:
    m, n, k = sizes
    x, w, b, dy = (meta(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,), (m, n)))
    for activation in activations:
        for kernel in kernels:
            linear.linear_act(x, w, b, activation, True, kernel)
            linear.linear_act(x, w, None, activation, False, kernel)
            linear.linear_act_dz(dy, x, w, b, None, activation, True, kernel)
            linear.linear_act_dz(dy, x, w, None, None, activation, False, kernel)


def norms() -> None:
    for n in (64, 1024, 4096, 8192, 16384):
        x, w = meta(4096, n), meta(n)
        for kind, cast in (("rms", "torch"), ("rms", "llama"), ("layer", "torch")):
            rule = norm.NormRule(kind, 1e-6, 0.0, cast)
            b = w if kind == "layer" else None
            norm.norm(x, None, w, b, rule, torch.bfloat16)
            norm.norm(x, x, w, b, rule, torch.bfloat16)
            norm.norm_grad(x, None, x, w, rule, (True, True, kind == "layer"))
            norm.norm_grad(x, x, x, w, rule, (True, False, False))
            norm.norm_grad(x, None, x, None, rule, (False, True, False))


def everything() -> None:
    linears(activations=tuple(ACTIVATIONS))
    linears(sizes=(8192, 11008, 1024), kernels=("fused",))
    # rows of 1001 bf16 elements are not 16-byte aligned: pointer loads
    linears(sizes=(431, 333, 1001), kernels=("fused",))
    linears(torch.float16, activations=("gelu",))
    linears(torch.float32, activations=("gelu",))
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    linears(torch.float32, activations=("gelu",), kernels=("fused",))
    linears(torch.float32, (431, 333, 1001), ("gelu",), ("fused",))
    norms()
