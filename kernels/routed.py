"""Rows routed to experts: gathered by expert, multiplied, gated, and summed per token.

A value with K rows of N features for each of T tokens is a matrix [T, K N], so that it is cut into
chunks of tokens as any other value is. Its memory is the rows sorted by expert, [T K, N]; the rows
of no expert come last, and are never multiplied: products have zeros there, or, of a GEMM kernel,
arbitrary numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import ACTIVATIONS, aten
from .grouped_gemm import grouped_gemm, grouped_grad
from .products import add_product
from .runtime import row_blocks


class ClampedSwiGLU(NamedTuple):
    """h = (up + offset) * gate * sigmoid(alpha * gate), gate clamped to at most `limit`, and up to
    at most `limit` in magnitude, as GptOss's experts compute it.

    is_interleaved: whether gate and up are the even and odd columns, not the halves.
    """

    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0
    is_interleaved: bool = True


# the name of an activation, of gate times up, or a record
Gating = str | ClampedSwiGLU


class Route(NamedTuple):
    """How the slots of `index` [T, K] are sorted by expert.

    order [T K]: the slot of every row; places [T, K]: the row of every slot; ends [E]: of experts'
    rows; pieces: the experts that have rows, with these, or None; kernel: "torch", "triton" or
    None.
    """

    order: Tensor
    places: Tensor
    ends: Tensor
    pieces: tuple[tuple[int, slice], ...] | None
    kernel: str | None = None

    @property
    def count(self) -> int:
        """How many rows experts have."""
        return self.pieces[-1][1].stop if self.pieces else 0


def has_kernel(device: torch.device, dtype: torch.dtype, *features: int) -> bool:
    """Whether F.grouped_mm is a kernel for these, not a loop that waits for the device."""
    if device.type != "cuda" or torch.version.hip or dtype != torch.bfloat16:
        return False
    # rows begin at multiples of 16 bytes
    is_aligned = all(n % 8 == 0 for n in features)
    # below sm_90 and on sm_120 torch multiplies in a loop, which reads the ends of rows on the host
    return is_aligned and torch.cuda.get_device_capability(device)[0] in (9, 10)


def kernel_for(path: str, device: torch.device, dtype: torch.dtype, *features: int) -> str | None:
    """Return the kernel of grouped products: "torch", ours ("triton"), or None for a loop."""
    if has_kernel(device, dtype, *features):
        return "torch"
    return None if path == "aten" or 0 in features else "triton"


def route(index: Tensor, num_experts: int, kernel: str | None) -> Route:
    """Sort slots by expert; for a kernel, without waiting for the device."""
    found, order = index.flatten().sort(stable=True)
    bounds = torch.arange(-1, num_experts, device=index.device, dtype=found.dtype)
    ends = torch.searchsorted(found, bounds, right=True, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    # a negative index is refused where reading it costs nothing
    waits = kernel is None or (kernel == "triton" and index.device.type == "cpu")
    pieces = pieces_of(ends.tolist()) if waits else None
    places = places.view(index.shape)
    return Route(order, places, ends[1:], None if kernel else pieces, kernel)


def pieces_of(ends: list[int]) -> tuple[tuple[int, slice], ...]:
    """Return the experts that have rows, with these; ends: from where the first begins."""
    if ends[0]:
        raise ValueError(f"experts: index must be at least 0, got {ends[0]} negative elements")
    bounds = itertools.pairwise(ends)
    return tuple([(e, slice(a, b)) for e, (a, b) in enumerate(bounds) if b > a])


def as_rows(x: Tensor, route: Route) -> Tensor:
    """Return a value as its rows, [T K, N]."""
    tokens, top_k = route.places.shape
    return x.view(tokens * top_k, x.shape[1] // top_k)


def per_token(rows: Tensor, route: Route) -> Tensor:
    """Return rows as a value, [T, K N]."""
    tokens, top_k = route.places.shape
    return rows.view(tokens, top_k * rows.shape[1])


def gather(x: Tensor, route: Route) -> Tensor:
    """Return the row of x [T, N] for every slot, [T, K N]."""
    return per_token(x.index_select(0, route.order // route.places.shape[1]), route)


def combine(x: Tensor, route: Route) -> Tensor:
    """Return the sum of each token's rows [T, K N], summed in float32, [T, N]."""
    # without a buffer in the order of slots, and without atomics
    return F.embedding_bag(route.places, cleared(as_rows(x, route), route), mode="sum")


def cleared(rows: Tensor, route: Route) -> Tensor:
    """Write zeros over the rows of no expert where a kernel multiplied."""
    if route.pieces is not None:
        return rows
    foreign = torch.arange(len(rows), device=rows.device) >= route.ends[-1]
    return rows.masked_fill_(foreign[:, None], 0)


