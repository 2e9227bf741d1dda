"""Attention in torch's context parallelism, a ring over ranks, as a region of a checkpoint.

torch dispatches the ring for CUDA's kernels alone, so F.scaled_dot_product_attention is replaced
here, as `context_parallel` replaces it, by the same ring around a CPU's kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.utils.checkpoint import checkpoint as stock
from zoo import Attention, Residual

import fusedckpt

L, D, H = 12, 16, 2


class Ring(torch.autograd.Function):
    """Attention to the keys of all ranks, causal, of which each has a part of the tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        # each rank has neighbors, as the test cuts tokens
        ring._cp_options.enable_load_balance = False
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        tensors = {"query": q, "key": k, "value": v}
        attend = ring._templated_ring_attention
        out, lse = attend(dist.group.WORLD, 2, op, **tensors, is_causal=True)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        names = ("query", "key", "value", "out", "logsumexp")
        tensors = dict(zip(names, ctx.saved_tensors, strict=True))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        tensors |= {"grad_out": dout.contiguous(), "dropout_p": 0.0, "is_causal": True}
        return ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, op, grad_out_name="grad_out", **tensors
        )[:3]


def counting(calls: list[str], name: str) -> Any:
    run = getattr(collectives, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return run(*args, **kwargs)

    return counted


def main(rank: int) -> None:
    """Compare with one process; count the ring's collectives of forward and backward."""
    torch.manual_seed(0)
    block = Residual(nn.RMSNorm(D), Attention(D, H, is_causal=True))
    x = torch.randn(2, L, D, requires_grad=True)
    block(x).square().sum().backward()
    assert x.grad is not None
    truth = x.grad.chunk(2, 1)[rank]
    part = x.detach().chunk(2, 1)[rank].clone().requires_grad_()
    calls: list[str] = []
    # the name of the first depends on the release
    for name in ("all_gather_single", "all_gather_tensor", "permute_tensor"):
        if hasattr(collectives, name):
            setattr(collectives, name, counting(calls, name))
    F.scaled_dot_product_attention = lambda q, k, v, **options: Ring.apply(q, k, v)
    ways = {
        "plain": Residual.__call__,
        "stock": partial(stock, use_reentrant=False),
        "again": fusedckpt.checkpoint,
        "saved": partial(fusedckpt.checkpoint, save_regions=["attention"]),
    }
    counts = {}
    for name, run in ways.items():
        calls.clear()
        part.grad = None
        y = run(block, part)
        forward = len(calls)
        y.square().sum().backward()
        counts[name] = forward, len(calls) - forward
        torch.testing.assert_close(part.grad, truth)
    # keys and values are gathered for a forward, and for a backward; gradients go around
    assert counts == {"plain": (1, 3), "stock": (1, 4), "again": (1, 4), "saved": (1, 3)}, counts
