"""The peaks of forward and backward of each block, as upper bounds in F-wide tensors.

Peaks are bytes above the start of a pass, in tensors [T, F]. Chunks divide all but the tensors that
forward saves. F is so large that the norm, the residual, the weights and their gradients lie within
the margin. Peaks with biases are not here: in half precision ATen widens what it sums.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from linear_calls import LINEARS, MLPS, SAME, Operands, Sizes, function_of
from support import DEVICE

from fusedckpt.kernels import runtime
from fusedckpt.memory import peak_bytes

pytestmark = [
    pytest.mark.usefixtures("on_aten"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="off a CPU elementwise code takes all rows"),
]

SIZES = Sizes(T=2048, D=4, F=512, OUT=4, R=1)
# on a CPU elementwise code takes as many elements at a time: here, as few as rows are small
SCRATCH_ELEMENTS = 1 << 16
# in D-wide tensors
MARGIN = 6


class Peak(NamedTuple):
    """In F-wide tensors: what forward saves, and the peaks of forward and of backward beside it.

    The last two are counts of scratch, of SCRATCH_ELEMENTS each, in forward and in backward.
    """

    saved: int
    forward: int
    backward: int
    forward_scratch: float = 1
    backward_scratch: float = 2


LINEAR = {"inputs": Peak(0, 1, 1, 0, 1), "preact": Peak(1, 1, 0, 0, 1)}
MLP = {"inputs": Peak(0, 1, 2, 0, 0), "preact": Peak(1, 1, 1, 0, 1)}
FROZEN_MLP = MLP | {"preact": Peak(1, 1, 1, 0, 0)}
GATED = {"inputs": Peak(0, 2, 3), "gate": Peak(1, 1, 2), "preact": Peak(2, 1, 1)}
# h is not written over half of a row that has both gate and up
PACKED = GATED | {"inputs": Peak(0, 3, 3)}
# the draws of a dropout are scratch
DROPPED_MLP = {"inputs": Peak(0, 2, 3, 1.25, 1.25), "preact": Peak(1, 2, 2, 1.25, 1.25)}
DROPPED = {
    "inputs": Peak(0, 2, 4, 1.25, 1.25),
    "gate": Peak(1, 2, 3, 1.25, 1.25),
    "preact": Peak(2, 2, 2, 1.25, 1.25),
}
# a dropout of the last linear's adapter drops h again, beside h and dh
DROPPED_ADAPTERS = {
    "inputs": Peak(0, 2, 5, 1.25, 1.25),
    "gate": Peak(1, 2, 4, 1.25, 1.25),
    "preact": Peak(2, 2, 3, 1.25, 1.25),
}
# a block, the kind of its linears as in linear_calls, and the dropout of the hidden layer
PEAKS = {
    ("linear_act", "dense", 0.0): LINEAR,
    ("linear_act", "frozen", 0.0): LINEAR,
    ("linear_act", "frozen+a", 0.0): LINEAR,
    ("mlp", "dense", 0.0): MLP,
    ("mlp", "frozen", 0.0): FROZEN_MLP,
    ("mlp", "frozen+a", 0.0): MLP,
    ("mlp", "dense", 0.1): DROPPED_MLP,
    ("gated_mlp", "dense", 0.0): GATED,
    ("gated_mlp", "frozen", 0.0): GATED,
    ("gated_mlp", "dense+a", 0.0): GATED,
    ("gated_mlp", "frozen+a", 0.0): GATED,
    ("gated_mlp", "quantized", 0.0): GATED,
    ("gated_mlp", "quantized+a", 0.0): GATED,
    ("gated_mlp", "frozen+d", 0.0): DROPPED_ADAPTERS,
    ("gated_mlp", "dense", 0.1): DROPPED,
    ("packed", "dense", 0.0): PACKED,
    ("packed", "frozen", 0.0): PACKED,
    ("packed", "frozen+a", 0.0): GATED,
    ("packed", "dense", 0.1): DROPPED,
}
HALF = [
    ("packed", "dense", 0.0, "inputs", 4),
    ("gated_mlp", "quantized+a", 0.0, "preact", 4),
]
CASES = [
    (dtype, *key, level, chunks)
    for key, levels in PEAKS.items()
    for level in levels
    for chunks in ((1, 4) if key[0] in MLPS else (None,))
    for dtype in ("float32", "bfloat16")
    # test_peaks.py has other blocks in half precision, to the byte
    if dtype == "float32" or (*key, level, chunks) in HALF
]


def peaks(
    dtype: str, block: str, kind: str, dropout: float, level: str, chunks: int | None
) -> tuple[float, float]:
    """Return the peaks of forward and of backward in F-wide tensors."""
    operands = Operands(SIZES, SAME[dtype])
    x, norm = operands.x(), operands.norm("layer" if chunks else None)
    linears = operands.linears(block, [kind] * len(LINEARS[block]), bias=False)
    function = function_of(block, norm, linears)
    options = {"chunks": chunks, "residual": True} if chunks else {}
    options |= {"dropout": dropout} if dropout else {}
    is_frozen = not kind.startswith("dense")
    for leaf, role in zip(operands.leaves, operands.roles, strict=True):
        leaf.requires_grad_(not (is_frozen and role.startswith("norm")))
    wanted = [leaf for leaf in operands.leaves if leaf.requires_grad]
    found = []
    # oneDNN's half-precision GEMMs take scratch of their own from the allocator
    with torch.backends.mkldnn.flags(enabled=False):
        up = peak_bytes(lambda: found.append(function(x, save=level, **options)))
        (y,) = found
        dy = torch.randn_like(y)
        down = peak_bytes(lambda: torch.autograd.grad(y, wanted, dy))
    nbytes = SIZES.T * SIZES.F * y.element_size()
    return up / nbytes, down / nbytes


@pytest.mark.parametrize(("dtype", "block", "kind", "dropout", "level", "chunks"), CASES)
def test_no_peak_is_above_the_table(dtype, block, kind, dropout, level, chunks, monkeypatch):
    monkeypatch.setattr(runtime, "BLOCK_ELEMENTS", SCRATCH_ELEMENTS)
    peak = PEAKS[block, kind, dropout][level]
    scratch, margin = SCRATCH_ELEMENTS / (SIZES.T * SIZES.F), MARGIN * SIZES.D / SIZES.F
    up, down = peaks(dtype, block, kind, dropout, level, chunks)
    chunks = chunks or 1
    assert up <= peak.saved + peak.forward / chunks + peak.forward_scratch * scratch + margin
    assert down <= peak.backward / chunks + peak.backward_scratch * scratch + margin
