"""mlp, gated_mlp and norm_linear: bytes and FLOPs exactly, variants, chunks, bad input."""

from functools import partial
from itertools import product

import pytest
import torch
from support import DEVICE, compare, flops, gemm_flops, gemms, launches, randn, saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import NormSpec, reference
from fusedckpt.autograd import dispatch
from fusedckpt.blocks.run import chunks_for, row_chunks
from fusedckpt.functional import gated_mlp, mlp, norm_linear
from fusedckpt.kernels.runtime import HAS_TRITON

T, D, F = 24, 16, 40
GEMM = 2 * T * D * F
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def parameter(*shape, requires_grad=True):
    return nn.Parameter(randn(*shape).detach() / 4, requires_grad=requires_grad)


def plain(mask=(True,) * 5, norm=None):
    """x and the keyword arguments of mlp."""
    x_grad, *rest = mask
    shapes = {"fc1_weight": (F, D), "fc1_bias": (F,), "fc2_weight": (D, F), "fc2_bias": (D,)}
    weights = {
        key: parameter(*shape, requires_grad=need)
        for (key, shape), need in zip(shapes.items(), rest, strict=True)
    }
    return randn(T, D, requires_grad=x_grad), weights | {"norm": norm}


def gated(mask=(True,) * 4, norm=None):
    """x and the keyword arguments of gated_mlp."""
    x_grad, *rest = mask
    shapes = {"gate_weight": (F, D), "up_weight": (F, D), "down_weight": (D, F)}
    weights = {
        key: parameter(*shape, requires_grad=need)
        for (key, shape), need in zip(shapes.items(), rest, strict=True)
    }
    return randn(T, D, requires_grad=x_grad), weights | {"norm": norm}


def spec(name, requires_grad=True):
    if name is None:
        return None
    weight = parameter(D, requires_grad=requires_grad)
    bias = parameter(D, requires_grad=requires_grad) if name == "layer" else None
    return NormSpec(name, weight, bias)


# level -> elements kept per token, extra GEMMs
CONTRACT = {
    "mlp": (mlp, plain, {"inputs": (D, 1), "preact": (D + F, 0)}),
    "gated_mlp": (
        gated_mlp,
        gated,
        {"inputs": (D, 2), "gate": (D + F, 1), "preact": (D + 2 * F, 0)},
    ),
}
LEVELS = [(name, level) for name, (_, _, table) in CONTRACT.items() for level in table]


@pytest.mark.parametrize("norm", [None, "rms", "layer"])
@pytest.mark.parametrize(("name", "level"), LEVELS)
@pytest.mark.parametrize("residual", [False, True])
def test_the_table(name, level, norm, residual, path):
    """What a level keeps and recomputes with everything trainable, with and without the norm."""
    function, make, table = CONTRACT[name]
    x, weights = make(norm=spec(norm))
    kept, extra = table[level]
    gemms = 2 if name == "mlp" else 3

    def call(x):
        return function(x, **weights, residual=residual, save=level)

    assert saved_bytes(call, [x]) == 4 * T * kept
    assert flops(lambda: call(x).sum().backward()) == GEMM * (3 * gemms + extra)


@pytest.mark.parametrize("norm", [None, "rms"])
@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_frozen_parts_keep_and_run_no_more_than_they_need(name, level, norm):
    """Every mask: the FLOP formula is what the CPU runs, and no tensor is kept for nothing."""
    function, make, _ = CONTRACT[name]
    num = 5 if name == "mlp" else 4
    with dispatch.forced_path("aten"):
        for mask in list(product((False, True), repeat=num))[1:]:
            x, weights = make(mask, spec(norm, requires_grad=mask[0]))
            x_grad, *rest = mask
            first = rest[:2]
            down = rest[2]
            reads_hidden = x_grad or any(first) or down
            z = {"inputs": 0, "gate": 1, "preact": 1 if name == "mlp" else 2}[level]
            recomputes = z < (1 if name == "mlp" else 2)
            weight_grads = rest[0] or (name == "gated_mlp" and rest[1])
            reads_x = recomputes or weight_grads or (norm is not None and x_grad)
            expected = 4 * T * (D * reads_x + F * z) if reads_hidden else 0

            def call(x, weights=weights):
                return function(x, **weights, save=level)

            assert saved_bytes(call, [x]) == expected, mask
            if DEVICE.type == "cpu":

                def step(call=call, x=x):
                    call(x).sum().backward()

                assert flops(step) == gemm_flops(step), mask


