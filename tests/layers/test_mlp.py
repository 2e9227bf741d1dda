"""mlp and gated_mlp: packed weights, chunks, kernels, levels."""

from functools import partial
from itertools import product

import pytest
import torch
from support import DEVICE, compare, gemms, launches, randn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import NormSpec, reference
from fusedckpt.autograd import dispatch
from fusedckpt.blocks.run import chunks_for, row_chunks
from fusedckpt.functional import gated_mlp, mlp
from fusedckpt.kernels.runtime import HAS_TRITON

T, D, F = 24, 16, 40
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
FUNCTIONS = {"mlp": mlp, "gated_mlp": gated_mlp}
# level -> GEMMs of forward, and of backward with its recomputation, where gate and up are packed
PACKED_GEMMS = {"inputs": (2, 5), "gate": (3, 7), "preact": (2, 4)}


def weights_of(name, out=D):
    """Draw x and weights."""
    biases = name == "mlp"
    found = [randn(T, D), randn(F, D), randn(F) if biases else randn(F, D), randn(out, F)]
    return [*(t.detach().div_(4).requires_grad_() for t in found), *[None] * biases]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("level", PACKED_GEMMS)
def test_packed_weights_are_two_in_one(level, bias, path):
    """In fewer GEMMs: gate and up are one wherever both are kept, or neither is."""
    shapes = (T, D), (2 * F, D), (D, F), *[(2 * F,)] * bias
    leaves = [(randn(*shape).detach() / 4).requires_grad_() for shape in shapes]

    def step(call):
        return torch.autograd.grad(call(*leaves).sum(), leaves)

    def call(x, packed, down, gate_bias=None):
        return gated_mlp(x, packed, None, down, gate_bias=gate_bias, save=level)

    def separate(x, packed, down, *bias):
        halves = (half for b in bias for half in b.chunk(2))
        given = dict(zip(("gate_bias", "up_bias"), halves, strict=False))
        return gated_mlp(x, *packed.chunk(2), down, **given, save=level)

    if path == "aten" and DEVICE.type == "cpu":
        forward, backward = PACKED_GEMMS[level]
        assert len(gemms(lambda: call(*leaves))) == forward
        assert len(gemms(lambda: step(call))) == forward + backward
    torch.testing.assert_close(step(call), step(separate))


@pytest.mark.parametrize("ours", [False, True])
def test_a_packed_block_is_recomputed_as_it_ran(ours):
    """At any level: that of `saving` counts where forward runs, not where backward does."""
    inputs = randn(T, D), randn(2 * F, D), randn(D, F)

    def call(x, packed, down):
        return gated_mlp(x, packed, None, down).sin()

    wrap = fusedckpt.checkpoint if ours else partial(checkpoint, use_reentrant=False)
    with fusedckpt.saving("gate"):
        y = wrap(call, *inputs)
    pair = (torch.autograd.grad(z.sum(), inputs) for z in (y, call(*inputs)))
    torch.testing.assert_close(*pair)


def test_default_chunks_come_from_shapes_alone():
    assert chunks_for(4096, 4096, 16384, 2, 2) == 1
    # 3 x 65536 x 14336 x 2 bytes are 11 times 512 MiB
    assert chunks_for(65536, 4096, 14336, 3, 2) == 11
    # cutting would save less than the accumulators take
    assert chunks_for(8192, 8192, 28672, 3, 2) == 1
    for rows, chunks in product((0, 1, 7, 24), (1, 2, 5, 30)):
        slices = row_chunks(rows, chunks)
        assert sum(len(range(rows)[s]) for s in slices) == rows
        assert 1 <= len(slices) <= chunks
    # chunks fill the tiles of a GEMM, but for the last
    assert [s.start for s in row_chunks(2000, 3)] == [0, 768, 1536]
    assert row_chunks(16384, 3)[0] == slice(0, 5504)


@needs_triton
@pytest.mark.parametrize("level", ["inputs", "preact"])
@pytest.mark.parametrize("kernel", ["split", "hybrid"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_launches_of_variants_that_agree_with_eager(name, kernel, level):
    function = FUNCTIONS[name]
    norm, twin = NormSpec("rms", randn(D)), getattr(reference, name)
    with launches() as forward:
        y = function(*weights_of(name), norm=norm, save=level, kernel=kernel)
    with launches() as backward:
        y.sum().backward()
    assert forward == {"norm_kernel": 1, "act_kernel": 1}
    grad = "gemm_kernel" if kernel == "hybrid" else "act_grad_kernel"
    # the second stage of the norm's weight's gradient, and of a bias's
    second = {"sum_partials_kernel": 2 if name == "mlp" else 1}
    assert backward == {"norm_kernel": 1, grad: 1, "norm_grad_kernel": 1} | second
    if kernel == "hybrid":
        for dtype in (torch.float32, torch.bfloat16, torch.float16):

            def inputs(dtype=dtype):
                drawn = weights_of(name)
                return [None if t is None else t.detach().to(dtype).requires_grad_() for t in drawn]

            compare(partial(function, save=level, kernel=kernel), twin, inputs)


def test_no_triton_no_hybrid():
    with dispatch.forced_path("aten"), pytest.raises(ValueError, match="'hybrid' needs Triton"):
        mlp(*weights_of("mlp"), kernel="hybrid")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_output_width(name):
    function = FUNCTIONS[name]
    compare(function, getattr(reference, name), lambda: weights_of(name, out=24), slack=3.0)
