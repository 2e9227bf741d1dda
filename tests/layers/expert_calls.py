"""Calls of experts, beside a loop over them."""

import torch
import torch.nn.functional as F
from support import DEVICE, randn
from torch import nn

from fusedckpt import LoRA
from fusedckpt.functional import experts

T, D, HIDDEN, E, K, RANK = 24, 10, 14, 6, 3, 4
LEVELS = ("inputs", "gate", "preact")


def loop(x, index, scores, gate_up, down, gate_up_bias=None, down_bias=None, **options):
    """What transformers' eager experts compute."""
    gating, turns = options.get("activation", "silu"), options.get("is_transposed", False)
    shape, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    index, scores = (t.reshape(-1, t.shape[-1]) for t in (index, scores))
    y = torch.zeros(len(x), down.shape[2 if turns else 1], dtype=x.dtype, device=x.device)
    for e in range(down.shape[0]):
        tokens, slot = torch.where(index == e)
        first, last = (w[e].t() if turns else w[e] for w in (gate_up, down))
        z = F.linear(x[tokens], first, None if gate_up_bias is None else gate_up_bias[e])
        if isinstance(gating, str):
            gate, up = z.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            gate, up = (z[..., ::2], z[..., 1::2]) if gating.is_interleaved else z.chunk(2, -1)
            gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
            h = (up + gating.offset) * (gate * torch.sigmoid(gate * gating.alpha))
        out = F.linear(h, last, None if down_bias is None else down_bias[e])
        y = y.index_add(0, tokens, (out * scores[tokens, slot, None]).to(y.dtype))
    return y.view(*shape, y.shape[-1])


def routing(*rows, num=E, top_k=K, foreign=0):
    """Draw an index; the second expert gets no token, and the first tokens no expert."""
    drawn = torch.rand(*rows, num + 1).topk(top_k + 1).indices
    index = torch.where(drawn == 1, num, drawn)[..., :top_k]
    index.view(-1, top_k)[:foreign] = num + 2
    return index.to(DEVICE)


def leaves(
    rows=(T,), d=D, f=HIDDEN, num=E, top_k=K, bias=False, turns=False, dtype=torch.float32, rank=0
):
    """Draw x, scores, two weights, each with A and B where there is a rank, and biases."""
    found = [randn(*rows, d, dtype=dtype), torch.rand(*rows, top_k, device=DEVICE)]
    found[1] = found[1].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    for n, k in ((2 * f, d), (d, f)):
        for sizes in ((n, k), *([(rank, k), (n, rank)] if rank else [])):
            w = randn(num, *(sizes[::-1] if turns else sizes), dtype=dtype).detach() / k**0.5
            found.append(w.requires_grad_())
    return found + ([randn(num, 2 * f, dtype=dtype), randn(num, d, dtype=dtype)] if bias else [])


def both(index, **options):
    """Return ours and the loop, which adds adapters to the weights, as functions of leaves."""

    def called(fn, **more):
        def call(x, scores, *rest):
            count = 3 if len(rest) > 4 else 1
            gate_up, down = (adapted(fn, *rest[i : i + count], **more) for i in (0, count))
            biases = zip(("gate_up_bias", "down_bias"), rest[2 * count :], strict=False)
            return fn(x, index, scores, gate_up, down, **dict(biases), **more)

        return call

    def adapted(fn, weight, a=None, b=None, is_transposed=False, **_):
        if a is None:
            return weight
        low_rank = a @ b if is_transposed else b @ a
        return (
            LoRA(weight, a, b, 1.5) if fn is experts else weight + 1.5 * low_rank.to(weight.dtype)
        )

    eager = {k: v for k, v in options.items() if k in ("activation", "is_transposed")}
    return called(experts, **options), called(loop, **eager)


def adapters(dtype=torch.float32):
    """Draw gate_up and down as records of frozen weights."""
    found = [nn.Parameter(t.detach()) for t in leaves(dtype=dtype, rank=RANK)[2:]]
    return [LoRA(w.requires_grad_(False), a, b, 1.5) for w, a, b in (found[:3], found[3:])]
