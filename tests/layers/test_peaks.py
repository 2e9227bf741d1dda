"""The peaks of functions, of mlp and gated_mlp to the byte: all tensors at the worst moment."""

import sys

import pytest
import torch
from linear_calls import Dtypes, Operands, Sizes, function_of
from support import DEVICE, HALF, randn
from torch import nn

from fusedckpt.autograd import dispatch
from fusedckpt.functional import gated_mlp, layer_norm, rms_norm
from fusedckpt.kernels.runtime import BLOCK_ELEMENTS, column_sums
from fusedckpt.memory import peak_bytes

# F so wide that a norm's few D-wide temporaries never make the peak
T, D, F = 2048, 8, 512
WIDE = 4
# off a CPU a block is all rows
BLOCK = BLOCK_ELEMENTS if DEVICE.type == "cpu" else sys.maxsize


def forward_peak(gated, level, chunks, itemsize, has_norm):
    """Bytes above the start: y and what the level keeps, then the larger of two moments."""
    hidden = T // chunks * F
    n = T // chunks * D if has_norm else 0
    # a block of act(gate) before up meets it
    scratch = min(hidden, BLOCK) if gated else 0
    kept = {"inputs": 0, "preact": 2 if gated else 1}[level] * T * F
    # the GEMM outputs that are not kept; n is freed before h, which goes over one of them
    fresh = {"inputs": 2 if gated else 1, "preact": 0}[level] * hidden
    h = {"inputs": 0, "preact": hidden}[level]
    return itemsize * (T * D + kept + max(n + fresh, fresh + h + scratch))


