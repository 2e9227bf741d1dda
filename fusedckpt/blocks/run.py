"""A block's schedules at work, on one chunk of rows after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fusedckpt.blocks.schedule import Schedule

# above this many bytes of F-wide temporaries the rows are cut into chunks, if that pays
CHUNK_BYTES = 512 << 20
# rows of a GEMM's tile, which a chunk fills
CHUNK_STEP = 128


def chunks_for(rows: int, d: int, f: int, num_tensors: int, itemsize: int) -> int:
    """Return into how many chunks rows are cut, from shapes alone.

    One, unless `num_tensors` F-wide temporaries pass CHUNK_BYTES and cutting them saves more than
    the float32 accumulators of the weight gradients take: rows (1 - 1 / chunks) > 2 d.
    """
    chunks = max(1, math.ceil(num_tensors * rows * f * itemsize / CHUNK_BYTES))
    return chunks if rows * (1 - 1 / chunks) > 2 * d else 1


def row_chunks(rows: int, chunks: int) -> list[slice]:
    """Cut rows into at most `chunks` slices of nearly equal size, long ones by CHUNK_STEP."""
    if chunks == 1:
        return [slice(0, rows)]
    step = max(1, math.ceil(rows / chunks))
    if step > CHUNK_STEP:
        step = math.ceil(step / CHUNK_STEP) * CHUNK_STEP
    return [slice(start, start + step) for start in range(0, max(rows, 1), step)]


def forward(
    code: Schedule, given: Mapping[Any, Any], homes: Sequence[Tensor], chunks: int
) -> list[Tensor]:
    """Fill `homes`, the places of all rows, chunk by chunk.

    given: by kind and name, rows of the inputs and parameters.
    """
    places = dict(zip([("home", name) for name in code.results], homes, strict=True))
    sliced = [key[0] in ("value", "home") for key in code.given]
    tensors = [given[key] if key in given else places[key] for key in code.given]
    for rows in row_chunks(homes[0].shape[0], chunks):
        pairs = zip(tensors, sliced, strict=True)
        code.run(rows.start, *[t[rows] if cut else t for t, cut in pairs])
    return list(homes)


def backward(
    code: Schedule,
    given: Mapping[Any, Any],
    dtypes: Sequence[Any],
    num_rows: int,
    chunks: int,
) -> list[Tensor | None]:
    """Return the gradients of inputs, on rows, of these dtypes; and of parameters, summed."""
    num_inputs = len(dtypes)
    grads: list[Any] = [None] * len(code.results)
    for rows in row_chunks(num_rows, chunks):
        args = []
        for kind, name in code.given:
            if kind == "sum":
                args.append(grads[num_inputs + name])
            else:
                t = given[kind, name]
                args.append(t if kind == "param" else t[rows])
        found = list(code.run(rows.start, *args))
        # before the next chunk asks for as much
        del args
        for index in range(num_inputs):
            if found[index] is not None:
                if grads[index] is None:
                    shape = num_rows, found[index].shape[1]
                    grads[index] = found[index].new_empty(shape, dtype=dtypes[index])
                grads[index][rows] = found[index]
        grads[num_inputs:] = found[num_inputs:]
        del found
    return grads
