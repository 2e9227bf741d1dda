"""A block's forward and backward on tensors of any shape, directly or as a pair of torch ops.

The ops take a call by its key, a description by which the process that made the call finds it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fusedckpt.autograd import custom_op
from fusedckpt.autograd.backward import is_unwatched
from fusedckpt.autograd.custom_op import BELOW, below
from fusedckpt.blocks import forward_schedule, run
from fusedckpt.blocks.call import CALLS, Call, Saved
from fusedckpt.blocks.program import Program
from fusedckpt.blocks.schedule import Flags, Schedule
from fusedckpt.kernels.runtime import as_dense, as_matrix

# of the empty tensor in place of a gradient that is not wanted, or to which no result led: an op
# returns a fixed number of tensors
ABSENT_DIMS = 7
# without a call of Python's
_IS_GIVEN = partial(operator.is_not, None)


def forward(call: Call, code: Schedule, tensors: Sequence[Any]) -> list[Tensor]:
    """Return the results, then the products that the schedule gives."""
    with below(BELOW):
        count, x, one_row = call.num_inputs, tensors[0], call.num_dims == 1
        rows, args = x, []
        for kind, key in code.given:
            if kind == "param":
                args.append(laid_out(call, key, tensors[count + key]))
            elif kind == "value":
                rows = tensors[call.program.inputs.index(key)]
                if not (one_row and rows.dim() == 2 and rows.stride(1) == 1):
                    rows = as_matrix(rows, call.num_dims)
                args.append(rows)
        if call.chunks == 1:
            found = code.run(0, *args)
        else:
            given = dict(zip([g for g in code.given if g[0] != "home"], args, strict=True))
            found = run.forward(code, given, _places(call, code, tensors), call.chunks)
        if rows is x:
            return list(found)
        return [y.view(call.shape(x.shape, y.shape[1])) for y in found]


def laid_out(call: Call, number: int, given: Any) -> Any:
    """Return a parameter as kernels take it."""
    num_dims, dtype = call.plain[number]
    if num_dims == 0 or (
        given.dim() == num_dims
        and (dtype is None or given.dtype == dtype)
        and given.is_contiguous()
    ):
        return given
    return call.layouts[number].of(given)


def _places(call: Call, code: Schedule, tensors: Sequence[Any]) -> list[Tensor]:
    """Return room for all rows of the results."""
    known, dtypes = call.described([() if t is None else t.shape for t in tensors], tensors)
    x = tensors[0]
    num_rows = math.prod(x.shape[: -call.num_dims])
    return [x.new_empty(num_rows, known[name], dtype=dtypes[name]) for name in code.results]


def backward(
    call: Call,
    wanted: Flags,
    dys: Sequence[Tensor | None],
    like: Tensor,
    products: Sequence[Tensor | None],
    given: dict[Any, Any],
    donates: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of inputs and parameters.

    like: one of dys; given: saved inputs and results by name, parameters by number; donates:
    whether the products may be written over.
    """
    there = tuple(map(_IS_GIVEN, dys))
    code = call.backward(wanted, tuple(map(_IS_GIVEN, products)), there, donates)
    program, one_row = call.program, call.num_dims == 1
    with below(BELOW):
        args: list[Any] = []
        for kind, key in code.given:
            if kind == "param":
                args.append(laid_out(call, key, given[key]))
                continue
            if kind == "dy":
                rows: Any = dys[program.results.index(key)]
            elif key in program.products:
                product: Any = products[program.products.index(key)]
                args.append(as_dense(product))
                continue
            elif kind == "value":
                rows = given[key]
            else:
                continue
            if not (one_row and rows.dim() == 2 and rows.stride(1) == 1):
                rows = as_matrix(rows, call.num_dims)
            args.append(rows)
        if call.chunks == 1:
            found = list(code.run(0, *args))
        else:
            named = dict(zip([g for g in code.given if g[0] != "sum"], args, strict=True))
            num_rows = math.prod(like.shape[: -call.num_dims])
            dtypes = call.dtypes[: call.num_inputs]
            found = run.backward(code, named, dtypes, num_rows, call.chunks)
        return found if like.dim() == 2 and call.num_dims == 1 else _shaped(call, like, found)


def _shaped(call: Call, like: Tensor, found: list[Tensor | None]) -> list[Tensor | None]:
    """Return gradients on rows in the shapes that those of their tensors are."""
    # the inputs of a sum have one gradient: as two views of it, autograd would add to it in place
    views: dict[int, Tensor] = {}
    for i, grad in enumerate(found):
        if grad is not None and i < call.num_inputs:
            view = grad.view(call.shape(like.shape, grad.shape[1]))
            found[i] = views.setdefault(id(grad), view)
        elif grad is not None and call.num_dims > 1:
            found[i] = grad.view(like.shape[-call.num_dims :])
    return found


def forward_of(call: Call, tensors: Sequence[Any]) -> Tensor:
    """Return the first result of a call, and save nothing."""
    products = call.flags_of("inputs")
    if is_unwatched():
        return forward(call, _forward_code(call, products), tensors)[0]
    return _forward_op(list(tensors), call.key, list(products))[0]


def _forward_code(call: Call, products: Sequence[bool]) -> Schedule:
    return forward_schedule.forward(call.program, tuple(products), call.chunks > 1)


