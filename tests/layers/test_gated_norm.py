"""Norms with a gate: groups, long rows, mixed dtypes, saved bytes, the module, bad input."""

from itertools import product

import pytest
import torch
from support import DEVICE, compare, randn, saved_bytes
from torch import nn
from torch.nn import functional as F

import fusedckpt
from fusedckpt import functional, reference

M = 5


def both(n, **options):
    """Return our function and its reference on x, a gate and a weight."""

    def call(module, x, gate, weight):
        return module.gated_rms_norm(x, gate, n, weight, 1e-5, **options)

    return (
        lambda *tensors: call(functional, *tensors),
        lambda *tensors: call(reference, *tensors),
    )


# groups of one chunk and of several
@pytest.mark.parametrize(
    ("n", "groups"), [(45, 3), (128, 1), (2100, 1), (2560, 1), (4200, 2)], ids=str
)
@pytest.mark.parametrize("gates_first", [False, True], ids=["after", "first"])
def test_groups_and_long_rows(n, groups, gates_first, path):
    # sums of few rows have few roundings
    inputs = [(M, n), (M, n), (n,)]
    ours, theirs = both(n, groups=groups, gates_first=gates_first)
    compare(ours, theirs, lambda: [randn(*shape) for shape in inputs])


def test_the_formula_is_torchs():
    x, gate, weight = randn(M, 12), randn(M, 12), randn(12)
    ours = functional.gated_rms_norm(x, gate, 12, weight, 1e-6, activation="sigmoid")
    eager = F.rms_norm(x, (12,), weight, 1e-6) * gate.sigmoid()
    torch.testing.assert_close(ours, eager)
    ours = functional.gated_rms_norm(x, gate, 12, weight, gates_first=True, groups=3)
    rows = (x * F.silu(gate)).unflatten(1, (3, 4))
    torch.testing.assert_close(ours, F.rms_norm(rows, (4,)).flatten(1) * weight)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float32, torch.float16),
        (torch.float32, torch.float64, torch.float32),
    ],
    ids=str,
)
def test_gated_norms_of_mixed_dtypes(dtypes, path):
    x_dtype, gate_dtype, w_dtype = dtypes
    for gates_first, cast in product((False, True), ("torch", "llama")):
        ours, theirs = both(20, gates_first=gates_first, cast=cast)
        compare(
            ours,
            theirs,
            lambda: [
                randn(17, 20, dtype=x_dtype),
                randn(17, 20, dtype=gate_dtype),
                randn(20, dtype=w_dtype),
            ],
        )


def test_gradients_of_every_mask():
    for mask in list(product((False, True), repeat=3))[1:]:
        ours, theirs = both(18, gates_first=mask[0])
        shapes = (9, 18), (9, 18), (18,)
        compare(
            ours,
            theirs,
            lambda mask=mask, shapes=shapes: [
                randn(*shape, requires_grad=flag) for shape, flag in zip(shapes, mask, strict=True)
            ],
        )


def test_saves_x_and_the_gate_alone():
    weight = nn.Parameter(torch.ones(24, device=DEVICE, dtype=torch.float64))
    inputs = [randn(7, 24, dtype=torch.float64), randn(7, 24, dtype=torch.float64)]

    def run(x, gate):
        return functional.gated_rms_norm(x * 1, gate * 1, 24, weight)

    assert saved_bytes(run, inputs) == 2 * 7 * 24 * 8
    eager = saved_bytes(lambda x, g: reference.gated_rms_norm(x * 1, g * 1, 24, weight), inputs)
    assert eager > 5 * 7 * 24 * 8


def test_under_compile_it_saves_as_much():
    weight = nn.Parameter(torch.ones(24, device=DEVICE))

    def run(x, gate):
        return functional.gated_rms_norm(x * 2, gate * 2, 24, weight).sin()

    inputs = [randn(7, 24), randn(7, 24)]
    expected = torch.autograd.grad(run(*inputs).sum(), [*inputs, weight])
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*inputs).sum(), [*inputs, weight]), expected
    )


def test_the_module():
    norm = fusedckpt.GatedRMSNorm(12, 1e-5, device=DEVICE, groups=3, gates_first=True, offset=1.0)
    assert torch.equal(norm.weight, torch.zeros_like(norm.weight))
    x, gate = randn(2, 3, 12), randn(2, 3, 12)
    scale = torch.ones(12, device=DEVICE)
    eager = reference.gated_rms_norm(x, gate, 12, scale, 1e-5, groups=3, gates_first=True)
    torch.testing.assert_close(norm(x, gate), eager)
    assert repr(norm).startswith("fusedckpt.GatedRMSNorm(12, eps=1e-05, groups=3, norm(x * act(")
    assert [*norm.state_dict()] == ["weight"]
    assert not [*fusedckpt.GatedRMSNorm(12, elementwise_affine=False).parameters()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"groups": 5}, "groups must divide normalized_shape, 12, got 5"),
        ({"normalized_shape": (3, 4)}, "normalized_shape must be one size"),
        ({"gate": torch.ones(3, 12)}, r"gate must have the shape of x, \[2, 12\], got \[3, 12\]"),
        ({"weight": torch.ones(11)}, r"weight must be \[12\], got \[11\]"),
        ({"normalized_shape": 11}, r"x must end in \[11\], got \[2, 12\]"),
        ({"activation": "cosine"}, "activation must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(change, says):
    fitting = {"x": torch.ones(2, 12), "gate": torch.ones(2, 12), "normalized_shape": 12}
    with pytest.raises(ValueError, match=f"gated_rms_norm: {says}"):
        functional.gated_rms_norm(**fitting | change)
