"""Cases of kernels over elements and rows, launched through the project's own launchers.

Sizes are small, odd where a kernel has another path for odd ones, and give more than one tile where
tiles exist. The cases of products are in product_cases.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fusedckpt.kernels import codes, cross_entropy, dropout, gated_norm, int8, linear, norm
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.layers.gated_norm import eager_gated_norm
from tests.ptx.judging import DTYPES, KernelCase, Maybe, Results, beside, leaf, named, summed


def activation(name: str, kind: str) -> Results:
    """act_kernel and act_grad_kernel, without a gate."""
    dtype, (m, n) = DTYPES[kind], (40, 136)
    z, dh = 3 * torch.randn(m, n, dtype=dtype), torch.randn(m, n, dtype=dtype)
    h = linear.hidden(z, None, name, "split")
    grads = linear.HiddenGrad(z, None, torch.empty_like(z), torch.empty_like(z), None)
    db, _ = linear.hidden_grad(dh, grads, name, (True, False), "split")

    def eager(z: Tensor, dh: Tensor) -> Sequence[Maybe]:
        z = leaf(z)
        h = ACTIVATIONS[name].eager(z)
        (dz,) = torch.autograd.grad(h, z, dh)
        return h.detach(), h.detach(), dz, summed(dz)

    return beside((h, grads.h, grads.dz, db), eager, z, dh)


def gate(name: str, kind: str, layout: str) -> Results:
    """act_kernel and act_grad_kernel of a gate and up, halves of one tensor's columns or apart."""
    dtype, (m, n) = DTYPES[kind], (44, 104)
    packed, dh = torch.randn(m, 2 * n, dtype=dtype), torch.randn(m, n, dtype=dtype)
    if layout == "halves":
        z, up = packed.chunk(2, 1)
        dz, dup = torch.empty_like(packed).chunk(2, 1)
    else:
        z, up = (half.clone() for half in packed.chunk(2, 1))
        dz, dup = torch.empty_like(z), torch.empty_like(z)
    h = linear.hidden(z, up, name, "split")
    grads = linear.HiddenGrad(z, up, torch.empty_like(h), dz, dup)
    sums = linear.hidden_grad(dh, grads, name, (True, True), "split")

    def eager(z: Tensor, up: Tensor, dh: Tensor) -> Sequence[Maybe]:
        z, up = leaf(z), leaf(up)
        h = ACTIVATIONS[name].eager(z) * up
        dz, dup = torch.autograd.grad(h, (z, up), dh)
        return h.detach(), h.detach(), dz, dup, summed(dz), summed(dup)

    return beside((h, grads.h, dz, dup, *sums), eager, z, up, dh)


def dropped(kind: str, first: int, m: int, n: int) -> Results:
    """dropout_kernel; numpy's generator makes the same bits."""
    x, seed = torch.randn(m, n, dtype=DTYPES[kind]), torch.tensor([1234567891011])
    ours, same = (dropout.dropout(x, 0.3, seed, first, kernel) for kernel in ("split", "aten"))
    return Results([ours], [same], [same.double()])


def coded(name: str, kind: str, n: int) -> Results:
    """coded_act_kernel in place, and coded_grad_kernel; codes must be equal."""
    dtype = DTYPES[kind]
    z, dh = 2 * torch.randn(5, n, dtype=dtype), torch.randn(5, n, dtype=dtype)
    place = z.clone()
    h, packed = codes.coded_act(place, name, "split", out=place)
    dz = codes.coded_grad(dh.clone(), packed, name, "split")
    h_aten, packed_aten = codes.coded_act(z, name, "aten")
    dz_aten = codes.coded_grad(dh, packed_aten, name, "aten")
    truth = ACTIVATIONS[name].eager(z.double()), dz_aten.double(), packed_aten.double()
    return Results((h, dz, packed.float()), (h_aten, dz_aten, packed_aten.float()), truth)


def nine_bits(kind: str, m: int, n: int, columns: str = "adjacent") -> Results:
    """pack_int8_kernel and unpack_int8_kernel; codes, scales and special values are equal."""
    x = torch.randn(m, 2 * n, dtype=DTYPES[kind]) * 10 ** torch.randint(-8, 4, (m, 1))
    x[0, ::7] = 0
    x[1, ::5] = float("inf")
    x[1, 1] = float("nan")
    x[2] = torch.finfo(x.dtype).max
    x = x[:, ::2] if columns == "apart" else x[:, :n].contiguous()
    packed, packed_aten = (int8.pack_int8(x, kernel) for kernel in ("triton", "aten"))
    y, y_aten = (
        int8.unpack_int8(packed_aten, x.new_empty(x.shape), kernel) for kernel in ("triton", "aten")
    )
    parts = [
        [part.float() for part in int8.codes_and_scales(p, m, n)] for p in (packed, packed_aten)
    ]
    truth = y_aten.double(), *(part.double() for part in parts[1])
    return Results((y, *parts[0]), (y_aten, *parts[1]), truth)


