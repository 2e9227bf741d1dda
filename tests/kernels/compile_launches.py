"""The launches that test_compile compiles: every kernel, on meta tensors, at models' sizes."""

import torch

from fusedckpt.kernels import gated_norm, gating, int8, norm, pointwise, routed
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.codes import coded_act, coded_grad
from fusedckpt.kernels.cross_entropy import LogitRule, statistics, statistics_grad
from fusedckpt.kernels.dropout import dropout
from fusedckpt.kernels.grouped_gemm import clear_unused
from fusedckpt.kernels.linear import HiddenGrad, hidden, hidden_grad, hybrid_grad
from tests.kernels.launches import (
    benchmarked,
    grouped,
    hybrids,
    linears,
    meta,
    norm_grads,
    norms,
)

LLAMA, LAYER = norm.NormRule("rms", 1e-6, 0.0, "llama"), norm.NormRule("layer", 1e-6)


def rare_norms(n: int) -> None:
    """Without this or that, with another cast, in several dtypes."""
    x, wide, w = meta(4096, n), meta(4096, n, dtype=torch.float32), meta(n)
    norm.norm(x, None, w, None, LLAMA, torch.bfloat16)
    norm.norm(x, None, None, None, LAYER, torch.bfloat16)
    norm.norm(x, wide, w, None, LLAMA, torch.float32)
    rare_norm_grads(n)


def rare_norm_grads(n: int) -> None:
    """The gradients of these."""
    x, wide, w = meta(4096, n), meta(4096, n, dtype=torch.float32), meta(n)
    norm.norm_grad(x, None, x, w, LLAMA, (True, True, False))
    norm.norm_grad(x, None, x, None, LAYER, (False, True, False))
    # the sum of two products, and a residual stream, that were not rounded
    for rule in (norm.NormRule("rms", 1e-6), LAYER):
        norm.norm_grad(wide, x, x, w, rule, (True, True, rule is LAYER))
        norm.norm_grad(wide, wide, wide, w, rule, (True, True, rule is LAYER))


def gated_norms() -> None:
    """As Mamba 2, Nemotron H, Zamba 2, Qwen3-Next and Kimi Linear have them; one has no weight."""
    rule = gated_norm.GatedNormRule
    for n, dtype, options in (
        (5120, torch.bfloat16, rule(1e-5, gates_first=True, cast="llama")),
        (4101, torch.bfloat16, rule(1e-5, gates_first=True, cast="llama")),
        (7168, torch.bfloat16, rule(1e-6)),
        (10240, torch.bfloat16, rule(1e-5, gates_first=True, cast="llama")),
        (8192, torch.bfloat16, rule(1e-6)),
        (8192, torch.bfloat16, rule(1e-5, groups=8, gates_first=True, cast="llama")),
        (7168, torch.float32, rule(1e-5, groups=2, gates_first=True)),
        (128, torch.bfloat16, rule(1e-6, cast="llama")),
        (128, torch.bfloat16, rule(1e-6, "sigmoid")),
    ):
        x = meta(4096, n, dtype=dtype)
        w = None if options.activation == "sigmoid" else meta(n, dtype=dtype)
        gated_norm.gated_norm(x, x, w, options, dtype)
        gated_norm.gated_norm_grad(x, x, x, w, options, (True, True, w is not None), dtype)


