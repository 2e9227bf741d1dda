"""Blocks on shards of DTensors: tensor and sequence parallelism that saves only a rank's own rows.

A block gathers its input, runs its autograd Function on this rank's shards of the weights, and
reduces its output. DTensor moves the data and places the gradients. With sequence parallelism the
block saves only this rank's rows; backward gathers all rows in the collective that gathers the
output's gradient: the same number of collectives as unfused, with twice the bytes in that one.

Of a head with its classes sharded each rank makes its own logits alone; the statistics of all
classes follow by three reductions of a number for each token, or four with the entropy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.private import at_end_of_backward, raw_saved
from fusedckpt.blocks.norm_sharing import Recipe, Source, made_from
from fusedckpt.kernels.cross_entropy import LogitRule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Style(NamedTuple):
    """How a linear, or a block of them, is laid out over ranks of a mesh that shard its weights.

    split: of a linear's weight, "columns" by output features or "rows" by input features; input:
    the placement of a plain input; output: of the result; is_local: whether that is a plain tensor.
    """

    split: str
    mesh: DeviceMesh
    input: Any
    output: Any
    is_local: bool


def library() -> Any:
    """Return torch.distributed.tensor if it was imported, which takes a second, else None."""
    return sys.modules.get("torch.distributed.tensor")


def is_sharded(x: Any) -> bool:
    """Whether a value is a DTensor."""
    found = library()
    return found is not None and isinstance(x, found.DTensor)


def placed(local: Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    """Return the DTensor of which `local` is this rank's part."""
    return library().DTensor.from_local(local, mesh, [placement], run_check=False)