# level -> GEMMs of forward, and of backward with its recomputation, where gate and up are packed
PACKED_GEMMS = {"inputs": (2, 5), "gate": (3, 7), "preact": (2, 4)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("level", PACKED_GEMMS)
def test_packed_weights_keep_what_separate_ones_do(level, bias, path):
    """In fewer GEMMs: gate and up are one wherever both are kept, or neither is."""
    x, packed, down = randn(T, D), parameter(2 * F, D), parameter(D, F)
    biases = [parameter(2 * F)] if bias else []
    kept, extra = CONTRACT["gated_mlp"][2][level]

    def call(x):
        given = {"gate_bias": biases[0]} if bias else {}
        return gated_mlp(x, packed, None, down, **given, save=level)

    def step():
        return torch.autograd.grad(call(x).sum(), [x, packed, down, *biases])

    assert saved_bytes(call, [x]) == 4 * T * kept
    assert flops(step) == GEMM * (9 + extra)
    if path == "aten" and DEVICE.type == "cpu":
        forward, backward = PACKED_GEMMS[level]
        assert len(gemms(lambda: call(x))) == forward
        assert len(gemms(step)) == forward + backward
    gate, up = packed.detach().chunk(2)
    halves = [t.detach().clone().requires_grad_() for t in biases for t in t.chunk(2)]
    separate = [x, *(t.clone().requires_grad_() for t in (gate, up)), down, *halves]
    given = dict(zip(("gate_bias", "up_bias"), halves, strict=False))
    y = gated_mlp(*separate[:4], **given, save=level)
    dx, dgate, dup, ddown, *dbs = torch.autograd.grad(y.sum(), separate)
    found = [dx, torch.cat([dgate, dup]), ddown, *([torch.cat(dbs)] if bias else [])]
    for mine, other in zip(step(), found, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("ours", [False, True])
def test_a_packed_block_is_recomputed_as_it_ran(ours):
    """At any level: that of `saving` counts where forward runs, not where backward does."""
    inputs = randn(T, D), parameter(2 * F, D), parameter(D, F)

    def call(x, packed, down):
        return gated_mlp(x, packed, None, down).sin()

    wrap = fusedckpt.checkpoint if ours else partial(checkpoint, use_reentrant=False)
    with fusedckpt.saving("gate"):
        y = wrap(call, *inputs)
    found, expected = (torch.autograd.grad(z.sum(), inputs) for z in (y, call(*inputs)))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("level", PACKED_GEMMS)
def test_frozen_parts_of_a_packed_block(level):
    """Every mask: the FLOP formula is what the CPU runs, and no tensor is kept for nothing."""
    z = {"inputs": 0, "gate": 1, "preact": 2}[level]
    with dispatch.forced_path("aten"):
        for mask in list(product((False, True), repeat=4))[1:]:
            x_grad, first, bias, last = mask
            x = randn(T, D, requires_grad=x_grad)
            packed, down = (
                parameter(*s, requires_grad=g) for s, g in (((2 * F, D), first), ((D, F), last))
            )
            both = parameter(2 * F, requires_grad=bias)

            def call(x, packed=packed, both=both, down=down):
                return gated_mlp(x, packed, None, down, gate_bias=both, save=level)

            def step(call=call, x=x):
                call(x).sum().backward()

            assert saved_bytes(call, [x]) == 4 * T * (D * (z < 2 or first) + F * z), mask
            gradients = 2 * x_grad + 2 * first + last + (x_grad or first or bias)
            assert flops(step) == GEMM * (3 + (2 - z) + gradients), mask
            if DEVICE.type == "cpu":
                assert flops(step) == gemm_flops(step), mask


def test_autocast_keeps_the_half_precision_input():
    x, weights = gated()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert saved_bytes(lambda x: gated_mlp(x, **weights), [x]) == 2 * T * D
        x, weights = gated(norm=spec("rms"))
        # a norm reads x as it is
        assert saved_bytes(lambda x: gated_mlp(x, **weights), [x]) == 4 * T * D


def test_norm_linear_keeps_x_alone():
    x, norm = randn(T, D), spec("rms")
    weights, biases = [parameter(n, D) for n in (24, 8, 8)], [parameter(24), None, parameter(8)]

    def call(x):
        return norm_linear(x, norm, weights, biases)

    assert saved_bytes(call, [x]) == 4 * T * D
    gemms = 2 * T * D * (24 + 8 + 8)
    assert flops(lambda: sum(y.sum() for y in call(x)).backward()) == 3 * gemms


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
@pytest.mark.parametrize("name", CONTRACT)
def test_launches(name, kernel, level):
    function, make, _ = CONTRACT[name]
    x, weights = make(norm=spec("rms"))
    with launches() as forward:
        y = function(x, **weights, save=level, kernel=kernel)
    with launches() as backward:
        y.sum().backward()
    assert forward == {"norm_kernel": 1, "act_kernel": 1}
    grad = "gemm_kernel" if kernel == "hybrid" else "act_grad_kernel"
    # the second stage of the norm's weight's gradient, and of a bias's
    second = {"sum_partials_kernel": 2 if name == "mlp" else 1}
    assert backward == {"norm_kernel": 1, grad: 1, "norm_grad_kernel": 1} | second


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("level", ["inputs", "gate", "preact"])
@pytest.mark.parametrize("kernel", ["split", "hybrid"])
def test_variants_agree_with_eager(kernel, level, dtype):
    def inputs():
        shapes = ((20, 33), (45, 33), (45, 33), (33, 45), (45,), (45,))
        x, *weights = (randn(*shape, dtype=dtype).detach() for shape in shapes)
        return [t.requires_grad_() for t in (x, *(w.div_(6) for w in weights))]

    def call(function, x, gate, up, down, gate_bias, up_bias, **options):
        return function(x, gate, up, down, "gelu", gate_bias=gate_bias, up_bias=up_bias, **options)

    compare(
        lambda *a: call(gated_mlp, *a, save=level, kernel=kernel),
        lambda *a: call(reference.gated_mlp, *a),
        inputs,
    )


def test_no_triton_no_hybrid():
    x, weights = plain()
    with dispatch.forced_path("aten"), pytest.raises(ValueError, match="'hybrid' needs Triton"):
        mlp(x, **weights, kernel="hybrid")


def test_levels_take_precedence():
    x, weights = gated()
    kept = {level: 4 * T * n for level, (n, _) in CONTRACT["gated_mlp"][2].items()}
    for level, expected in kept.items():
        with fusedckpt.saving(level):
            assert saved_bytes(lambda x: gated_mlp(x, **weights), [x]) == expected
            assert saved_bytes(lambda x: gated_mlp(x, **weights, save="gate"), [x]) == kept["gate"]
    x, weights = plain()
    with fusedckpt.saving("gate"):
        # an MLP has no gate
        assert saved_bytes(lambda x: mlp(x, **weights), [x]) == 4 * T * D


def test_other_output_width():
    for function, weights in (
        (mlp, lambda: [randn(40, 16), randn(40), randn(24, 40), None]),
        (gated_mlp, lambda: [randn(40, 16), randn(40, 16), randn(24, 40)]),
    ):
        twin = getattr(reference, function.__name__)
        compare(function, twin, lambda weights=weights: [randn(30, 16), *weights()], slack=3.0)
