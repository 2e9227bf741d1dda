"""For any strides of inputs, saved tensors and gradients the numbers are eager's."""

import pytest
import torch
from cases import CASES
from support import compare, randn

from fusedckpt.kernels import gemm


def transposed(x):
    return x.mT.contiguous().mT if x.dim() > 1 else x


def junk_like(x):
    return torch.full_like(x, torch.nan if x.is_floating_point() else -1)


def columns(x):
    """Lay it out as every third column of a matrix: no stride is one."""
    return torch.stack([x, junk_like(x), junk_like(x)], -1)[..., 0]


def padded(x):
    return torch.cat([x, junk_like(x)], -1)[..., : x.shape[-1]]


def repeated(x):
    """Repeat its first row, or a vector's first number, with stride 0."""
    return x[:1].expand_as(x)


def one_number(x):
    return x.flatten()[0].expand_as(x)


def overlapping(x):
    """Begin a row one number after the one above it."""
    return x.as_strided(x.shape, (1,) * x.dim())


GIVEN = [transposed, columns, padded, repeated, one_number, overlapping]


def assert_given(case, arrange):
    """Matrices and vectors alike, and incoming gradients."""

    def make():
        x, *weights = case.inputs((40,), 86, 90)
        if arrange is one_number and any(norm in case.name for norm in ("norm", "rms", "layer")):
            # a constant row has no direction: both sides are rounding noise
            return [x, *weights]
        return [None if t is None else arrange(t.detach()).requires_grad_() for t in (x, *weights)]

    # torch's GELU on a CPU refuses gradients whose rows overlap
    dense = arrange is overlapping
    compare(
        case.fused,
        case.eager,
        make,
        lambda y: torch.randn_like(y) if dense else arrange(torch.randn_like(y)),
    )


def repeated_where_equal(x):
    same = repeated(x)
    return same if torch.equal(x, same) else x


KEPT = [transposed, columns, padded, repeated_where_equal]


def assert_kept(case, arrange):
    """Hooks may hand out what was kept in another layout."""

    def under_hooks(*inputs):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: arrange(x.detach())):
            return case.fused(*inputs)

    def make():
        x, *weights = case.inputs((40,), 86, 90)
        if arrange is repeated_where_equal:
            # rows of x that are all one make rows of GEMM outputs so
            x = repeated(x.detach()).clone().requires_grad_()
            vectors = (t is not None and t.dim() == 1 for t in weights)
            weights = [
                repeated(t.detach()).clone().requires_grad_() if is_vector else t
                for t, is_vector in zip(weights, vectors, strict=True)
            ]
        return [x, *weights]

    compare(under_hooks, case.eager, make)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: CASES[index].name)
def test_layouts(index, path):
    """All on ATen; on the kernels one, which is given or kept."""
    checks = [(assert_given, a) for a in GIVEN] + [(assert_kept, a) for a in KEPT]
    for check, arrange in checks if path == "aten" else [checks[index % len(checks)]]:
        check(CASES[index], arrange)


def test_tensor_descriptors_read_rows_that_lie_apart():
    w = randn(8, 8, requires_grad=False)
    assert gemm.fits_descriptors(w, w)
    assert gemm.fits_descriptors(w, w.t())
    dense = w.as_strided((8, 8), (4, 1))
    for pair in ((dense, w), (w, dense), (w, dense.t())):
        assert not gemm.fits_descriptors(*pair)
