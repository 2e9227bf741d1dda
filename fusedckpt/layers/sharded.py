"""Blocks on this rank's shards of DTensors: tensor and sequence parallelism.

A layer gathers its input, runs its autograd Function on this rank's shards of the weights, and
reduces its output:

    rows of x -gather-> all rows of x -layer on own features-> a summand of y -reduce-> rows of y

DTensor moves the data and places the gradients: backward runs the duals of both collectives. With
sequence parallelism the layer saves this rank's rows of x alone; backward gathers all rows in the
collective that gathers the output's gradient: the same number of collectives as unfused, with twice
the bytes in that one.

`MLPParallel` in fusedckpt/parallel.py shards a module's weights and notes a `Sharding` on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, index, phases, recipes
from fusedckpt.autograd.private import at_end_of_backward, raw_saved
from fusedckpt.layers.notes import ModuleNotes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# the reason for an MLP whose dropout would need independent masks on each rank
DROPS = (
    "it applies dropout to its hidden features: shard its linears by ColwiseParallel and "
    "RowwiseParallel"
)


class Sharding(NamedTuple):
    """How a layer is laid out over the ranks of a mesh of one dimension."""

    mesh: DeviceMesh
    # the placement of an input that is a plain tensor
    input: Any
    # the placement of the result
    output: Any
    # whether the result is this rank's part as a plain tensor, or a DTensor
    is_local: bool


class Shardable(Protocol):
    """A module that computes an MLP, which can run on shards of its weights."""

    # None for weights that are whole
    _fusedckpt: ModuleNotes

    def linears_to_shard(self) -> list[nn.Module] | str:
        """Return the modules with the layer's weights, the last one last, or why they must stay
        whole."""
        ...


def dtensor_library() -> Any:
    """Return torch.distributed.tensor if it was imported, which takes a second, else None."""
    return sys.modules.get("torch.distributed.tensor")


def is_sharded(x: Any) -> bool:
    """Whether a value is a DTensor."""
    tensors = dtensor_library()
    return tensors is not None and isinstance(x, tensors.DTensor)


def are_replicated(parameters: Iterable[Any]) -> bool:
    """Whether these are DTensors that every rank holds whole, as those of a norm that runs on a
    rank's rows."""
    parameters = [*parameters]
    return bool(parameters) and all(
        is_sharded(p) and all(placement.is_replicate() for placement in p.placements)
        for p in parameters
    )


