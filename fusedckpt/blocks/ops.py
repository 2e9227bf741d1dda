"""A layer's forward and backward as a pair of torch ops, for code that watches ops.

The ops take a call by its key, a description by which the process that made the call finds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.backward import define
from fusedckpt.blocks import run
from fusedckpt.blocks.call import CALLS, LayerCall
from fusedckpt.blocks.writer import Flags, Schedule

# of the empty tensor in place of a gradient that is not wanted, or to which no result led: an op
# returns a fixed number of tensors
ABSENT_DIMS = 7


def forward_op(call: LayerCall, code: Schedule, tensors: Sequence[Any]) -> list[Tensor]:
    """Run `run.forward` as one op."""
    return _forward_op(list(tensors), call.key, code.results[len(call.program.results) :])


def backward_op(
    call: LayerCall,
    wanted: Flags,
    dys: Sequence[Tensor | None],
    like: Tensor,
    saved: Mapping[Any, Any],
    donates: bool = False,
) -> list[Tensor | None]:
    """Run `run.backward` as one op."""
    program = call.program
    count = call.num_inputs
    asked = list(wanted)
    products = {name: saved[name] for name in program.gemm_outputs if saved.get(name) is not None}
    if program.saved_results:
        # the inputs of a sum have one gradient, which no op may return twice
        asked[:count] = [any(wanted[:count])] + [False] * (count - 1)
    tensors = [saved.get(name) for name in given_names(call)]
    op = _donating_op if donates else _backward_op
    results = op(list(dys), list(products.values()), tensors, call.key, list(products), asked)
    grads = [None if t.dim() == ABSENT_DIMS else t for t in results]
    if program.saved_results:
        grads[:count] = [grads[0] if want else None for want in wanted[:count]]
    return grads


def given_names(call: LayerCall) -> tuple[Any, ...]:
    """Return the names of the tensors, products apart, that the op of a backward is given."""
    return (*call.names, *call.program.saved_results, *call.program.saved_beside)


def _forward_code(call: LayerCall, products: Sequence[str]) -> Schedule:
    return call.forward(tuple([name in products for name in call.program.gemm_outputs]))


def _run_forward(tensors: list[Any], key: str, products: list[str]) -> list[Tensor]:
    call = CALLS[key]
    return run.forward(call, _forward_code(call, products), tensors)


def _fake_forward(tensors: list[Any], key: str, products: list[str]) -> list[Tensor]:
    call = CALLS[key]
    x = tensors[0]
    # x in nine bits has no shape
    shape = call.metas[0].shape if x.dtype == torch.int8 else x.shape
    sizes = [call.described[name] for name in _forward_code(call, products).results]
    return [x.new_empty(call.shape(shape, width), dtype=dtype) for width, dtype in sizes]


def _flops(call: LayerCall, code: Schedule) -> int:
    rows = math.prod(call.metas[0].shape[:-1])
    weights = call.metas[call.num_inputs :]
    return 2 * rows * sum(call.program.macs(weights[number].shape) for number in code.gemms)


def _flops_forward(tensors: Any, key: str, products: Any, **_: Any) -> int:
    return _flops(CALLS[key], _forward_code(CALLS[key], products))


def _backward_code(
    call: LayerCall, dys: Sequence[Any], products: Any, saved: Sequence[Any], wanted: Any
) -> Schedule:
    flags = [name in products for name in call.program.gemm_outputs]
    has_beside = call.has_beside(dict(zip(given_names(call), saved, strict=True)))
    has_dys = tuple([dy is not None for dy in dys])
    return call.backward(tuple(wanted), tuple(flags), has_dys, False, has_beside)


def _run_backward(
    dys: list[Any],
    products: list[Tensor],
    saved: list[Any],
    key: str,
    names: list[str],
    wanted: list[bool],
    donates: bool = False,
) -> list[Tensor]:
    call = CALLS[key]
    like = next(dy for dy in dys if dy is not None)
    named = dict(zip((*given_names(call), *names), [*saved, *products], strict=True))
    grads = run.backward(call, tuple(wanted), dys, like, named, donates)
    for index, dtype in enumerate(call.dtypes):
        # each sum is freed as it is rounded
        grad = grads[index]
        grads[index] = _absent(like) if grad is None else grad.to(dtype)
    return grads  # type: ignore[return-value]  # none is None


def _absent(like: Tensor) -> Tensor:
    return like.new_empty((0,) * ABSENT_DIMS)


def _fake_backward(
    dys: list[Any], products: Any, saved: Any, key: str, names: Any, wanted: Any
) -> list[Tensor]:
    call = CALLS[key]
    like = next(dy for dy in dys if dy is not None)
    code = _backward_code(call, dys, names, saved, wanted)
    pairs = zip(code.results, call.metas, strict=True)
    return [
        _absent(like) if result is None else like.new_empty(meta.shape, dtype=meta.dtype)
        for result, meta in pairs
    ]


def _flops_backward(
    dys: list[Any], products: Any, saved: Any, key: str, names: Any, wanted: Any, **_: Any
) -> int:
    return _flops(CALLS[key], _backward_code(CALLS[key], dys, names, saved, wanted))


_forward_op = define(
    "block(Tensor?[] tensors, str call, str[] products) -> Tensor[]",
    _run_forward,
    _fake_forward,
    _flops_forward,
)
_BACKWARD_SCHEMA = "Tensor?[] given, str call, str[] names, bool[] wanted) -> Tensor[]"
_backward_op, _donating_op = [
    define(
        f"{name}(Tensor?[] dys, Tensor{alias}[] products, {_BACKWARD_SCHEMA}",
        implementation,
        _fake_backward,
        _flops_backward,
    )
    for name, alias, implementation in (
        ("block_backward", "", _run_backward),
        ("block_backward_donating", "(a!)", partial(_run_backward, donates=True)),
    )
]