def of_rows(scores: Tensor, route: Route) -> Tensor:
    """Return the score of every row, as a column."""
    return scores.reshape(-1)[route.order, None]


def of_slots(rows: Tensor, route: Route) -> Tensor:
    """Return a column of numbers as [T, K], with zeros for the rows of no expert."""
    return cleared(rows, route)[route.places, 0]


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    route: Route,
    scores: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Return the rows of x times the weight [E, K, N] of their expert, plus the bias [E, N].

    The bias is multiplied by `scores`, and all is added to `total`, where these are given.
    """
    rows = as_rows(x, route)
    if route.kernel == "torch":
        y = F.grouped_mm(rows, weight, offs=route.ends)
        y = y if total is None else as_rows(total, route).add_(y)
    else:
        y = rows.new_empty(len(rows), weight.shape[2]) if total is None else as_rows(total, route)
    if route.kernel == "triton":
        if total is None:
            # the rows of no expert are not written: saved, they would differ from run to run
            y.zero_()
        vector = None if scores is None else of_rows(scores, route).contiguous()
        own = None if bias is None else bias.contiguous()
        grouped_gemm(rows, weight, route.ends, y, own, vector, total is not None)
        return per_token(y, route)
    if route.kernel is None:
        for expert, part in route.pieces or ():
            # with beta 0 the first operand is not read
            beta = int(total is not None)
            torch.addmm(y[part], rows[part], weight[expert], beta=beta, out=y[part])
        if total is None:
            y[route.count :] = 0
    if bias is not None:
        s = None if scores is None else of_rows(scores, route)
        for part, own in _of_experts(bias, route, y):
            y[part] += own if s is None else s[part] * own
    return per_token(y, route)


def _of_experts(vectors: Tensor, route: Route, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with the vectors [E, N] of their experts, zeros of no expert's."""
    if route.pieces is not None:
        yield from ((part, vectors[expert]) for expert, part in route.pieces)
        return
    numbers = torch.arange(len(rows), device=rows.device, dtype=route.ends.dtype)
    owners, padded = (
        torch.searchsorted(route.ends, numbers, right=True),
        F.pad(vectors, (0, 0, 0, 1)),
    )
    yield from ((part, padded[owners[part]]) for part in _blocks(rows))


def weight_grad(a: Tensor, b: Tensor, route: Route, total: Tensor | None = None) -> Tensor:
    """Return a' b of each expert's rows, [E, M, N], added to `total` if given."""
    rows, others = as_rows(a, route), as_rows(b, route)
    if route.kernel == "torch":
        found = F.grouped_mm(rows.t(), others, offs=route.ends)
        starts = torch.cat((route.ends.new_zeros(1), route.ends[:-1]))
        # of no rows a kernel need not write any
        found.masked_fill_((starts == route.ends)[:, None, None], 0)
        return found if total is None else total.add_(found)
    adds = total is not None
    if total is None:
        total = rows.new_zeros(len(route.ends), rows.shape[1], others.shape[1])
    if route.kernel == "triton":
        grouped_grad(rows, others, route.ends, total, adds)
        return total
    for expert, part in route.pieces or ():
        add_product(total[expert], rows[part].t(), others[part])
    return total


def weight_sum(total: Tensor | None, a: Tensor, b: Tensor, route: Route) -> Tensor:
    """Add a' b of a chunk of tokens to `total`, in at least float32."""
    if total is None:
        wide, top_k = torch.promote_types(a.dtype, torch.float32), route.places.shape[1]
        shape = len(route.ends), a.shape[1] // top_k, b.shape[1] // top_k
        total = a.new_zeros(shape, dtype=wide)
    return weight_grad(a, b, route, total)


def bias_grad(dy: Tensor, route: Route, scores: Tensor | None = None) -> Tensor:
    """Return the sums over each expert's rows of dy, times their scores if given, [E, N]."""
    rows, s = as_rows(dy, route), None if scores is None else of_rows(scores, route)
    wide = torch.promote_types(dy.dtype, torch.float32)
    if route.pieces is None:
        # a kernel's product, with rows of 16 bytes; it knows the experts' rows without waiting
        s = rows.new_ones(len(rows), 1) if s is None else s.to(rows.dtype)
        found = rows.new_zeros(len(route.ends), 8, rows.shape[1], dtype=wide)
        columns = per_token(s.repeat(1, 8), route)
        return weight_grad(columns, dy, route, found)[:, 0].contiguous()
    found = rows.new_zeros(len(route.ends), rows.shape[1], dtype=wide)
    for expert, part in route.pieces:
        found[expert] = (rows[part] if s is None else rows[part] * s[part]).sum(0, dtype=wide)
    return found


