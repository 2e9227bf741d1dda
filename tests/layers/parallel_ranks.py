"""One of two ranks: MLPs and norms on the shards of DTensors, beside one process and unfused ones.

Run by test_ranks.py.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tensor_parallel import (
    B,
    D,
    F,
    Ranks,
    S,
    alike,
    as_dtensors,
    fused_plan,
    gathered_by_each,
    gathered_once,
    local,
    make_block,
    make_mlp,
    make_swiglu,
    replicated,
    same,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt.memory import saved_tensors
from fusedckpt.parallel import MLPParallel

# bytes of all rows of D and of F features in float32
WIDE, HIDDEN = 4 * B * S * D, 4 * B * S * F
GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
# collectives of a gated MLP, forward and backward: unfused, and fused
COLLECTIVES = {
    replicated: (({REDUCE: 1}, {REDUCE: 2}), ({REDUCE: 1}, {REDUCE: 1})),
    gathered_once: (({GATHER: 1, SCATTER: 1}, {GATHER: 1, SCATTER: 1}),) * 2,
    gathered_by_each: (
        ({GATHER: 2, SCATTER: 1}, {GATHER: 1, SCATTER: 2}),
        ({GATHER: 1, SCATTER: 1}, {GATHER: 1, SCATTER: 1}),
    ),
    as_dtensors: (({GATHER: 1, SCATTER: 1}, {GATHER: 1, SCATTER: 1}),) * 2,
}
NORM = B * S * 4 * 2
# bytes that a rank keeps of a norm and a gated MLP: unfused, and fused
SAVED = {
    replicated: (2 * WIDE + NORM + 2 * HIDDEN, WIDE),
    gathered_once: (WIDE / 2 + NORM / 2 + WIDE + 2 * HIDDEN, WIDE),
    # DTensors of what each linear gathered
    gathered_by_each: (WIDE / 2 + NORM / 2 + 2 * WIDE + 2 * HIDDEN, WIDE),
    as_dtensors: (WIDE / 2 + NORM / 2 + WIDE + 2 * HIDDEN, WIDE),
}


def counted(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rpartition(".")[2].rstrip("'>)"): n for op, n in mode.get_comm_counts().items()}


def costs(ranks: Ranks, model: nn.Module, way: Any) -> tuple[int, Any]:
    with saved_tensors() as saved:
        y = model(ranks.given(way).clone().requires_grad_() * 1)
    with CommDebugMode() as forward:
        y = model(ranks.given(way).clone().requires_grad_() * 1)
    with CommDebugMode() as backward:
        local(y).backward(ranks.part(ranks.dy, way))
    return saved.nbytes, (counted(forward), counted(backward))


def fused(model: nn.Module, mesh: DeviceMesh, way: Any) -> nn.Module:
    # numbers are checked below, and once by fuse
    model.report = fusedckpt.fuse(model, verify=way is replicated)
    assert len(model.report.swapped) == 2, model.report
    assert model.report.left == {}, model.report
    return parallelize_module(model, mesh, fused_plan(model, way))


def check_table(ranks: Ranks) -> None:
    for way, (saved, collectives) in {w: (SAVED[w], COLLECTIVES[w]) for w in SAVED}.items():
        torch.manual_seed(0)
        block = make_block(make_swiglu(bias=True))
        expected = ranks.expected(block, way)
        eager = copy.deepcopy(block)
        parallelize_module(eager, ranks.mesh, way(eager))
        unfused = ranks.results(eager, way)
        found = costs(ranks, eager, way)
        assert found == (saved[0], collectives[0]), found
        model = fused(copy.deepcopy(block), ranks.mesh, way)
        results = ranks.results(model, way)
        same(results, expected)
        alike(results, unfused)
        found = costs(ranks, model, way)
        assert found == (saved[1], collectives[1]), (way, found)
        assert not model.report.fallbacks, model.report
        assert 2 * saved[1] <= saved[0]


def check_own_blocks(ranks: Ranks) -> None:
    for way in (replicated, gathered_by_each):
        for kind in (fusedckpt.GatedMLP, fusedckpt.MLP):
            for norm in (None, fusedckpt.LayerNorm(D), nn.RMSNorm(D)):
                torch.manual_seed(0)
                block = kind(D, F, bias=True, norm=norm, residual=norm is not None)
                expected = ranks.expected(block, way)
                parallelize_module(block, ranks.mesh, fused_plan(block, way))
                same(ranks.results(block, way), expected)
                is_ours = not isinstance(norm, nn.RMSNorm)
                # of the norm's input and of its result, all rows or a half
                parts = 1 if norm is None or way is replicated else 2
                kept = WIDE * parts if way is replicated else WIDE // 2 * parts
                nbytes, found = costs(ranks, block, way)
                assert found == COLLECTIVES[way][1]
                assert nbytes == kept or not is_ours, (way, kind, norm, nbytes)


def check_shapes(ranks: Ranks) -> None:
    """An MLP without a gate, with other widths out; every level; under autocast; rows unevenly."""
    for way in (replicated, gathered_by_each):
        for save in ("inputs", "preact"):
            torch.manual_seed(0)
            mlp = make_mlp(bias=True)
            expected = ranks.expected(mlp, way)
            fusedckpt.fuse(mlp, save=save, verify=False)
            parallelize_module(mlp, ranks.mesh, fused_plan(mlp, way))
            same(ranks.results(mlp, way), expected)
            # a rank's own features of all rows
            extra = HIDDEN // 2 if save == "preact" else 0
            parts = 1 if way is replicated else 2
            assert costs(ranks, mlp, way)[0] == WIDE // parts + extra
        torch.manual_seed(0)
        eager = make_mlp(bias=False)
        ours = copy.deepcopy(eager)
        fusedckpt.fuse(ours, verify=False)
        parallelize_module(eager, ranks.mesh, way(eager))
        parallelize_module(ours, ranks.mesh, fused_plan(ours, way))
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (ranks.results(m, way) for m in (ours, eager))
            assert costs(ranks, ours, way)[1] == COLLECTIVES[way][1]
        same(found, expected, rtol=0.05, atol=0.05)


def check_wide_out(ranks: Ranks) -> None:
    torch.manual_seed(0)
    mlp = make_mlp(out=3)
    x, dy = torch.randn(B, S, D, requires_grad=True), torch.randn(B, S, 3)
    expected = torch.autograd.grad(mlp(x), [x, *mlp.parameters()], dy)
    report = fusedckpt.fuse(mlp, verify=False)
    parallelize_module(mlp, ranks.mesh, fused_plan(mlp, gathered_by_each))
    rows = ranks.rows(x).detach().requires_grad_()
    found = torch.autograd.grad(mlp(rows), [rows, *mlp.parameters()], ranks.rows(dy))
    same(list(found), [ranks.rows(expected[0]), *expected[1:]])
    assert not report.fallbacks


def check_autograd(ranks: Ranks) -> None:
    """Backward twice, of gradients, of some tensors alone, with frozen weights; checkpoints."""
    for way in (replicated, gathered_once):
        torch.manual_seed(0)
        block = make_block(make_swiglu())
        expected = ranks.expected(block, way)
        model = fused(copy.deepcopy(block), ranks.mesh, way)
        for around in (fusedckpt.checkpoint, checkpoint):
            checkpointed = partial(around, model, use_reentrant=False)
            same(ranks.results(model, way, checkpointed), expected)
        with torch.no_grad():
            y = model(ranks.given(way))
        same([y], expected[:1])

        x = ranks.given(way).clone().requires_grad_()
        y, dy = model(x), ranks.part(ranks.dy, way)
        first, again = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
        same([first, again], [expected[1]] * 2)
        weights = [p for name, p in model.named_parameters() if "mlp" in name]
        # without x, to which no gradient of a weight leads
        same(list(torch.autograd.grad(y, weights, dy)), expected[-3:])

        for p in model.mlp.parameters():
            p.requires_grad_(False)
        frozen = ranks.results(model, way)
        same(frozen[:2], expected[:2])
        assert frozen[-3:] == [None] * 3


def check_rows_let_go(ranks: Ranks) -> None:
    """What backward gathered ahead is gone once it was read, and where nobody reads it."""
    model = make_mlp()
    fusedckpt.fuse(model, verify=False)
    parallelize_module(model, ranks.mesh, fused_plan(model, gathered_by_each))
    x, held = ranks.rows(ranks.x).clone().requires_grad_() * 1, []
    y = model(x)
    rows = y.grad_fn.rows
    x.register_hook(lambda _: held.append(rows.prefetched))
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y.sum(), model.fc2.bias)
    assert (held, rows.prefetched) == ([None], None)


def check_second_order(ranks: Ranks) -> None:
    """Where rows are shared out: torch's from_local of a whole tensor is differentiable once."""
    way = gathered_by_each
    torch.manual_seed(0)
    mlp = make_swiglu()
    unfused, ours = copy.deepcopy(mlp), copy.deepcopy(mlp)
    fusedckpt.fuse(ours, verify=False)
    parallelize_module(unfused, ranks.mesh, way(unfused))
    parallelize_module(ours, ranks.mesh, fused_plan(ours, way))

    def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(model(x), x, dy, create_graph=True)
        wanted = [x, *model.parameters()]
        return torch.autograd.grad(dx.square().sum(), wanted, allow_unused=True)

    rows = ranks.rows(ranks.x), ranks.rows(ranks.dy)
    if gradients(unfused, *rows)[0] is None:
        assert torch.__version__ < "2.13", "its collectives are differentiable twice"
        return
    dx, *grads = gradients(mlp, ranks.x, ranks.dy)
    same(list(gradients(ours, *rows)), [ranks.rows(dx), *grads])


