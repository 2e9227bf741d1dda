"""How high functions climb, mlp and gated_mlp to the byte: every tensor at the worst moment."""

import pytest
import torch
from support import DEVICE, HALF, randn
from torch import nn

from fusedckpt import NormSpec
from fusedckpt.autograd import dispatch
from fusedckpt.functional import gated_mlp, layer_norm, mlp, rms_norm
from fusedckpt.kernels.runtime import BLOCK_ELEMENTS, column_sums
from fusedckpt.memory import peak_bytes

# F so wide that a norm's few D-wide temporaries never make the peak
T, D, F = 2048, 8, 512
WIDE = 4
# of the tens of tensors alive at once, on CUDA
ROUNDING = 64 * 512


def forward_peak(gated, level, chunks, itemsize, has_norm):
    """Bytes above the start: y and what the level keeps, then the larger of two moments."""
    hidden = T // chunks * F
    n = T // chunks * D if has_norm else 0
    # a block of act(gate) before up meets it
    scratch = min(hidden, BLOCK_ELEMENTS) if gated else 0
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
    scratch = blocks * itemsize * min(hidden, BLOCK_ELEMENTS)
    # one chunk's product is the gradient; several add up in float32 in place, those of half
    # precision by way of wide copies of a few rows, which take what the float32 sum does at most
    product = itemsize * D * F
    if chunks > 1:
        product = 0 if itemsize == WIDE else WIDE * (D + F) * (D * F // (D + F))
    # in later chunks: the gradients so far, the norm's too, and dx in x's dtype
    wide = weights * D * F + (D if has_norm else 0)
    sums = 0 if chunks == 1 else WIDE * wide + itemsize * T * D
    return sums + itemsize * (n + made * hidden) + max(scratch, product)


def leaves(gated, dtype, norm):
    shapes = [(F, D), (F, D), (D, F)] if gated else [(F, D), (D, F)]
    weights = [nn.Parameter(randn(*shape, dtype=dtype).detach() / 4) for shape in shapes]
    given = (
        NormSpec("rms", nn.Parameter(torch.ones(D, dtype=dtype, device=DEVICE))) if norm else None
    )
    x = randn(T, D, dtype=dtype)

    def call(**options):
        if gated:
            return gated_mlp(x, *weights, norm=given, **options)
        return mlp(x, weights[0], None, weights[1], None, norm=given, **options)

    return call, [x, *weights, *([given.weight] if given else [])]


@pytest.mark.parametrize("dtype", [torch.float32, HALF[0]], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("level", ["inputs", "preact"])
@pytest.mark.parametrize("gated", [False, True], ids=["mlp", "gated_mlp"])
def test_peaks(gated, level, chunks, norm, dtype):
    call, inputs = leaves(gated, dtype, norm)
    found = []

    def forward():
        found.append(call(save=level, chunks=chunks))

    # oneDNN's half-precision GEMMs take scratch of their own from the allocator
    with dispatch.forced_path("aten"), torch.backends.mkldnn.flags(enabled=False):
        if DEVICE.type == "cuda":
            # cuBLAS asks for its workspace once
            torch.autograd.grad(call(), inputs, torch.ones_like(inputs[0]))
        up = peak_bytes(forward, DEVICE)
        (y,) = found
        dy = torch.randn_like(y)
        down = peak_bytes(lambda: torch.autograd.grad(y, inputs, dy), DEVICE)
    forward_bytes = forward_peak(gated, level, chunks, dtype.itemsize, norm)
    backward_bytes = backward_peak(gated, level, chunks, dtype.itemsize, norm)
    if DEVICE.type == "cpu":
        # the input of the first GEMM, or a result, may be free by then
        spared = T * D * dtype.itemsize // chunks
        assert forward_bytes - spared <= up <= forward_bytes
        assert backward_bytes - spared <= down <= backward_bytes
    else:
        # off a CPU a block is all rows, and every tensor is rounded up to 512 bytes
        rows = dtype.itemsize * T // chunks * F * gated
        assert up <= forward_bytes + rows + ROUNDING
        assert down <= backward_bytes + 2 * rows + ROUNDING


@pytest.mark.skipif(DEVICE.type != "cpu", reason="off a CPU a block is all rows")
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("level", ["inputs", "preact"])
def test_packed_weights_climb_as_high(level, chunks):
    """But that h is never written over half of a row; and their gradient is made as one."""
    x, packed, down = randn(T, D), nn.Parameter(randn(2 * F, D) / 4), nn.Parameter(randn(D, F) / 4)
    found = []
    with dispatch.forced_path("aten"):

        def forward():
            found.append(gated_mlp(x, packed, None, down, save=level, chunks=chunks))

        up = peak_bytes(forward, DEVICE)
        (y,) = found
        dy = torch.randn_like(y)
        peak = peak_bytes(lambda: torch.autograd.grad(y, (x, packed, down), dy), DEVICE)
    h = WIDE * T // chunks * F if level == "inputs" else 0
    spared = T * D * WIDE // chunks
    forward_bytes = forward_peak(True, level, chunks, WIDE, False) + h
    assert forward_bytes - spared <= up <= forward_bytes
    backward_bytes = backward_peak(True, level, chunks, WIDE, False)
    assert backward_bytes - spared <= peak <= backward_bytes
    # weights that outweigh the rest: their gradients, and what is as wide as a row
    x, dy, wide = randn(2, 256), randn(2, 256, requires_grad=False), 256 * F * WIDE
    weights = nn.Parameter(randn(2 * F, 256) / 16), nn.Parameter(randn(256, F) / 16)
    with dispatch.forced_path("aten"):
        y = gated_mlp(x, weights[0], None, weights[1], save=level)
        peak = peak_bytes(lambda: torch.autograd.grad(y, (x, *weights), dy), DEVICE)
    assert 3 * wide <= peak <= 3.1 * wide


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
    """Not all of x in float32, twice as large as x."""
    x = randn(8 * BLOCK_ELEMENTS // F + 3, F, dtype=dtype, requires_grad=False)
    found = []
    peak = peak_bytes(lambda: found.append(column_sums(x)), DEVICE)
    assert peak <= 4 * BLOCK_ELEMENTS + 3 * 4 * F + ROUNDING
    assert x.nbytes >= 16 * BLOCK_ELEMENTS
    truth = x.double().sum(0)
    error, eager = (t.sub(truth).norm() for t in (found[0], x.sum(0, dtype=torch.float32)))
    assert error <= 2 * eager + 8 * torch.finfo(torch.float32).eps * truth.norm()