def normed(
    kind: str, dtype_name: str, m: int, n: int, residual: str = "", cast: str = "torch"
) -> Results:
    """The kernels of norms forward and backward; LayerNorm has a bias."""
    dtype, rule = DTYPES[dtype_name], norm.NormRule(kind, 1e-6, 0.0, cast)
    x, w = torch.randn(m, n, dtype=dtype), torch.randn(n, dtype=dtype)
    r = torch.randn(m, n, dtype=DTYPES[residual]) if residual else None
    b = torch.randn(n, dtype=dtype) if kind == "layer" else None
    out_dtype = torch.promote_types(dtype, r.dtype) if r is not None else dtype
    y, total = norm.norm(x, r, w, b, rule, out_dtype)
    source = x if total is None else total
    dy, dtotal = torch.randn_like(source), torch.randn_like(source)
    needs = True, True, b is not None
    grads = norm.norm_grad(dy, dtotal, source, w, rule, needs, sums_dtype=dtype)

    def eager(
        x: Tensor, r: Maybe, w: Tensor, b: Maybe, dy: Tensor, dtotal: Tensor
    ) -> Sequence[Maybe]:
        s = leaf(x if r is None else x + r)
        vectors = [leaf(v.to(s.dtype)) for v in (w, b) if v is not None]
        y = normalized(s, vectors, rule)
        ds, *sums = torch.autograd.grad(y, [s, *vectors], dy)
        absent = [None] * (2 - len(vectors))
        return y.detach(), None if r is None else s.detach(), ds + dtotal, *sums, *absent

    return beside((y, total, *grads), eager, x, r, w, b, dy, dtotal)


def packed_normed(kind: str, dtype_name: str, m: int, n: int, cast: str = "torch") -> Results:
    """The kernels of norms that read x in nine bits; bits are those of x unpacked before."""
    dtype, rule = DTYPES[dtype_name], norm.NormRule(kind, 1e-6, 0.0, cast)
    x, dy, dtotal, w = (torch.randn(*s, dtype=dtype) for s in (*[(m, n)] * 3, (n,)))
    # curved groups
    x[:, ::16] *= 100
    b = torch.randn(n, dtype=dtype) if kind == "layer" else None
    packed = int8.pack_int8(x, "aten")
    values = int8.unpack_int8(packed, torch.empty_like(x), "aten")

    def results(x: Tensor | int8.PackedRows) -> Sequence[Maybe]:
        grads = norm.norm_grad(dy, dtotal, x, w, rule, (True, True, b is not None), dtype)
        return norm.norm(x, None, w, b, rule, dtype)[0], *grads

    ours = results(int8.PackedRows(packed, m, n, dtype))
    for result, same in zip(ours, results(values), strict=True):
        assert result is same or torch.equal(result, same)  # type: ignore[arg-type]

    def eager(x: Tensor, w: Tensor, b: Maybe, dy: Tensor, dtotal: Tensor) -> Sequence[Maybe]:
        leaves = [leaf(t) for t in (x, w, b) if t is not None]
        y = normalized(leaves[0], leaves[1:], rule)
        dx, *sums = torch.autograd.grad(y, leaves, dy)
        return y.detach(), dx + dtotal, *sums, *[None] * (3 - len(leaves))

    return beside(ours, eager, values, w, b, dy, dtotal)


def norm_of_sums(kind: str, m: int, n: int) -> Results:
    """norm_grad_kernel of x in bfloat16 whose gradient, a sum of products, is in float32."""
    rule = norm.NormRule(kind, 1e-6)
    x, dtotal, w = (torch.randn(*s, dtype=torch.bfloat16) for s in ((m, n), (m, n), (n,)))
    dy = torch.randn(m, n)
    grads = norm.norm_grad(dy, dtotal, x, w, rule, (True, True, kind == "layer"))

    def eager(x: Tensor, w: Tensor, dy: Tensor, dtotal: Tensor) -> Sequence[Maybe]:
        # eager in float32, rounded once: no op of torch takes a gradient of another dtype
        wide = dy.dtype
        vectors = [leaf(w.to(wide)), *[leaf(torch.zeros_like(w, dtype=wide))] * (kind == "layer")]
        s = leaf(x.to(wide))
        ds, *sums = torch.autograd.grad(normalized(s, vectors, rule), [s, *vectors], dy)
        return (ds + dtotal).to(x.dtype), *sums, *[None] * (kind == "rms")

    return beside(grads, eager, x, w, dy, dtotal)