def check_writes(ranks: Ranks) -> None:
    """What was kept and then written to is refused, as autograd does it."""
    model = make_swiglu()
    fusedckpt.fuse(model, verify=False)
    parallelize_module(model, ranks.mesh, fused_plan(model, gathered_by_each))
    x = ranks.rows(ranks.x).clone().requires_grad_()
    for as_given in (x * 1, DTensor.from_local(x * 1, ranks.mesh, [Shard(1)])):
        y = model(as_given)
        with torch.no_grad():
            as_given.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def check_other_styles(ranks: Ranks) -> None:
    """An MLP whose linears have styles of their own runs its class's forward, and is named."""
    for styles in (
        replicated,
        lambda _: {"gate_proj": ColwiseParallel(output_layouts=Replicate())},
    ):
        torch.manual_seed(0)
        model = make_swiglu()
        expected = ranks.expected(model, replicated)
        report = fusedckpt.fuse(model, verify=False)
        parallelize_module(model, ranks.mesh, styles(model))
        same(ranks.results(model, replicated), expected)
        assert report.fallbacks[""] == ("sharded", "gate_proj.weight"), report


def check_own_forward(ranks: Ranks) -> None:
    """A hook inside, set later, is called: the module computes with DTensors."""
    for way in (replicated, gathered_by_each, as_dtensors):
        for make in (
            make_swiglu,
            lambda: fusedckpt.GatedMLP(D, F, norm=nn.LayerNorm(D), residual=True),
        ):
            torch.manual_seed(0)
            model = make()
            expected = ranks.expected(model, way)
            fusedckpt.fuse(model, verify=False)
            parallelize_module(model, ranks.mesh, fused_plan(model, way))
            calls = []
            model.up_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            same(ranks.results(model, way), expected)
            assert calls == [1]


