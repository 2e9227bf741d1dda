"""A layer's schedules at work, on tensors of any shape, one chunk of rows after another."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.private import below
from fusedckpt.blocks.call import LayerCall
from fusedckpt.blocks.late import computed
from fusedckpt.blocks.writer import Flags, Schedule
from fusedckpt.kernels.runtime import as_matrix

# above this many bytes of F-wide temporaries the rows are cut into chunks, if that pays
CHUNK_BYTES = 512 << 20
# rows of a GEMM's tile, which a chunk fills
CHUNK_STEP = 128
# whether a value is not None, without a call of Python's
IS_PRESENT = partial(operator.is_not, None)


def chunks_for(rows: int, d: int, f: int, num_tensors: int, itemsize: int) -> int:
    """Return into how many chunks rows are cut, from shapes alone.

    One, unless `num_tensors` F-wide temporaries pass CHUNK_BYTES and cutting them saves more than
    the float32 accumulators of the weight gradients take: rows (1 - 1 / chunks) > 2 d.
    """
    width = num_tensors * f * itemsize
    return cut_for(rows * width, 2 * d * width)


def cut_for(nbytes: int, sums: int) -> int:
    """Return into how many chunks temporaries are cut, where that saves more than the sums take."""
    chunks = max(1, math.ceil(nbytes / CHUNK_BYTES))
    return chunks if nbytes * (1 - 1 / chunks) > sums else 1


def row_chunks(rows: int, chunks: int) -> list[slice]:
    """Cut rows into at most `chunks` slices of nearly equal size, long ones by CHUNK_STEP."""
    if chunks == 1:
        return [slice(0, rows)]
    step = max(1, math.ceil(rows / chunks))
    if step > CHUNK_STEP:
        step = math.ceil(step / CHUNK_STEP) * CHUNK_STEP
    return [slice(start, start + step) for start in range(0, max(rows, 1), step)]


def forward(call: LayerCall, code: Schedule, tensors: Sequence[Any]) -> list[Tensor]:
    """Return the results of inputs and parameters, then the products that the schedule gives."""
    x = tensors[0]
    operands = dict(zip(call.names, tensors, strict=True))
    with below():
        if call.chunks == 1:
            results = list(code.run(0, *_arguments(call, code, operands)))
        else:
            num_rows = math.prod(x.shape[: -call.num_dims])
            sizes = map(call.described.__getitem__, code.results)
            results = [x.new_empty(num_rows, width, dtype=dtype) for width, dtype in sizes]
            buffers = dict(zip(code.results, results, strict=True))
            args = _arguments(call, code, operands, buffers=buffers)
            for rows in row_chunks(num_rows, call.chunks):
                code.run(rows.start, *_cut(code, args, rows))
        dims = x.dim()
        if dims == 2 and call.num_dims == 1:
            return results
        if dims == 1 and x.dtype is torch.int8:
            # x in nine bits, which has no shape
            shape = call.metas[0].shape
            return [y.view(call.shape(shape, y.shape[1])) for y in results]
        # below autograd, too, which refuses to write a view that a Function returns
        return [_in_shape(call, y, x) for y in results]


def backward(
    call: LayerCall,
    wanted: Flags,
    dys: Sequence[Tensor | None],
    like: Tensor,
    saved: Mapping[Any, Any],
    donates: bool = False,
    leaves_late: bool = False,
    totals: Mapping[int, Tensor] | None = None,
) -> list[Any]:
    """Return the gradients of inputs and parameters.

    like: one of dys; saved: the saved tensors, parameters by number, values by name; donates:
    whether the products may be written over; leaves_late: whether late gradients are returned as
    they are, to be computed by the caller; totals: existing gradients, by place among these, which
    are added to and returned. With totals, also empty ones, gradients of parameters are at least
    float32.
    """
    results = call.program.results
    products = tuple(map(IS_PRESENT, map(saved.get, call.program.gemm_outputs)))
    has_beside = bool(call.program.saved_beside) and call.has_beside(saved)
    has_dys = tuple(map(IS_PRESENT, dys))
    code = call.backward(wanted, products, has_dys, donates, has_beside, totals is not None)
    with below():
        args = _arguments(call, code, saved, dys, totals=totals)
        if call.chunks == 1:
            grads = list(code.run(0, *args))
        else:
            grads = _backward_in_chunks(call, code, args, math.prod(like.shape[: -call.num_dims]))
        if call.late and not leaves_late:
            grads = computed(grads)
        if like.dim() == 2 and call.num_dims == 1:
            return grads
        pairs = zip(code.arguments, args, strict=True)
        whole = {id(arg): dys[results.index(key)] for (kind, key), arg in pairs if kind == "dy"}
        return _shaped(call, like, grads, whole)


def _arguments(
    call: LayerCall,
    code: Schedule,
    operands: Mapping[Any, Any],
    dys: Sequence[Tensor | None] = (),
    buffers: Mapping[str, Tensor] | None = None,
    totals: Mapping[int, Tensor] | None = None,
) -> list[Any]:
    """Return the arguments of a schedule: matrices of rows, parameters as kernels take them."""
    args = []
    program = call.program
    one_row = call.num_dims == 1
    for kind, key in code.arguments:
        if kind == "param":
            args.append(call.layouts[key].of(operands[key]))
        elif kind == "buffer" and buffers is not None:
            args.append(buffers[key])
        elif kind == "sum":
            # a gradient of a norm over several dimensions is made flat
            args.append(totals.get(call.num_inputs + key) if totals and one_row else None)
        else:
            rows: Any = operands[key] if kind == "value" else dys[program.results.index(key)]
            dims = rows.dim()
            if dims == 1:
                rows = call.rows_of(key, rows)
            elif not (one_row and dims == 2 and rows.stride(1) == 1):
                rows = as_matrix(rows, call.num_dims)
            # elementwise kernels read products, which hooks may have laid out otherwise
            args.append(rows.contiguous() if key in program.gemm_outputs else rows)
    return args


def _cut(code: Schedule, args: Sequence[Any], rows: slice) -> Iterator[Any]:
    """Return arguments for a chunk of rows."""
    whole = ("param", "sum")
    return (
        arg if kind in whole else arg[rows]
        for (kind, _), arg in zip(code.arguments, args, strict=True)
    )


def _backward_in_chunks(
    call: LayerCall, code: Schedule, args: list[Any], num_rows: int
) -> list[Tensor | None]:
    """Return the gradients of inputs, on rows; and of parameters, summed over chunks."""
    count = call.num_inputs
    sums = [(i, count + key) for i, (kind, key) in enumerate(code.arguments) if kind == "sum"]
    grads: list[Any] = [None] * len(code.results)
    for i, index in sums:
        grads[index] = args[i]
    for rows in row_chunks(num_rows, call.chunks):
        for i, index in sums:
            args[i] = grads[index]
        of_chunk = list(code.run(rows.start, *_cut(code, args, rows)))
        for i in range(count):
            if of_chunk[i] is not None:
                if grads[i] is None:
                    shape = num_rows, of_chunk[i].shape[1]
                    grads[i] = of_chunk[i].new_empty(shape, dtype=call.dtypes[i])
                grads[i][rows] = of_chunk[i]
        grads[count:] = of_chunk[count:]
        # before the next chunk asks for as much
        del of_chunk
    return grads


def _shaped(
    call: LayerCall, like: Tensor, grads: list[Tensor | None], whole: dict[int, Tensor | None]
) -> list[Tensor | None]:
    """Return gradients of rows in the shapes of their tensors; whole: dys, by id of rows."""
    # one tensor for each: autograd adds in place to a view that only it holds, also to a view of
    # an incoming gradient, or to one of two views of the gradient that a sum's inputs share
    for i, grad in enumerate(grads):
        if grad is not None and i < call.num_inputs:
            grads[i] = whole.setdefault(id(grad), _in_shape(call, grad, like))
        elif grad is not None and call.num_dims > 1:
            grads[i] = grad.view(like.shape[-call.num_dims :])
    return grads


def _in_shape(call: LayerCall, rows: Tensor, like: Tensor) -> Tensor:
    """Return rows in the shape of a result or gradient beside one that is `like`."""
    if call.num_dims > 1 or rows.shape[1] == like.shape[-1]:
        # a third of the time of a view by sizes
        return rows.view_as(like)
    return rows.view(call.shape(like.shape, rows.shape[1]))
