"""Models, plans of tensor and sequence parallelism for them, and what ranks make of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from zoo import MLP, MLPBlock, SwiGLU

from fusedckpt.parallel import MLPParallel

B, S, D, F = 2, 8, 16, 48


make_swiglu, make_mlp = partial(SwiGLU, D, F), partial(MLP, D, F)


def make_block(mlp: nn.Module) -> MLPBlock:
    # torch's own norm keeps its input and a number for each row
    return MLPBlock(nn.LayerNorm(D), mlp)


FIRST, LAST = ("gate_proj", "up_proj", "fc1"), ("down_proj", "fc2")


def plan(of: nn.Module, column: dict, row: dict, **others: Any) -> dict[str, Any]:
    names = [name for name, _ in of.named_modules()]
    styles = {n: ColwiseParallel(**column) for n in names if n.rpartition(".")[2] in FIRST}
    styles |= {n: RowwiseParallel(**row) for n in names if n.rpartition(".")[2] in LAST}
    return styles | {name: style for name, style in others.items() if name in names}


ROWS = {"output_layouts": Shard(1)}


def replicated(of: nn.Module) -> dict[str, Any]:
    return plan(of, {}, {})


def gathered_once(of: nn.Module) -> dict[str, Any]:
    """As PyTorch's tutorial does it: the block gathers, before its linears."""
    gathers = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return plan(of, {}, ROWS, norm=SequenceParallel(), mlp=gathers)


def gathered_by_each(of: nn.Module) -> dict[str, Any]:
    return plan(of, {"input_layouts": Shard(1)}, ROWS, norm=SequenceParallel())


def as_dtensors(of: nn.Module) -> dict[str, Any]:
    gathers = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    row = {**ROWS, "use_local_output": False}
    return plan(of, {"use_local_output": False}, row, norm=SequenceParallel(), mlp=gathers)


def fused_plan(of: nn.Module, way: Any) -> Any:
    """Return the plan of a fused model, or the style of a fused MLP, with the layouts of a way."""
    rows = {} if way is replicated else {"input_layouts": Shard(1), "output_layouts": Shard(1)}
    style = MLPParallel(**rows, use_local_output=way is not as_dtensors)
    if not hasattr(of, "mlp"):
        return style
    return {"mlp": style} | ({} if way is replicated else {"norm": SequenceParallel()})


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


class Ranks:
    """What two ranks make of a model and an input, of which each has its rows or all."""

    def __init__(self, mesh: DeviceMesh, rank: int):
        self.mesh, self.rank = mesh, rank
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(B, S, D, generator=generator)
        self.dy = torch.randn(B, S, D, generator=generator)

    def rows(self, x: Tensor) -> Tensor:
        return x.chunk(2, 1)[self.rank]

    def part(self, x: Tensor, way: Any) -> Tensor:
        return x if way is replicated else self.rows(x)

    def given(self, way: Any) -> Tensor:
        x = self.part(self.x, way)
        return DTensor.from_local(x, self.mesh, [Shard(1)]) if way is as_dtensors else x

    def results(self, model: nn.Module, way: Any, call: Callable | None = None) -> list[Any]:
        """Return output and gradients, the parameters' as they are."""
        x = self.given(way).clone().requires_grad_()
        model.zero_grad()
        # as an intermediate
        y = (model if call is None else call)(x * 1)
        local(y).backward(self.part(self.dy, way).to(y.dtype))
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        return [local(y.detach()), local(x.grad), *grads]

    def expected(self, model: nn.Module, way: Any) -> list[Any]:
        """Return what one process makes of it."""
        y, dx, *grads = self.results(model, replicated)
        return [self.part(y, way), self.part(dx, way), *grads]


def same(found: list[Any], expected: list[Any], **tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(ours), whole(theirs), **tolerance)


def alike(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs)
        assert getattr(ours, "placements", None) == getattr(theirs, "placements", None)
    same(found, expected)