def chained() -> None:
    """As diffusion transformers, UNets and residual nets have them."""
    layer, rms = norm.NormRule("layer", 1e-6), norm.NormRule("rms", 1e-6)
    for dtype, n in ((torch.bfloat16, 1152), (torch.float32, 3072)):
        x, w, parts = meta(8192, n, dtype=dtype), meta(n, dtype=dtype), meta(2, n, dtype=dtype)
        pointwise.modulated_norm(x, None, None, parts, parts, 4096, layer)
        pointwise.modulated_norm(x, w, w, parts, parts, 4096, layer)
        pointwise.modulated_norm(x, w, None, parts, None, 4096, rms)
        gate = parts[:, None]
        branch = x.view(2, 4096, n)
        places = pointwise.operand_places_of(gate, branch)
        assert places is not None
        pointwise.gated_sum(branch, branch, gate, places)
        x, w = meta(8, 320, 64, 64, dtype=dtype), meta(320, dtype=dtype)
        last = x.contiguous(memory_format=torch.channels_last)
        stats = meta(8, 32, dtype=torch.float32)
        sums = meta(320, dtype=torch.float32)
        for pictures in (x, last):
            pointwise.channel_norm(pictures, stats, stats, w, w, 32, "silu")
            pointwise.channel_norm(pictures, sums, sums, w, w, 0, "relu", pictures)