def parts_of(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors, and this rank's parts of those that are DTensors, which have the storage."""
    with torch.no_grad():
        return [*tensors, *(t.to_local() for t in tensors if is_sharded(t))]  # type: ignore[union-attr]  # a DTensor


def takes(x: Tensor, layout: Style) -> bool:
    """Whether `spread` supports an input of this placement, and the block's output."""
    given = x.placements if is_sharded(x) else (layout.input,)  # type: ignore[attr-defined]  # a DTensor
    if is_sharded(x) and x.device_mesh != layout.mesh:  # type: ignore[attr-defined]
        return False
    return all(_is_of_rows(placement, x.dim(), 1) for placement in (*given, layout.output))


def _is_of_rows(placement: Any, dims: int, features: int) -> bool:
    """Whether a placement keeps rows whole; the last dimensions are features."""
    if placement.is_replicate():
        return True
    return type(placement) is library().Shard and placement.dim % dims < dims - features


def shards_of(linears: Sequence[tuple[Any, Any]], layout: Style) -> list[Any]:
    """Return this rank's parts of a block's weights and biases.

    The first linears are split by output features, the last by input features. Tensors with other
    placements, or uneven shards, are returned unchanged.
    """
    *first, (weight, bias) = linears
    shards = [(_shard_of(w, layout, 0), _shard_of(b, layout, 0)) for w, b in first]
    return [*shards, (_shard_of(weight, layout, 1), _shard_of(bias, layout, None))]


def _shard_of(weight: Any, layout: Style, split: int | None) -> Any:
    if not is_sharded(weight) or weight.device_mesh != layout.mesh:
        return weight
    found = library()
    placement = found.Replicate() if split is None else found.Shard(split)
    is_even = split is None or weight.shape[split] % layout.mesh.size() == 0
    if weight.placements != (placement,) or not is_even:
        return weight
    # a bias that is added by every rank
    local = weight.to_local()
    return local if split is not None else _Portion.apply(local, layout.mesh.size())


class _Portion(torch.autograd.Function):
    """A rank's share of a bias that all ranks add; its gradient is replicated."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, ranks: int) -> Tensor:
        return bias / ranks

    @staticmethod
    def backward(ctx: Any, db: Tensor) -> Any:  # type: ignore[override]
        return db, None


def spread(block: Callable[[Tensor], Tensor], x: Any, layout: Style) -> Any:
    """Return the sum over ranks of a block's results for all rows, placed as the layout says.

    One collective gathers x if its rows are sharded, and one reduces the output; backward has their
    duals. The block saves this rank's rows of x if x or the output is sharded, else x.
    """
    found, mesh = library(), layout.mesh
    made, source = made_from(x), getattr(x.grad_fn, "source", None)
    dtype = dispatch.autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        # before it is gathered
        x = x.to(dtype)
    given = x
    if not is_sharded(x):
        x = placed(x, mesh, layout.input)
    whole = x
    if not x.placements[0].is_replicate():
        whole = x.redistribute(placements=[found.Replicate()])
    whole = whole.to_local(grad_placements=[found.Partial()])
    split = next((p for p in (*x.placements, layout.output) if not p.is_replicate()), None)
    if split is None or not whole.requires_grad:
        whole = whole if made is None or source is None else _kept_as(whole, source.again, *made)
        return _laid_out(block(whole), layout)
    # as it was given, so that autograd sees whether it is written to
    own = given
    if x.placements != (split,):
        own = x.detach().redistribute(placements=[split]).to_local()
    rows = _Rows(mesh, split.dim % x.dim(), whole.shape)
    y = block(_kept_as(whole, rows.again, own, None, bias=None))
    # whether the block saves rows and gathers its input again
    saved = raw_saved(y.grad_fn)
    gathers = bool(saved) and isinstance(saved[0].data, Recipe)
    if gathers and layout.output == split and (y.shape, y.dtype) == (rows.shape, own.dtype):
        local = _Reduced.apply(y, own, rows)
        return local if layout.is_local else _sharded(local, mesh, [layout.output], rows.shape)
    return _laid_out(y, layout)


class _Rows:
    """How rows are sharded over ranks; ahead: all rows, gathered and not yet read."""

    def __init__(self, mesh: DeviceMesh, dim: int, shape: Sequence[int]):
        self.mesh, self.dim, self.shape = mesh, dim, shape
        self.ahead: Tensor | None = None

    def gathered(self, *parts: Any) -> tuple[Tensor, ...]:
        """Return all rows of tensors from this rank's, by one collective."""
        found = library()
        local = [part.to_local() if is_sharded(part) else part for part in parts]
        together: Any = torch.stack(local) if len(local) > 1 else local[0].unsqueeze(0)
        own = [found.Shard(self.dim + 1)]
        together = _sharded(together, self.mesh, own, [len(parts), *list(self.shape)])
        together = together.redistribute(placements=[found.Replicate()])
        return together.to_local(grad_placements=[found.Partial()]).unbind()

    def again(self, own: Tensor, *_: None) -> Tensor:
        """Return all rows of a saved tensor."""
        found, self.ahead = self.ahead, None
        return self.gathered(own)[0] if found is None else found

    def forget(self) -> None:
        """Free rows that were not read."""
        self.ahead = None


def _sharded(local: Tensor, mesh: DeviceMesh, placements: Any, shape: Sequence[int]) -> Any:
    stride = torch.empty(shape, device="meta").stride()
    options: Any = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return library().DTensor.from_local(local, mesh, placements, **options)


def _kept_as(
    whole: Tensor, again: Callable[..., Tensor], own: Any, weight: Any, bias: Any
) -> Tensor:
    """Return a result, which its reader recomputes from saved tensors."""
    whole = _Whole.apply(whole, own)
    node: Any = whole.grad_fn
    if node is not None:
        node.source = Source(again, weight, bias, versions_of(whole, weight, bias))
    return whole


class _Whole(torch.autograd.Function):
    """Gathers all rows; notes the rows from which a reading block can gather them again."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, own: Tensor) -> Tensor:
        ctx.save_for_backward(own)
        ctx.set_materialize_grads(False)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> Any:  # type: ignore[override]
        return dx, None


class _Reduced(torch.autograd.Function):
    """This rank's rows of the sum over ranks; backward gathers the block's input, too."""

    @staticmethod
    def forward(ctx: Any, y: Any, own: Tensor, rows: _Rows) -> Tensor:
        ctx.save_for_backward(own)
        ctx.set_materialize_grads(False)
        ctx.rows = rows
        found = library()
        y = placed(y, rows.mesh, found.Partial())
        return y.redistribute(placements=[found.Shard(rows.dim)]).to_local()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:  # type: ignore[override]
        if dy is None:
            return None, None, None
        (own,), rows = ctx.saved_tensors, ctx.rows
        dy, rows.ahead = rows.gathered(dy, own.detach())
        at_end_of_backward(rows.forget)
        return dy, None, None


def _laid_out(y: Tensor, layout: Style) -> Any:
    """Reduce partial results over ranks."""
    total = placed(y, layout.mesh, library().Partial())
    total = total.redistribute(placements=[layout.output])
    return total.to_local() if layout.is_local else total


def on_rows(norm: Callable[..., Any], features: int, x: Any, *parameters: Any) -> Any:
    """Run a norm over the last dimensions on this rank's rows of a DTensor.

    None if x is not a DTensor, or has other placements; parameters must be replicated.
    """
    if not is_sharded(x) or torch.compiler.is_compiling():
        return None
    if not all(_is_of_rows(placement, x.dim(), features) for placement in x.placements):
        return None
    found = library()
    wholes = (found.Replicate(),) * x.device_mesh.ndim
    # of its own rows, a rank has a part of a parameter's gradient
    grads = [p if p.is_replicate() else found.Partial() for p in x.placements]
    for p in parameters:
        if p is not None and not (
            is_sharded(p) and p.device_mesh == x.device_mesh and p.placements == wholes
        ):
            return None
    own = [None if p is None else p.to_local(grad_placements=grads) for p in parameters]
    y = norm(x.to_local(), *own)
    return y if not isinstance(y, Tensor) else _sharded(y, x.device_mesh, x.placements, x.shape)


def shares_classes(name: str, x: Any, weight: Any, target: Any, bias: Any) -> bool:
    """Whether the weight and the bias are sharded by classes; refuse tensors that do not fit."""
    if not is_sharded(weight):
        return False
    split = (library().Shard(0),)
    if weight.placements != split:
        return False
    mesh = weight.device_mesh
    if not is_sharded(x) or x.device_mesh != mesh:
        raise ValueError(
            f"{name}: x must be a DTensor on the mesh of weight, which is sharded by its classes, "
            f"got {type(x).__name__}"
        )
    if type(target) is not Tensor or target.shape != x.shape[:-1]:
        raise ValueError(
            f"{name}: target must be a plain tensor {list(x.shape[:-1])}, the same on every rank, "
            f"got a {type(target).__name__} {list(target.shape)}"
        )
    if bias is not None and getattr(bias, "placements", None) != split:
        raise ValueError(f"{name}: bias must be sharded as weight is")
    if weight.shape[0] % mesh.size():
        raise ValueError(
            f"{name}: weight must have as many classes on each of {mesh.size()} ranks, got "
            f"{weight.shape[0]}"
        )
    return True


def class_statistics(
    own: Callable[..., Tensor], rule: LogitRule, x: Any, weight: Any, target: Tensor, bias: Any
) -> Tensor:
    """Return [..., 4] of each token, the same on every rank; see `kernels/cross_entropy.py`.

    own: the same of one rank's tensors, with -1 as the target of tokens that are ignored.
    """
    mesh, found = weight.device_mesh, library()
    if not x.placements[0].is_replicate():
        x = x.redistribute(placements=[found.Replicate()])
    x = x.to_local(grad_placements=[found.Partial()])
    classes = weight.shape[0] // mesh.size()
    place, counted = target - mesh.get_local_rank() * classes, target != rule.ignore_index
    is_own = (place >= 0) & (place < classes) & counted
    place = torch.where(is_own, place, counted.long() - 1)
    local = own(x, weight.to_local(), place, None if bias is None else bias.to_local())
    logp, lse, mean, entropy = local.unbind(-1)

    def total(part: Tensor, by: str = "sum") -> Tensor:
        partial = placed(part, mesh, found.Partial(by))
        return partial.redistribute(placements=[found.Replicate()]).to_local()

    top = total(lse.detach(), "max")
    share = (lse - top).exp()
    # a rank's part may read no total but top: gradients of totals are not summed over ranks
    parts = [share, torch.where(is_own, logp + lse, 0.0), (mean + lse) / mesh.size()]
    parts += [share * (lse - entropy)] if rule.entropy else []
    shares, target_logit, mean_logit, *expected = total(torch.stack(parts)).unbind()
    whole = top + shares.log()
    entropy = whole - expected[0] / shares if expected else torch.zeros_like(whole)
    every = (target_logit - whole, whole, mean_logit - whole, entropy)
    return torch.stack(every, -1).masked_fill(~counted.unsqueeze(-1), 0.0)