def check_refused(ranks: Ranks) -> None:
    """Bad calls raise before any weight is changed."""
    mesh, own = ranks.mesh, fusedckpt.GatedMLP(D, F)
    with pytest.raises(TypeError, match="call fuse before parallelize_module"):
        parallelize_module(make_swiglu(), mesh, MLPParallel())
    for layout in (Shard(-1), Partial()):
        with pytest.raises(ValueError, match="must be Replicate"):
            MLPParallel(output_layouts=layout)
    odd, called, wide = fusedckpt.MLP(D, 7), fusedckpt.MLP(D, F), init_device_mesh("cpu", (1, 2))
    called.fc1.register_forward_hook(lambda *_: None)
    for model, over, why in (
        (odd, mesh, "7 hidden features"),
        (called, mesh, "fc1 is a Linear that it has to call"),
        (own, wide, "a mesh of one dimension"),
    ):
        with pytest.raises(ValueError, match=why):
            MLPParallel()._apply(model, over)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    parallelize_module(own, mesh, MLPParallel())
    with pytest.raises(ValueError, match="sharded already"):
        parallelize_module(own, mesh, MLPParallel())
    for x, error, why in (
        (DTensor.from_local(ranks.x, mesh, [Shard(-1)]), ValueError, "whole rows"),
        (ranks.x.to_sparse(), TypeError, "expected a Tensor or a DTensor"),
    ):
        with pytest.raises(error, match=why):
            own(x)


def check_dropout(ranks: Ranks) -> None:
    """The dropout of a result draws the same on all ranks; saved and loaded as it is."""
    torch.manual_seed(0)
    model = fusedckpt.MLP(D, F, output_dropout=0.5)
    names = [*model.state_dict()]
    parallelize_module(model, ranks.mesh, MLPParallel())
    assert [*model.state_dict()] == names
    torch.manual_seed(3)
    y = model(ranks.x)
    parts = [torch.empty_like(y) for _ in range(2)]
    torch.distributed.all_gather(parts, y.detach())
    assert torch.equal(*parts)
    assert (y == 0).any()


def check_left_norms(ranks: Ranks) -> None:
    """A weight that is not whole on every rank is one that torch gathers."""
    norm = nn.RMSNorm(D)
    torch.nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(2))
    expected = ranks.rows(norm(ranks.x))
    report = fusedckpt.fuse(norm, verify=False)
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), ranks.mesh, [Shard(0)]))
    same([local(norm(ranks.given(as_dtensors)))], [expected])
    assert report.fallbacks[""].key == "sharded"


def main(rank: int) -> None:
    ranks = Ranks(init_device_mesh("cpu", (2,)), rank)
    check_table(ranks)
    check_own_blocks(ranks)
    check_shapes(ranks)
    check_wide_out(ranks)
    check_autograd(ranks)
    check_rows_let_go(ranks)
    check_second_order(ranks)
    check_writes(ranks)
    check_other_styles(ranks)
    check_own_forward(ranks)
    check_refused(ranks)
    check_dropout(ranks)
    check_left_norms(ranks)