def as_dtensor(local: Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    """Return the DTensor of which `local` is this rank's part."""
    return dtensor_library().DTensor.from_local(local, mesh, [placement], run_check=False)


def check_input(name: str, x: Any, sharding: Sharding) -> None:
    """Refuse an input, before any work, that the layer cannot gather."""
    if not is_sharded(x):
        if not dispatch.are_plain(x):
            raise TypeError(f"{name}: expected a Tensor or a DTensor, got a {type(x).__name__}")
        placements = (sharding.input,)
    elif x.device_mesh != sharding.mesh:
        raise ValueError(
            f"{name}: expected a DTensor on the mesh {sharding.mesh}, got {x.device_mesh}"
        )
    else:
        placements = x.placements
    for placement in (*placements, sharding.output):
        if not _is_of_rows(placement, x.dim(), 1):
            raise ValueError(
                f"{name}: input and output must be replicated or sharded by whole rows of "
                f"{list(x.shape)}, got {placement}"
            )


def _is_of_rows(placement: Any, dims: int, features: int) -> bool:
    """Whether a placement keeps rows whole; the last dimensions are features."""
    if placement.is_replicate():
        return True
    return isinstance(placement, dtensor_library().Shard) and placement.dim % dims < dims - features


def shards_of(linears: Sequence[tuple[Any, Any]], mesh: DeviceMesh) -> list[Any]:
    """Return this rank's parts of a layer's weights and biases.

    The first linears are split by output features, the last by input features. Its bias is whole,
    and every rank adds a share of it.
    """
    *first, (weight, bias) = linears
    shards = [(_local(w), _local(b)) for w, b in first]
    bias = None if bias is None else _Portion.apply(bias.to_local(), mesh.size())
    return [*shards, (_local(weight), bias)]


def _local(weight: Any) -> Any:
    return None if weight is None else weight.to_local()


class _Portion(torch.autograd.Function):
    """A rank's share of a bias that all ranks add; its gradient is replicated."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, ranks: int) -> Tensor:
        return bias / ranks

    @staticmethod
    def backward(ctx: Any, db: Tensor) -> Any:  # type: ignore[override]
        return db, None


def on_dtensors(forward: Callable[[Any], Any], x: Any, sharding: Sharding) -> Any:
    """Return the result of a forward that computes with DTensors, placed as the sharding says."""
    replicate = dtensor_library().Replicate()
    x = x if is_sharded(x) else as_dtensor(x, sharding.mesh, sharding.input)
    y = forward(x.redistribute(placements=[replicate]))
    y = y.redistribute(placements=[sharding.output])
    return y.to_local() if sharding.is_local else y


def placed_for_norm(x: Any, sharding: Sharding) -> Any:
    """Return a layer's input as its norm takes it: a DTensor where its rows are sharded."""
    if sharding.input.is_replicate():
        return x.to_local() if is_sharded(x) else x
    return x if is_sharded(x) else as_dtensor(x, sharding.mesh, sharding.input)


def placed_as_output(x: Any, sharding: Sharding) -> Any:
    """Return a layer's input placed as its output, to which it is added."""
    if not is_sharded(x):
        if sharding.is_local and sharding.input == sharding.output:
            return x
        x = as_dtensor(x, sharding.mesh, sharding.input)
    x = x.redistribute(placements=[sharding.output])
    return x.to_local() if sharding.is_local else x


def run_on_shards(layer: Callable[[Tensor], Tensor], x: Any, sharding: Sharding) -> Any:
    """Return the sum over ranks of a layer's results for all rows, placed as the sharding says.

    One collective gathers x if its rows are sharded, and one reduces the output; backward has their
    duals. The layer saves this rank's rows of x if x or the output is sharded, else x.
    """
    tensors = dtensor_library()
    mesh = sharding.mesh
    n = x
    view = None if torch.compiler.is_compiling() else index.view_of(n, index.NORM)
    dtype = dispatch.autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        # before it is gathered
        x = x.to(dtype)
    # as it was passed, so that autograd sees whether it is written to
    rows_of_x = x
    if not is_sharded(x):
        x = as_dtensor(x, mesh, sharding.input)
    gathered = x
    if not x.placements[0].is_replicate():
        gathered = x.redistribute(placements=[tensors.Replicate()])
    whole = gathered.to_local(grad_placements=[tensors.Partial()])
    row_placement = next(
        (p for p in (*x.placements, sharding.output) if not p.is_replicate()), None
    )
    if row_placement is None or not whole.requires_grad:
        if view is not None:
            whole = _with_recipe(whole, recipes.cast(view, n, whole))
        return _summed(layer(whole), sharding)
    if x.placements != (row_placement,):
        rows_of_x = x.detach().redistribute(placements=[row_placement]).to_local()
    rows = _Rows(mesh, row_placement.dim % x.dim(), whole.shape)
    whole = _Whole.apply(whole, rows_of_x)
    index.put(whole, index.GATHERED_ROWS, partial(index.of_first_saved, "rows", rows.again))
    y = layer(whole)
    # whether the layer saves rows and gathers its input again
    saved = raw_saved(y.grad_fn) if hasattr(type(y.grad_fn), "saved_tensors") else ()
    gathers = bool(saved) and isinstance(saved[0].data, recipes.View)
    is_like_x = (y.shape, y.dtype) == (rows.shape, rows_of_x.dtype)
    if not (gathers and sharding.output == row_placement and is_like_x):
        return _summed(y, sharding)
    y = _SumOfRows.apply(y, rows_of_x, rows)
    return y if sharding.is_local else _as_uneven_dtensor(y, mesh, [sharding.output], rows.shape)


class _Rows:
    """How rows are sharded over ranks."""

    def __init__(self, mesh: DeviceMesh, dim: int, shape: Sequence[int]):
        self.mesh = mesh
        self.dim = dim
        self.shape = shape
        # all rows of the layer's input, gathered by a backward and not yet read
        self.prefetched: Tensor | None = None

    def gathered(self, *parts: Any) -> tuple[Tensor, ...]:
        """Return all rows of tensors from this rank's, by one collective."""
        tensors = dtensor_library()
        local = [part.to_local() if is_sharded(part) else part for part in parts]
        stacked: Any = torch.stack(local) if len(local) > 1 else local[0].unsqueeze(0)
        placements = [tensors.Shard(self.dim + 1)]
        stacked = _as_uneven_dtensor(stacked, self.mesh, placements, [len(parts), *self.shape])
        stacked = stacked.redistribute(placements=[tensors.Replicate()])
        return stacked.to_local(grad_placements=[tensors.Partial()]).unbind()

    def again(self, rows: Tensor, *_: None) -> Tensor:
        """Return all rows of a saved tensor."""
        prefetched = self.prefetched
        self.prefetched = None
        return self.gathered(rows)[0] if prefetched is None else prefetched

    def forget(self) -> None:
        """Free rows that were not read."""
        self.prefetched = None


def _as_uneven_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Any, shape: Sequence[int]
) -> Any:
    """Return the DTensor of a shape of which `local` is this rank's part, also an uneven one."""
    stride = torch.empty(shape, device="meta").stride()
    options: Any = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return dtensor_library().DTensor.from_local(local, mesh, placements, **options)