def backward_peak(gated, level, chunks, itemsize, has_norm):
    """Bytes above the start: what is not kept is recomputed; all but dh is written over."""
    weights = 3 if gated else 2
    made = {"inputs": weights, "preact": 1}[level]
    hidden, n = T // chunks * F, T // chunks * D if has_norm else 0
    # gate, up and dh, which become dgate, h and dup in blocks; at preact z and dh become dz and h
    blocks = 2 if gated else int(level == "preact")
    scratch = blocks * itemsize * min(hidden, BLOCK)
    # one chunk's product is the gradient; several add up in float32 in place, but those of half
    # precision on a CPU by wide copies of a few rows, which take what the float32 sum does at most
    product = itemsize * D * F
    if chunks > 1:
        is_copied = itemsize < WIDE and DEVICE.type == "cpu"
        product = WIDE * (D + F) * (D * F // (D + F)) if is_copied else 0
    # in later chunks: the gradients so far, the norm's too, and dx in x's dtype
    wide = weights * D * F + (D if has_norm else 0)
    sums = 0 if chunks == 1 else WIDE * wide + itemsize * T * D
    return sums + itemsize * (n + made * hidden) + max(scratch, product)


@pytest.mark.parametrize(
    ("chunks", "norm", "dtype"),
    [
        (1, False, torch.float32),
        (1, True, torch.bfloat16),
        (2, True, torch.float32),
        (4, False, torch.bfloat16),
        (8, True, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["inputs", "preact"])
@pytest.mark.parametrize("gated", [False, True], ids=["mlp", "gated_mlp"])
def test_peaks(gated, level, chunks, norm, dtype):
    operands = Operands(Sizes(T, D, F, D, 1), Dtypes(dtype, dtype, dtype))
    x, spec = operands.x().requires_grad_(), operands.norm("rms" if norm else None)
    block = "gated_mlp" if gated else "mlp"
    call = function_of(block, spec, operands.linears(block, bias=False))
    inputs, found = operands.leaves, []

    def forward():
        found.append(call(x, save=level, chunks=chunks))

    # oneDNN's half-precision GEMMs take scratch of their own from the allocator
    with dispatch.forced_path("aten"), torch.backends.mkldnn.flags(enabled=False):
        if DEVICE.type == "cuda":
            # cuBLAS asks for its workspace once
            torch.autograd.grad(call(x), inputs, torch.ones_like(x))
        up = peak_bytes(forward, DEVICE)
        (y,) = found
        dy = torch.randn_like(y)
        down = peak_bytes(lambda: torch.autograd.grad(y, inputs, dy), DEVICE)
    forward_bytes = forward_peak(gated, level, chunks, dtype.itemsize, norm)
    backward_bytes = backward_peak(gated, level, chunks, dtype.itemsize, norm)
    # the input of the first GEMM, or a result, may be free by then
    spared = T * D * dtype.itemsize // chunks
    assert forward_bytes - spared <= up <= forward_bytes
    assert backward_bytes - spared <= down <= backward_bytes


@pytest.mark.skipif(DEVICE.type != "cpu", reason="off a CPU a block is all rows")
@pytest.mark.parametrize(("norm", "blocks"), [(layer_norm, 1), (rms_norm, 6)])
def test_norms_need_a_few_blocks_of_rows(norm, blocks):
    """Beside the results, however many rows there are: y, and dx with the weight's gradient."""
    n, block_bytes = 256, 4 * BLOCK_ELEMENTS
    x, weight = randn(8 * BLOCK_ELEMENTS // n, n), nn.Parameter(torch.ones(n))
    found = []
    with dispatch.forced_path("aten"):
        up = peak_bytes(lambda: found.append(norm(x, n, weight)), DEVICE)
        (y,) = found
        dy = torch.randn_like(y)
        down = peak_bytes(lambda: torch.autograd.grad(y, (x, weight), dy), DEVICE)
    assert x.nbytes <= up <= x.nbytes + blocks * block_bytes
    assert x.nbytes <= down <= x.nbytes + blocks * block_bytes


@pytest.mark.skipif(DEVICE.type != "cpu", reason="off a CPU a block is all rows")
@pytest.mark.parametrize("needs_dx", [True, False])
def test_a_layer_norm_in_half_precision_needs_a_block(needs_dx):
    """Its float32 temporaries together, as there are four and the gradient of half their size."""
    n, block_bytes = 256, 4 * BLOCK_ELEMENTS
    shape = 8 * BLOCK_ELEMENTS // n, n
    x = randn(*shape, dtype=torch.bfloat16, requires_grad=needs_dx)
    weight = nn.Parameter(torch.ones(n, dtype=x.dtype))
    wanted = (x, weight) if needs_dx else (weight,)
    with dispatch.forced_path("aten"):
        y = layer_norm(x, n, weight)
        dy = torch.randn_like(y)
        peak = peak_bytes(lambda: torch.autograd.grad(y, wanted, dy), DEVICE)
    assert peak <= needs_dx * x.nbytes + 1.5 * block_bytes


@pytest.mark.skipif(DEVICE.type != "cpu", reason="torch's own LayerNorm runs on a CPU")
def test_gradients_of_a_norms_vectors_need_no_rows():
    """Where the input needs no gradient, as that of a patch embedding, no row is made again."""
    n = 256
    x = randn(512, n, requires_grad=False)
    weight, bias = vectors = nn.Parameter(randn(n)), nn.Parameter(randn(n))
    with dispatch.forced_path("aten"):
        y = layer_norm(x, n, weight, bias)
        dy = torch.randn_like(y)
        ours = []
        peak = peak_bytes(lambda: ours.extend(torch.autograd.grad(y, vectors, dy)), DEVICE)
    eager = torch.autograd.grad(nn.functional.layer_norm(x, (n,), weight, bias), vectors, dy)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert peak < x.nbytes // 8


def test_sums_are_rounded_one_after_the_other():
    """Float32 sums and the gradients that they are rounded to are never all there."""
    size = 128
    x, *weights = (randn(size, size, dtype=torch.bfloat16).detach() for _ in range(4))
    leaves = [t.requires_grad_() for t in (x[:4].clone(), *weights)]
    with dispatch.forced_path("aten"), torch.backends.mkldnn.flags(enabled=False):
        y = gated_mlp(*leaves, chunks=2)
        dy = torch.ones_like(y)
        peak = peak_bytes(lambda: torch.autograd.grad(y, leaves, dy), DEVICE)
    sums, rounded = 3 * WIDE * size**2, torch.bfloat16.itemsize * size**2
    # and a little for four rows
    assert sums <= peak <= sums + 1.5 * rounded


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_of_half_precision_copy_a_block_of_rows(dtype):
    """Not all of x in float32, twice as large as x. A GPU's reduction has buffers of its own."""
    x = randn(8 * BLOCK_ELEMENTS // F + 3, F, dtype=dtype, requires_grad=False)
    found = []
    peak = peak_bytes(lambda: found.append(column_sums(x)), DEVICE)
    if DEVICE.type == "cpu":
        assert peak <= 4 * BLOCK_ELEMENTS + 3 * 4 * F
    assert x.nbytes >= 16 * BLOCK_ELEMENTS
    truth = x.double().sum(0)
    error, eager = (t.sub(truth).norm() for t in (found[0], x.sum(0, dtype=torch.float32)))
    assert error <= 2 * eager + 8 * torch.finfo(torch.float32).eps * truth.norm()
