"""Cases of experts: rows sorted, gated and summed, and gradients of experts without rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fusedckpt.kernels import gating, grouped_gemm, routed
from tests.ptx.judging import DTYPES, KernelCase, Maybe, Results, beside, named


def mixture(
    kind: str, tokens: int, n: int, layout: str, rule: gating.Gating, num_experts: int = 5
) -> Results:
    """The kernels that sort rows, gate and sum them; some slots are no expert's."""
    dtype, top_k = DTYPES[kind], 3
    index = torch.randint(0, num_experts + 2, (tokens, top_k))
    aten = routed.route(index, num_experts, None)
    order, tokens_of_rows, places, ends, _ = routed.sorted_rows(index, num_experts)
    ours = routed.Route(order, tokens_of_rows, places, ends, None, "triton", runs_triton=True)
    z, up = torch.randn(tokens, 2 * top_k * n, dtype=dtype), None
    if layout == "apart":
        z, up = (half.contiguous() for half in z.chunk(2, 1))
    scores, dh = torch.rand(tokens, top_k), torch.randn(tokens, top_k * n, dtype=dtype)
    for t in (z, dh) if up is None else (z, up, dh):
        # as products have them
        routed.as_rows(t, aten)[aten.count :] = 0

    def computed(route: routed.Route, *operands: Maybe) -> Sequence[Maybe]:
        z, up, dh = operands
        assert z is not None
        assert dh is not None
        h = gating.gated(z, up, scores, route, rule)
        grads = gating.gated_grad(dh, z, up, scores, route, rule, (up is None, True))
        numbers = route.order[: aten.count], route.tokens[: aten.count], route.ends
        return h, *grads, routed.combine(h, route), torch.cat(numbers).float()

    return beside(computed(ours, z, up, dh), partial(computed, aten), z, up, dh)


def unused(kind: str) -> Results:
    """clear_unused_kernel: zeros for experts without rows alone."""
    ends, dw = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.randn(4, 70, 50)
    expected = dw.to(DTYPES[kind])
    dw = expected.clone()
    expected[[0, 2]] = 0
    grouped_gemm.clear_unused(dw, ends)
    return Results([dw], [expected], [expected.double()])


def expert_cases() -> list[KernelCase]:
    """Return the cases of routed rows: numbers of experts as models have them, odd widths."""
    clamped, halves = gating.ClampedSwiGLU(limit=1.0), gating.ClampedSwiGLU(1.0, 0.5, 0.0, False)
    return [
        named(mixture, "bf16", 70, 1040, "packed", "silu", 128),
        named(mixture, "bf16", 9, 300, "apart", "silu"),
        named(mixture, "f32", 24, 1040, "packed", "silu"),
        named(mixture, "f32", 9, 45, "apart", "silu", 32),
        named(mixture, "bf16", 24, 300, "packed", gating.ClampedSwiGLU()),
        named(mixture, "bf16", 9, 300, "apart", gating.ClampedSwiGLU()),
        named(mixture, "f32", 9, 45, "packed", gating.ClampedSwiGLU()),
        named(mixture, "f32", 9, 300, "apart", gating.ClampedSwiGLU()),
        named(mixture, "f16", 9, 1040, "packed", "gelu", 512),
        named(mixture, "f16", 9, 45, "apart", "gelu"),
        # many elements are beyond these limits
        named(mixture, "f32", 9, 45, "packed", clamped),
        named(mixture, "f16", 9, 45, "packed", halves),
        *(named(unused, kind) for kind in ("bf16", "f16", "f32")),
    ]