def gated_normed(kind: str, m: int, n: int, rule: gated_norm.GatedNormRule) -> Results:
    """gated_norm_kernel and gated_norm_grad_kernel; x and the gate are halves of one tensor.

    8208 columns have no weight.
    """
    dtype = DTYPES[kind]
    x, gate = torch.randn(m, 2 * n, dtype=dtype).chunk(2, 1)
    w, dy = torch.randn(n, dtype=dtype), torch.randn(m, n, dtype=dtype)
    w = None if n == 8208 else w
    y = gated_norm.gated_norm(x, gate, w, rule, dtype)
    grads = gated_norm.gated_norm_grad(dy, x, gate, w, rule, (True, True, w is not None), dtype)

    def eager(x: Tensor, gate: Tensor, w: Maybe, dy: Tensor) -> Sequence[Maybe]:
        leaves = [leaf(t) for t in (x, gate, w) if t is not None]
        y = eager_gated_norm(rule, *leaves, *[None] * (3 - len(leaves)))
        return y.detach(), *torch.autograd.grad(y, leaves, dy), *[None] * (3 - len(leaves))

    return beside((y, *grads), eager, x, gate, w, dy)


def gated_norm_cases() -> list[KernelCase]:
    """Return the cases of norms with a gate: a row in one chunk and in several, and groups."""
    mamba = gated_norm.GatedNormRule(1e-5, gates_first=True, cast="llama")
    grouped = gated_norm.GatedNormRule(1e-5, groups=2, gates_first=True)
    qwen = gated_norm.GatedNormRule(1e-6, cast="llama")
    kimi = gated_norm.GatedNormRule(1e-6, "sigmoid")
    plain = gated_norm.GatedNormRule(1e-6)
    eight = gated_norm.GatedNormRule(1e-5, groups=8, gates_first=True, cast="llama")
    rows = [
        *(("bf16", 3, 2100, mamba), ("bf16", 3, 8 * 600, eight), ("f32", 3, 2 * 2100, grouped)),
        *(("bf16", 70, 128, qwen), ("bf16", 70, 101, kimi), ("f16", 5, 1016, qwen)),
        *(("bf16", 2, 8192, plain), ("bf16", 3, 5120, mamba), ("bf16", 3, 8200, mamba)),
        # blocks of three sizes, and of one for loads of two bytes
        *(("bf16", 3, 7168, plain), ("f32", 3, 2 * 3584, grouped), ("bf16", 3, 4101, mamba)),
        ("bf16", 1, 8208, plain),
    ]
    return [
        KernelCase(
            f"gated_normed/{kind}-{n}x{rule.groups}-{rule.cast}",
            partial(gated_normed, kind, m, n, rule),
        )
        for kind, m, n, rule in rows
    ]


def normalized(s: Tensor, vectors: list[Tensor], rule: norm.NormRule) -> Tensor:
    """Return eager's norm of s; vectors: its weight, and its bias if any."""
    if rule.kind == "layer":
        return torch.nn.functional.layer_norm(s, s.shape[1:], *vectors, eps=rule.eps)
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rule.eps)
    xhat = xhat.to(s.dtype) if rule.cast == "llama" else xhat
    return (xhat * vectors[0]).to(s.dtype)


def head(kind: str, n: int, rule: cross_entropy.LogitRule) -> Results:
    """cross_entropy_kernel: statistics of rows of logits, their gradient, that in place."""
    u, target = 2 * torch.randn(5, n, dtype=DTYPES[kind]), torch.randint(0, n, (5, 1))
    target[1] = rule.ignore_index
    dy = torch.randn(5, cross_entropy.WIDTH)
    if not rule.entropy:
        dy[:, 3] = 0
    place = u.clone()
    statistics = cross_entropy.statistics(u, target, rule, "triton")
    dz = cross_entropy.statistics_grad(dy, u, target, statistics, rule, "triton")
    cross_entropy.statistics_grad(dy, place, target, statistics, rule, "triton", dz=place)

    def eager(u: Tensor, dy: Tensor) -> Sequence[Maybe]:
        y = cross_entropy.statistics(u, target, rule, "aten")
        dz = cross_entropy.statistics_grad(dy, u, target, y, rule, "aten")
        return y, dz, dz

    return beside((statistics, dz, place), eager, u, dy)


