"""One of two ranks: the head on a weight sharded by classes. Run by test_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import compare
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.functional import linear_cross_entropy, token_logprobs
from fusedckpt.memory import saved_tensors

T, D, V = 64, 16, 52
CALLS = {
    "options": (
        linear_cross_entropy,
        {
            **{"label_smoothing": 0.1, "z_loss": 0.01, "scale": 0.7, "softcap": 3.0},
            **{"ignore_index": 3, "reduction": "none", "chunks": 3},
        },
    ),
    "logprobs": (token_logprobs, {"entropy": True, "temperature": 2.0}),
}


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((2, T // 2, D), (V, D), (V,))
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def main(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    target = torch.randint(V, (2, T // 2))
    target[0, 1], target[1, 2] = -100, 3

    def sharded(x: Tensor, weight: Tensor, bias: Tensor | None, rows: bool = False) -> list:
        def placed(t: Tensor, placement: Any) -> Any:
            whole = DTensor.from_local(t, mesh, [Replicate()], run_check=False)
            return whole.redistribute(placements=[placement])

        parts = [None if t is None else placed(t, Shard(0)) for t in (weight, bias)]
        return [placed(x, Shard(0) if rows else Replicate()), parts[0], target, parts[1]]

    for name, (function, options) in CALLS.items():
        targets = target.clamp(min=3) if name == "options" else target

        def ours(x, weight, bias, function=function, options=options, targets=targets):
            given = sharded(x, weight, bias, rows=function is token_logprobs)
            given[2] = targets
            return function(*given, **options)

        def eager(x, weight, bias, function=function, options=options, targets=targets):
            return function(x, weight, targets, bias, **options)

        # the kernels of the second are those of the first
        with forced_path("aten" if name == "logprobs" else None):
            compare(ours, eager, operands)
    _check_memory(sharded, target)
    _check_errors(sharded, target)


def _check_memory(sharded, target) -> None:
    """A rank saves x, and numbers for each token."""
    x, weight, bias = operands()
    given = sharded(x, weight, bias)
    given = [t.detach().requires_grad_() if t.is_floating_point() else t for t in given]
    with saved_tensors() as saved:
        # as an intermediate
        loss = linear_cross_entropy(given[0] * 1, *given[1:])
    assert isinstance(loss, Tensor)
    assert not isinstance(loss, DTensor)
    torch.testing.assert_close(loss, linear_cross_entropy(x, weight, target, bias))
    assert max(one.nbytes for one in saved.storages) == 4 * T * D


def _check_errors(sharded, target) -> None:
    x, weight, bias = operands()
    given = sharded(x, weight, bias)
    with pytest.raises(ValueError, match="x must be a DTensor on the mesh of weight"):
        linear_cross_entropy(x, *given[1:])
    with pytest.raises(ValueError, match="bias must be sharded as weight is"):
        linear_cross_entropy(*given[:3], bias)
    with pytest.raises(ValueError, match="as many classes on each of 2 ranks"):
        linear_cross_entropy(*sharded(x, weight[:51].detach(), None))
    with pytest.raises(ValueError, match="target must be from 0 to 51"):
        linear_cross_entropy(given[0], given[1], target + V)
    layer = fusedckpt.LinearCrossEntropy(D, V)
    layer.weight = torch.nn.Parameter(given[1].detach())
    layer.bias = torch.nn.Parameter(given[3].detach())
    layer(given[0], target).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.placements == (Shard(0),)
