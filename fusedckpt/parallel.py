"""Tensor parallelism: a style for `torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fusedckpt.layers.notes import notes_of, set_notes
from fusedckpt.layers.sharded import Sharding

__all__ = ["MLPParallel"]


class MLPParallel(ParallelStyle):
    """Shard a whole MLP or gated MLP over the ranks of a mesh of one dimension.

        parallelize_module(model, mesh, {"layers.*.mlp": MLPParallel()})

    It takes the place of `ColwiseParallel` for the first linears and `RowwiseParallel` for the last
    one. Each rank runs the fused block on its shards: gate, up and fc1 by output features, down and
    fc2 by input features. Forward gathers the input and reduces the output once, backward runs the
    duals; levels, chunks and saved bytes are those of the module. Of an input whose rows are
    sharded (sequence parallelism) a rank saves its own rows.

    Where a call cannot run fused (see `FuseReport.fallbacks`), and under torch.compile, the
    module's own forward runs on DTensors.

    Args:
        input_layouts: the placement of an input [..., D] that is a plain tensor: Replicate() (the
            default), or Shard(dim) for this rank's rows.
        output_layouts: the placement of the result: Replicate() (the default) or Shard(dim).
        use_local_output: return a plain tensor, this rank's part, or else a DTensor.

    The module is a `fusedckpt.MLP` or `GatedMLP`, or one that `fuse` swapped before. A norm inside
    gets parameters replicated over the mesh where the input is sharded.

    Raises:
        TypeError: the module is no such MLP.
        ValueError: a mesh of several dimensions, hidden features that the ranks cannot share
            evenly, or a linear that the module has to call: an adapter, a hook, packed weights.

    Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053; Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models", arXiv 2205.05198.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.input_layouts = _checked("input_layouts", input_layouts)
        self.output_layouts = _checked("output_layouts", output_layouts)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linears = _linears_of(module, device_mesh)
        *first, last = linears
        for linear in first:
            self._distribute(linear, device_mesh, weight=Shard(0), bias=Shard(0))
        self._distribute(last, device_mesh, weight=Shard(1), bias=Replicate())
        norm = getattr(module, "norm", None)
        if isinstance(norm, nn.Module) and not self.input_layouts.is_replicate():
            self._distribute(norm, device_mesh, weight=Replicate(), bias=Replicate())
        sharding = Sharding(
            mesh=device_mesh,
            input=self.input_layouts,
            output=self.output_layouts,
            is_local=self.use_local_output,
        )
        set_notes(module, sharding=sharding)
        return module

    def _distribute(self, module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
        """Replace a module's parameters by DTensors."""
        for name, parameter in [*module.named_parameters(recurse=False)]:
            value = distribute_tensor(
                parameter, mesh, [placements[name]], src_data_rank=self.src_data_rank
            )
            module.register_parameter(name, nn.Parameter(value, parameter.requires_grad))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


def _checked(name: str, placement: Any) -> Placement:
    if placement is None:
        return Replicate()
    is_last = isinstance(placement, Shard) and placement.dim == -1
    if type(placement) not in (Replicate, Shard) or is_last:
        raise ValueError(
            f"MLPParallel: {name} must be Replicate() or Shard(dim) of a dimension before the "
            f"last, got {placement}"
        )
    return placement


def _linears_of(module: Any, mesh: DeviceMesh) -> list[Any]:
    """Return the linears of an MLP, or refuse it before any weight is changed."""
    name = f"MLPParallel: {type(module).__name__}"
    if not hasattr(module, "linears_to_shard"):
        raise TypeError(
            f"{name} must be a fusedckpt.MLP or GatedMLP, or an MLP that fusedckpt.fuse swapped: "
            "call fuse before parallelize_module"
        )
    if notes_of(module).sharding is not None:
        raise ValueError(f"{name} is sharded already: call parallelize_module once")
    if mesh.ndim != 1:
        raise ValueError(f"{name} takes a mesh of one dimension, got {mesh}: slice it")
    linears = module.linears_to_shard()
    if isinstance(linears, str):
        raise ValueError(f"{name}: {linears}")
    features = linears[0].weight.shape[0]
    if features % mesh.size():
        raise ValueError(
            f"{name} has {features} hidden features, which {mesh.size()} ranks cannot share: "
            f"use a mesh whose size divides {features}"
        )
    return linears