def dropouts() -> None:
    """An adapter's input, and a hidden layer."""
    seed = meta(1, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n in (4096, 11008, 1001):
            dropout(meta(8192, n, dtype=dtype), 0.05, seed, 3, "split")


def heads() -> None:
    """A chunk of logits and its gradient, in place, for vocabularies long, short and odd."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n in (128256, 50257, 17):
            u, target = meta(512, n, dtype=dtype), meta(512, 1, dtype=torch.int64)
            for rule in (LogitRule(), LogitRule(0.5, 30.0, 1.2, entropy=True)):
                y = statistics(u, target, rule, "triton")
                statistics_grad(torch.empty_like(y), u, target, y, rule, "triton", dz=u)


def gates() -> None:
    """A gated MLP's hidden layer: gate and up apart, and halves of one tensor's columns."""
    dy, down, h = meta(8192, 4096), meta(4096, 11008), meta(8192, 11008)
    for gate, up in ((meta(8192, 11008), meta(8192, 11008)), meta(8192, 2 * 11008).chunk(2, 1)):
        hidden(gate, up, "silu", "split", h)
        grads = HiddenGrad(gate, up, h, gate, up)
        hidden_grad(h, grads, "silu", (True, True), "split")
        hybrid_grad(dy, down, grads, "silu", (True, True))


def codes() -> None:
    """Activations with codes, in place, for rows of a model and rows that four does not divide."""
    for activation, dtype, n in (("gelu", torch.bfloat16, 14336), ("silu", torch.float32, 1001)):
        z = meta(8192, n, dtype=dtype)
        _, packed = coded_act(z, activation, "split", out=z)
        coded_grad(z, packed, activation, "split", out=z)


def nine_bits() -> None:
    """A checkpoint's input of a model's width, an odd one, and rows with gaps."""
    for dtype, n in ((torch.bfloat16, 4096), (torch.float16, 1001), (torch.float32, 4096)):
        x = meta(8192, n, dtype=dtype)
        int8.unpack_int8(int8.pack_int8(x, "triton"), x, "triton")
    int8.pack_int8(meta(8192, 2 * 4096)[:, ::2], "triton")


def packed_norm_grads() -> None:
    """The gradients of norms that read x in nine bits."""
    rms = norm.NormRule("rms", 1e-6)
    for dtype, n, rules in (
        (torch.bfloat16, 4096, (LLAMA, LAYER)),
        (torch.bfloat16, 8192, (LAYER,)),
        (torch.bfloat16, 768, (LLAMA, LAYER)),
        (torch.float32, 4096, (rms, LAYER)),
    ):
        x, w, rows = meta(8192, n, dtype=dtype), meta(n, dtype=dtype), packed(8192, n, dtype)
        for rule in rules:
            norm.norm_grad(x, x, rows, w, rule, (True, True, rule is LAYER))


def packed_norms() -> None:
    """Norms that backward runs again on x in nine bits."""
    for dtype, n, rule in ((torch.bfloat16, 4096, LLAMA), (torch.float32, 4096, LAYER)):
        w = meta(n, dtype=dtype)
        norm.norm(packed(8192, n, dtype), None, w, w if rule is LAYER else None, rule, dtype)


def packed(m: int, n: int, dtype: torch.dtype) -> int8.PackedRows:
    """Return rows in nine bits."""
    return int8.PackedRows(meta(int8.packed_nbytes(m, n), dtype=torch.int8), m, n, dtype)


def routes(
    num_experts: int, top_k: int, n: int, gating_rule: gating.Gating, dtype: torch.dtype
) -> None:
    """A mixture's rows, sorted, gated in place and summed: gate and up together and apart."""
    index = meta(8192, top_k, dtype=torch.int64)
    order, tokens, places, ends, _ = routed.sorted_rows(index, num_experts)
    route = routed.Route(order, tokens, places, ends, None, "triton", runs_triton=True)
    h, scores = meta(8192, top_k * n, dtype=dtype), meta(8192, top_k, dtype=torch.float32)
    for z, up in ((meta(8192, 2 * top_k * n, dtype=dtype), None), (torch.empty_like(h), h)):
        gating.gated(z, up, scores, route, gating_rule)
        over = {"h": h, "dz": z} if up is None else {"dz": z, "du": up}
        needs = up is None, True
        gating.gated_grad(h, z, up, scores, route, gating_rule, needs, **over)
    routed.combine(meta(8192, top_k * 2048, dtype=dtype), route)
    clear_unused(meta(num_experts, 2 * n, 2048, dtype=dtype), ends)


def near_limits() -> None:
    """The launches that take almost all the registers that they may."""
    for n in (128, 768, 1024, 2048, 4096, 8192, 16384, 32768):
        norm_grads(n)
    for n in (128, 4096, 8192, 16384):
        rare_norm_grads(n)
    packed_norm_grads()
    gated_norms()


def one_of_each() -> None:
    """Some launches of each kernel, those near a limit among them."""
    near_limits()
    norms(4096)
    norms(32768)
    chained()
    codes()
    nine_bits()
    packed_norms()
    dropout(meta(8192, 4096), 0.05, meta(1, dtype=torch.int64), 3, "split")
    u, target = meta(512, 50257), meta(512, 1, dtype=torch.int64)
    y = statistics(u, target, LogitRule(), "triton")
    statistics_grad(torch.empty_like(y), u, target, y, LogitRule(), "triton", dz=u)
    routes(32, 4, 2880, gating.ClampedSwiGLU(), torch.bfloat16)
    linears("gelu")
    linears("gelu", kernel="split")
    linears("gelu", sizes=(431, 333, 1001))
    hybrids("silu", gated=True)
    linears("gelu", dtype=torch.float32)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    linears("gelu", dtype=torch.float32)
    grouped(dtype=torch.float32)


def every_size() -> None:
    benchmarked()
    everything()


def everything() -> None:
    benchmarked("tiny", "llama-3-8b")
    gated_norms()
    chained()
    dropouts()
    heads()
    gates()
    codes()
    nine_bits()
    packed_norm_grads()
    packed_norms()
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
    grouped(431, 333, 101, num_experts=5)
    # Qwen3-30B-A3B's sizes, GptOss's, and odd ones
    for dtype in (torch.bfloat16, torch.float32):
        routes(128, 8, 768, "silu", dtype)
        routes(32, 4, 2880, gating.ClampedSwiGLU(), dtype)
    routes(512, 2, 331, "gelu", torch.float16)
    for dtype in (torch.float16, torch.float32):
        grouped(dtype=dtype)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    linears("gelu", dtype=torch.float32)
    linears("gelu", dtype=torch.float32, sizes=(431, 333, 1001))
    hybrids("gelu", gated=True, dtype=torch.float32)
    grouped(dtype=torch.float32)
    for n in (768, 1024, 2048):
        norms(n)
    for n in (128, 4096, 8192, 16384, 32768):
        norms(n)
        rare_norms(n)