def element_cases() -> list[KernelCase]:
    """Return the cases of activations, gates, dropout, codes and nine bits."""
    return [
        *(named(activation, name, kind) for name in ACTIVATIONS for kind in ("bf16", "f32")),
        *(named(activation, name, "f16") for name in ("gelu", "silu")),
        named(gate, "silu", "bf16", "apart"),
        named(gate, "silu", "bf16", "halves"),
        named(gate, "silu", "f32", "halves"),
        named(gate, "gelu", "bf16", "apart"),
        named(gate, "gelu", "f32", "apart"),
        named(dropped, "bf16", 3, 21, 130),
        named(dropped, "f32", 1, 9, 301),
        named(dropped, "f16", 5, 5, 1001),
        named(coded, "gelu", "bf16", 4100),
        named(coded, "silu", "f32", 1001),
        named(coded, "gelu", "f16", 700),
        named(nine_bits, "bf16", 9, 560),
        named(nine_bits, "f32", 9, 301),
        named(nine_bits, "f16", 9, 131),
        named(nine_bits, "f32", 9, 304),
        named(nine_bits, "bf16", 4, 304, "apart"),
    ]


def norm_cases() -> list[KernelCase]:
    """Return the cases of norms: rows that fit in registers, and wide ones, in column chunks."""
    sizes = [
        *((33, 32), (70, 64), (40, 128), (5, 768), (5, 1024), (5, 2048)),
        *((3, 4096), (2, 8192), (2, 16384), (2, 16400)),
    ]
    return [
        *(
            named(normed, kind, "bf16", m, n, residual="bf16")
            for kind in ("rms", "layer")
            for m, n in sizes
        ),
        named(normed, "rms", "bf16", 3, 4096, residual="f32"),
        named(normed, "rms", "bf16", 2, 16400, residual="f32"),
        named(normed, "layer", "bf16", 2, 16400, residual="f32"),
        named(normed, "rms", "f16", 33, 1008, residual="f16"),
        named(normed, "layer", "f32", 5, 1040, residual="f32"),
        # the weight of Llama's norms comes after a rounding
        *(
            named(normed, "rms", "bf16", m, n, cast="llama")
            for m, n in ((40, 128), (3, 4096), (2, 8192), (2, 16400))
        ),
        *(
            named(normed, "rms", "bf16", m, n, residual="f32", cast="llama")
            for m, n in ((40, 128), (3, 4096), (2, 16400))
        ),
        named(normed, "rms", "bf16", 19, 301, cast="llama"),
        # rows of which a warp has one each, in three turns
        *(named(normed, kind, "bf16", 19, 768, cast="llama") for kind in ("rms", "layer")),
        named(normed, "layer", "f16", 19, 768, residual="f16"),
        # rows of parts, and of a width that fits none
        named(normed, "rms", "bf16", 3, 12288, cast="llama"),
        named(normed, "rms", "f32", 2, 12288),
        named(normed, "rms", "f16", 2, 8200),
        named(normed, "layer", "f32", 34, 4112),
        # halves of tiles of float32
        named(normed, "rms", "bf16", 20, 128, residual="f32"),
        named(normed, "layer", "bf16", 20, 128, residual="f32"),
        *(
            named(packed_normed, *row)
            for row in (
                ("rms", "bf16", 19, 768, "llama"),
                ("layer", "bf16", 19, 768),
                ("rms", "bf16", 70, 64, "llama"),
                ("rms", "bf16", 3, 4096, "llama"),
                ("rms", "f32", 3, 4080),
                ("rms", "f16", 9, 301),
                ("layer", "bf16", 3, 4096),
                ("layer", "bf16", 2, 8192),
                ("layer", "f32", 3, 4096),
                # no kernel reads rows that are this long packed
                ("rms", "bf16", 2, 16400),
            )
        ),
        named(norm_of_sums, "rms", 2, 16384),
        named(norm_of_sums, "rms", 2, 16400),
        named(norm_of_sums, "layer", 2, 16384),
        named(normed, "rms", "f32", 2, 16400),
        named(normed, "layer", "f32", 3, 4100),
        named(normed, "layer", "f16", 4, 2048),
        named(norm_of_sums, "layer", 40, 128),
        named(norm_of_sums, "layer", 2, 4096),
        named(norm_of_sums, "rms", 40, 128),
        named(norm_of_sums, "rms", 3, 4096),
        named(norm_of_sums, "rms", 2, 8192),
    ]


def head_cases() -> list[KernelCase]:
    """Return the cases of the statistics of logits."""
    rules = {
        "plain": cross_entropy.LogitRule(),
        "capped": cross_entropy.LogitRule(0.5, 30.0, 1.2, entropy=True),
    }
    # rows of whole vectors, and odd ones
    sizes = [("plain", 9008), ("capped", 4112), ("plain", 9001), ("capped", 4097)]
    sizes += [("plain", 17), ("capped", 17)]
    return [
        KernelCase(f"head/{kind}-{n}-{rule}", partial(head, kind, n, rules[rule]))
        for kind in ("bf16", "f16", "f32")
        for rule, n in sizes
    ]
