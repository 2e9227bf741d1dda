"""One of two ranks: deferred logits of heads split by classes. Run by test_sharded.py."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensor_parallel import alike, whole
from test_deferred import B, D, T, V, Words, capped, ids, loss_of, shifted, twice
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from fusedckpt import fuse, unfuse
from fusedckpt.blocks import head as head_block
from fusedckpt.fusing.accuracy import Errors
from fusedckpt.fusing.deferred import DeferredLogits

WAYS = {
    "gathered": {"output_layouts": Replicate()},
    "replicated": {"output_layouts": Replicate(), "use_local_output": False},
    "sharded": {"output_layouts": Shard(-1), "use_local_output": False},
}
# the logits, and a rank's share of them
LOGITS = {4 * B * T * V, 4 * B * T * V // 2}


def parallel(model: nn.Module, mesh: Any, **style: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(**style)})


def pair(mesh: Any, bias: bool, first: bool, **style: Any) -> tuple[nn.Module, ...]:
    """Return one process's model, and both under a style; fused first or later."""
    torch.manual_seed(0)
    one = Words(bias)
    eager, fused = copy.deepcopy(one), copy.deepcopy(one)
    if first:
        fuse(fused, head=True)
    for model in (eager, fused):
        parallel(model, mesh, **style)
    report = fuse(fused, head=True)
    assert [*(report.already if first else report.swapped)] == ["lm_head"], report
    return one, eager, fused


def step(model: nn.Module, loss: Any, labels: Any) -> tuple[Any, list[Any]]:
    z = model(ids())
    value = loss(z, labels)
    return z, [value, *torch.autograd.grad(value, [*model.parameters()])]


def allocations(fn: Any) -> tuple[Any, set[int]]:
    with torch.profiler.profile(profile_memory=True) as profiler:
        found = fn()
    events = profiler.profiler.kineto_results.events()
    return found, {event.nbytes() for event in events if event.name() == "[memory]"}


def collectives(fn: Any) -> tuple[Any, dict[str, int]]:
    with CommDebugMode() as mode:
        found = fn()
    counts = mode.get_comm_counts().items()
    return found, {str(op).rpartition(".")[2].rstrip("'>)"): count for op, count in counts}


def check_losses(models: Any, loss: Any, labels: Any) -> None:
    """One process's loss and gradients, laid out as eager's; no logits of a rank's classes."""
    one, eager, fused = models
    (_, theirs), made = allocations(lambda: step(eager, loss, labels))
    assert made & LOGITS, made
    (z, ours), made = allocations(lambda: step(fused, loss, labels))
    assert not made & LOGITS, made
    assert type(z) is DeferredLogits
    assert z.deferred.made is None
    alike(ours, theirs)
    _, alone = step(one, loss, ids())
    _, truth = step(copy.deepcopy(one).double(), loss, ids())
    assert abs(whole(ours[0]) - alone[0]) < 1e-6
    errors = Errors(torch.float32)
    # the loss, one number, is compared above
    for numbers in zip(map(whole, ours[1:]), alone[1:], truth[1:], strict=True):
        errors.add(*(number.detach() for number in numbers))
    assert errors.problem(slack=2.0) is None, errors


def check_real(eager: nn.Module, fused: nn.Module) -> None:
    """Logits that are read are laid out as eager's, and so are their gradients."""
    theirs, ours = eager(ids()), fused(ids())
    assert isinstance(ours, DTensor) == isinstance(theirs, DTensor)
    found = [step(model, summed, None)[1] for model in (fused, eager)]
    alike([ours + 0, *found[0]], [theirs + 0, *found[1]])
    if isinstance(theirs, DTensor):
        assert (ours.placements, ours.device_mesh) == (theirs.placements, theirs.device_mesh)
        assert torch.equal(fused(ids()).full_tensor(), theirs.full_tensor())
    late = fused(ids())
    with torch.no_grad():
        fused.lm_head.weight.mul_(1.0)
    for read in (torch.exp, lambda z: loss_of(z, ids())):
        with pytest.raises(RuntimeError, match="read them before backward"):
            read(late)


def summed(z: Any, _: Any) -> Any:
    return whole(z.softmax(-1).square()).sum()


def check_collectives(mesh: Any) -> None:
    """Two small reductions in place of the one that gathers logits, and one of gradients of x."""
    _, eager, fused = pair(mesh, True, True, input_layouts=Shard(1), output_layouts=Replicate())
    generator, rank = torch.Generator().manual_seed(1), mesh.get_local_rank()
    x = torch.randn(B, 3, D, generator=generator, requires_grad=True)
    x.data += rank
    labels, found, counts = ids()[:, 1:].clone(), [], []
    for model in (eager, fused):
        loss, in_forward = collectives(lambda m=model: loss_of(m.lm_head(x * 1), labels))
        found.append(loss)
        counts.append((in_forward, collectives(loss.backward)[1]))
        found += [x.grad, *(p.grad for p in model.lm_head.parameters())]
        x.grad = None
    alike(found[4:], found[:4])
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    assert counts == [({gather: 2}, {scatter: 1}), ({gather: 1, reduce: 2}, {scatter: 1})]


def check_left(mesh: Any) -> None:
    """Other styles, and hooks that are of none, get what they read."""
    torch.manual_seed(0)

    def left(style: Any, classes: int = V) -> str:
        model = Words()
        model.lm_head = nn.Linear(D, classes)
        parallelize_module(model, mesh, {"lm_head": style})
        return fuse(model, head=True).left["lm_head"]

    why = "its output embedding is no nn.Linear with a plain weight, or one split by classes"
    rows = RowwiseParallel(input_layouts=Replicate())
    assert {left(rows), left(ColwiseParallel()), left(ColwiseParallel(**WAYS["gathered"]), 31)} == {
        why
    }
    _, eager, fused = pair(mesh, True, True, output_layouts=Replicate())
    fused.lm_head.register_forward_hook(lambda module, given, z: z * 2)
    z = fused(ids())
    assert type(z) is not DeferredLogits
    torch.testing.assert_close(z, 2 * eager(ids()))
    assert type(unfuse(fused).lm_head) is nn.Linear


def main(mesh: Any) -> None:
    before, head_block.CHUNK_BYTES = head_block.CHUNK_BYTES, 1
    for number, (way, style) in enumerate(WAYS.items()):
        models = pair(mesh, number < 2, number == 0, **style)
        is_local = way == "gathered"
        labels = ids() if way != "replicated" else DTensor.from_local(ids(), mesh, [Replicate()])
        for loss in (loss_of, shifted if is_local else capped, twice):
            with loss_parallel() if way == "sharded" else nullcontext():
                check_losses(models, loss, labels)
        check_real(*models[1:])
    head_block.CHUNK_BYTES = before
    check_collectives(mesh)
    check_left(mesh)
