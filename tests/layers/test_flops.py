"""The FLOPs of forward and backward of each block, by formula, for masks of leaves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from linear_calls import BLOCKS, MLPS, PRIMES, Operands, function_of, masks_of
from support import DEVICE, as_tuple, flops, gemm_flops

T, D, F, *_ = PRIMES
# hidden layers that a level saves
SAVED = {
    "norm_linear": {"inputs": 0},
    "linear": {"inputs": 0, "preact": 0},
    "linear_act": {"inputs": 0, "preact": 1},
    "mlp": {"inputs": 0, "preact": 1},
    "gated_mlp": {"inputs": 0, "gate": 1, "preact": 2},
}
SAVED["packed"] = SAVED["gated_mlp"]


def expected(block: str, level: str, leaves: Sequence[torch.Tensor], roles: Sequence[str]) -> int:
    """Return the FLOPs of a step, from which leaves require grad."""
    weights = [leaf for leaf, role in zip(leaves, roles, strict=True) if "norm" not in role]
    first, last = (
        sum(w.numel() for w, r in zip(leaves, roles, strict=True) if r == f"{part}.weight")
        for part in ("first", "last")
    )
    wanted = {role for leaf, role in zip(leaves, roles, strict=True) if leaf.requires_grad}
    before = {role for role in wanted if "last" not in role}
    # forward, and the products for gradients of weights
    count = first + last + sum(w.numel() for w in weights[1:] if w.requires_grad and w.dim() == 2)
    # what is recomputed: all but the last GEMM
    total = {"linear": 0, "norm_linear": 0, "linear_act": 1, "mlp": 1}.get(block, 2)
    if wanted - {"last.bias"}:
        count += (total - SAVED[block][level]) * D * F
    # dh, and the gradient of what the first linears read
    count += last * bool(before)
    return 2 * T * (count + first * bool({"x", "norm.weight", "norm.bias"} & wanted))


@pytest.mark.parametrize(("block", "norm"), [b for b in BLOCKS if "out" not in (b[1] or "")])
def test_flops(block, norm, on_aten):
    """As our ops' formulas have it, and as the CPU runs it."""
    operands, residual = Operands(PRIMES), norm == "rms" and block in MLPS
    x, spec = operands.x(), operands.norm(norm)
    function = function_of(block, spec, operands.linears(block, residual=residual))
    options = {"residual": True} if residual else {}
    for level in SAVED[block]:
        for index, mask in enumerate(masks_of(operands.roles)[1:]):
            for leaf, flag in zip(operands.leaves, mask, strict=True):
                leaf.requires_grad_(flag)

            def step(level=level):
                ys = as_tuple(function(x, save=level, **options))
                sum(y.sum() for y in ys if y.requires_grad).backward()

            count = expected(block, level, operands.leaves, operands.roles)
            assert flops(step) == count, (level, mask)
            # the profiler is slow
            if DEVICE.type == "cpu" and (index % 7 == 0 or sum(mask) == 1):
                assert gemm_flops(step) == count, (level, mask)