def _with_recipe(whole: Tensor, view: recipes.View) -> Tensor:
    """Return a tensor of which a layer that reads it saves a view, as long as its node has one."""

    def run(_: Any) -> Tensor:
        result = _Whole.apply(whole, whole)
        # not as a reader: its node never reads it
        if index.save_view(result.grad_fn, 0, view):
            index.put(result, index.GATHERED_ROWS, _first_source)
        return result

    return phases.with_own_hooks(run, lambda: whole)


def _first_source(y: Tensor, _: Any) -> Any:
    view = index.saved_view(y.grad_fn)
    return None if view is None else view.source


class _Whole(torch.autograd.Function):
    """All rows; saves the tensor from which a layer that reads them can make them again."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.set_materialize_grads(False)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> Any:  # type: ignore[override]
        return dx, None


class _SumOfRows(torch.autograd.Function):
    """This rank's rows of the sum over ranks; backward gathers the layer's input, too."""

    @staticmethod
    def forward(ctx: Any, y: Any, rows_of_x: Tensor, rows: _Rows) -> Tensor:
        ctx.save_for_backward(rows_of_x)
        ctx.set_materialize_grads(False)
        ctx.rows = rows
        tensors = dtensor_library()
        y = as_dtensor(y, rows.mesh, tensors.Partial())
        return y.redistribute(placements=[tensors.Shard(rows.dim)]).to_local()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:  # type: ignore[override]
        if dy is None:
            return None, None, None
        (rows_of_x,) = ctx.saved_tensors
        rows = ctx.rows
        dy, rows.prefetched = rows.gathered(dy, rows_of_x.detach())
        at_end_of_backward(rows.forget)
        return dy, None, None


def _summed(y: Tensor, sharding: Sharding) -> Any:
    """Return the sum of ranks' results."""
    total = as_dtensor(y, sharding.mesh, dtensor_library().Partial())
    total = total.redistribute(placements=[sharding.output])
    return total.to_local() if sharding.is_local else total


def on_rows(norm: Callable[..., Any], features: int, x: Any, *parameters: Any) -> Any:
    """Run a norm over the last dimensions on this rank's rows of a DTensor.

    None if x is not a DTensor, or has other placements; parameters must be replicated.
    """
    if not is_sharded(x) or torch.compiler.is_compiling():
        return None
    if not all(_is_of_rows(placement, x.dim(), features) for placement in x.placements):
        return None
    tensors = dtensor_library()
    wholes = (tensors.Replicate(),) * x.device_mesh.ndim
    # from its rows, a rank has a summand of a parameter's gradient
    grads = [p if p.is_replicate() else tensors.Partial() for p in x.placements]
    for p in parameters:
        if p is not None and not (
            is_sharded(p) and p.device_mesh == x.device_mesh and p.placements == wholes
        ):
            return None
    local = [None if p is None else p.to_local(grad_placements=grads) for p in parameters]
    y = norm(x.to_local(), *local)
    return (
        y
        if not isinstance(y, Tensor)
        else _as_uneven_dtensor(y, x.device_mesh, x.placements, x.shape)
    )