def watched_forward(call: Call, saved: Saved, tensors: Sequence[Any]) -> list[Tensor]:
    """Do what `forward` does as one op."""
    return _forward_op(list(tensors), call.key, list(saved.products))


def watched_backward(
    call: Call,
    wanted: Flags,
    dys: Sequence[Tensor | None],
    like: Tensor,
    products: Sequence[Tensor | None],
    given: dict[Any, Any],
    donates: bool = False,
) -> list[Tensor | None]:
    """Do what `backward` does as one op."""
    op = _donating_op if donates else _backward_op
    kept = [t for t in products if t is not None]
    there = [t is not None for t in products]
    tensors = [given.get(name) for name in names_of(call.program)]
    count, asked = call.num_inputs, list(wanted)
    if call.program.keeps:
        # the inputs of a sum have one gradient, which no op may return twice
        asked[:count] = [any(wanted[:count])] + [False] * (count - 1)
    found = op(list(dys), kept, tensors, call.key, there, asked)
    grads = [None if t.dim() == ABSENT_DIMS else t for t in found]
    if call.program.keeps:
        grads[:count] = [grads[0] if want else None for want in wanted[:count]]
    return grads


def names_of(program: Program) -> tuple[Any, ...]:
    """Return the names and numbers of all tensors that may be saved."""
    return (*program.inputs, *program.keeps, *range(len(program.params)))


def _run_forward(tensors: list[Any], key: str, products: list[bool]) -> list[Tensor]:
    call = CALLS[key]
    return forward(call, _forward_code(call, products), tensors)


def _fake_forward(tensors: list[Any], key: str, products: list[bool]) -> list[Tensor]:
    call, x = CALLS[key], tensors[0]
    known, dtypes = call.described([() if t is None else t.shape for t in tensors], tensors)
    names = _forward_code(call, products).results
    return [x.new_empty(call.shape(x.shape, known[name]), dtype=dtypes[name]) for name in names]


def _flops_forward(tensors: list[Any], key: str, products: Any, **_: Any) -> int:
    call, rows = CALLS[key], math.prod(tensors[0][:-1])
    params, code = tensors[call.num_inputs :], _forward_code(call, products)
    return 2 * rows * sum(math.prod(params[number]) for number in code.gemms)


def _run_backward(
    dys: list[Any],
    products: list[Tensor],
    given: list[Any],
    key: str,
    there: list[bool],
    wanted: list[bool],
    donates: bool = False,
) -> list[Tensor]:
    call, kept = CALLS[key], iter(products)
    like = next(dy for dy in dys if dy is not None)
    spread = [next(kept) if flag else None for flag in there]
    named = dict(zip(names_of(call.program), given, strict=True))
    grads = backward(call, tuple(wanted), dys, like, spread, named, donates)
    for index, grad in enumerate(grads):
        grads[index] = _absent(like) if grad is None else grad.to(call.dtypes[index])
    return grads  # type: ignore[return-value]  # none is None


def _absent(like: Tensor) -> Tensor:
    return like.new_empty((0,) * ABSENT_DIMS)


def _run_donating(*args: Any) -> list[Tensor]:
    return _run_backward(*args, donates=True)


def _backward_code(call: Call, dys: Sequence[Any], there: Any, wanted: Any) -> Schedule:
    return call.backward(
        tuple(wanted), tuple(there), tuple([dy is not None for dy in dys]), donates=False
    )


def _fake_backward(
    dys: list[Any], products: Any, given: Any, key: str, there: Any, wanted: Any
) -> list[Tensor]:
    call, found = CALLS[key], list[Tensor]()
    like = next(dy for dy in dys if dy is not None)
    results = _backward_code(call, dys, there, wanted).results
    for i, (result, meta) in enumerate(zip(results, call.metas, strict=True)):
        if result is None:
            found.append(_absent(like))
            continue
        leading = like.shape[: -call.num_dims] if i < call.num_inputs else ()
        own = meta.shape[-call.num_dims :] if i < call.num_inputs else meta.shape
        found.append(like.new_empty((*leading, *own), dtype=meta.dtype))
    return found


def _flops_backward(
    dys: list[Any], products: Any, given: Any, key: str, there: Any, wanted: Any, **_: Any
) -> int:
    call = CALLS[key]
    rows = math.prod(next(dy for dy in dys if dy is not None)[:-1])
    code = _backward_code(call, dys, there, wanted)
    shapes = [call.metas[call.num_inputs + number].shape for number in code.gemms]
    return 2 * rows * sum(map(math.prod, shapes))


_forward_op = custom_op.define(
    "block(Tensor?[] tensors, str call, bool[] products) -> Tensor[]",
    _run_forward,
    _fake_forward,
    _flops_forward,
)
_BACKWARD = "Tensor?[] given, str call, bool[] there, bool[] wanted) -> Tensor[]"
_backward_op = custom_op.define(
    f"block_backward(Tensor?[] dys, Tensor[] products, {_BACKWARD}",
    _run_backward,
    _fake_backward,
    _flops_backward,
)
_donating_op = custom_op.define(
    f"block_backward_donating(Tensor?[] dys, Tensor(a!)[] products, {_BACKWARD}",
    _run_donating,
    _fake_backward,
    _flops_backward,
)