def bias_scores_grad(dy: Tensor, bias: Tensor, route: Route) -> Tensor:
    """Return the gradient of the scores [T, K] that multiply biases."""
    rows = as_rows(dy, route)
    found = rows.new_zeros(len(rows), 1, dtype=torch.promote_types(dy.dtype, torch.float32))
    for part, own in _of_experts(bias, route, rows):
        torch.sum(rows[part] * own.to(found.dtype), 1, True, out=found[part])
    return of_slots(found, route)


def halves(z: Tensor, u: Tensor | None, gating: Gating, route: Route) -> Sequence[Tensor]:
    """Return the rows of gate and up: z has both, unless u is up."""
    rows = as_rows(z, route)
    if u is not None:
        return rows, as_rows(u, route)
    is_interleaved = isinstance(gating, ClampedSwiGLU) and gating.is_interleaved
    return (rows[:, ::2], rows[:, 1::2]) if is_interleaved else rows.chunk(2, 1)


def gated(z: Tensor, u: Tensor | None, scores: Tensor, route: Route, gating: Gating) -> Tensor:
    """Return act(gate) * up times the score of each row."""
    gate, up = halves(z, u, gating, route)
    s, h = of_rows(scores, route), gate.new_empty(gate.shape)
    for rows in _blocks(gate):
        value, factor = _value(*_wide(gate[rows], up[rows]), gating)
        torch.mul(value.mul_(factor), s[rows], out=h[rows])
    return per_token(h, route)


def gated_grad(
    dh: Tensor,
    z: Tensor,
    u: Tensor | None,
    scores: Tensor,
    route: Route,
    gating: Gating,
    needs: tuple[bool, bool],
    h: Tensor | None = None,
    dz: Tensor | None = None,
    du: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return h, dz, du and the gradient of scores; needs: whether the first and the last.

    dh is the gradient of h. h may be written over dh, dz over z, du over u.
    """
    gate, up = halves(z, u, gating, route)
    dz = torch.empty_like(z) if dz is None else dz
    du = torch.empty_like(u) if du is None and u is not None else du
    dgate, dup = halves(dz, du, gating, route)
    h = torch.empty_like(dh) if h is None and needs[0] else h
    dhs, s = as_rows(dh, route), of_rows(scores, route)
    ds = s.new_empty(s.shape, dtype=torch.promote_types(z.dtype, torch.float32))
    for rows in _blocks(gate):
        grad, *pair = _wide(dhs[rows], gate[rows], up[rows])
        value, factor = _value(*pair, gating)
        product = value * factor
        if needs[1]:
            torch.sum(grad * product, 1, True, out=ds[rows])
        # scores may be wider
        grad = (grad * s[rows]).to(grad.dtype)
        if h is not None:
            torch.mul(product, s[rows], out=as_rows(h, route)[rows])
        _write_grads(grad, value, factor, *pair, gating, (dgate[rows], dup[rows]))
    return h, dz, du, of_slots(ds, route) if needs[1] else None


def _blocks(x: Tensor) -> list[slice]:
    """Cut rows into blocks: temporaries are a few times as wide as x."""
    if x.device.type == "cpu":
        return row_blocks(x)
    step = max(1024, -(-len(x) // 8))
    return [slice(start, start + step) for start in range(0, len(x), step)]


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Return a block's tensors in at least float32: what is between them is not rounded."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _value(gate: Tensor, up: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """Return act(gate), in a buffer of its own, and the factor that multiplies it."""
    if isinstance(gating, str):
        return ACTIVATIONS[gating].write(gate, out=gate.new_empty(gate.shape)), up
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return torch.sigmoid(gate * gating.alpha).mul_(gate), up + gating.offset


def _write_grads(
    dh: Tensor,
    value: Tensor,
    factor: Tensor,
    gate: Tensor,
    up: Tensor,
    gating: Gating,
    to: tuple[Tensor, Tensor],
) -> None:
    """Write the gradients of gate and up, each perhaps over itself."""
    dvalue, dfactor = dh * factor, value.mul_(dh)
    if isinstance(gating, str):
        to[0].copy_(ACTIVATIONS[gating].write_grad(dvalue, gate, grad_input=dvalue))
        to[1].copy_(dfactor)
        return
    # gate sigmoid(alpha gate) is silu(alpha gate) / alpha
    dgate = aten.silu_backward(dvalue, gate.clamp(max=gating.limit) * gating.alpha)
    torch.mul(dgate, gate <= gating.limit, out=to[0])
    torch.mul(dfactor, up.abs() <= gating.limit, out=to[1])
