"""The second stage of sums over rows: one launch, rounded once."""

import pytest
import torch
from support import DEVICE, HALF, launches

from fusedckpt.kernels.runtime import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("kernels need Triton", allow_module_level=True)

from fusedckpt.kernels.norm import NormRule, norm_grad
from fusedckpt.kernels.partials import sum_partials


@pytest.mark.parametrize("shape", [(1, 1), (7, 45), (300, 70)], ids=str)
@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)], ids=str)
def test_sums_over_rows(shape, given):
    pair = [torch.randn(shape, device=DEVICE) if there else None for there in given]
    with launches() as count:
        found = sum_partials(*pair)
    assert count == {"sum_partials_kernel": 1}
    for total, partial in zip(found, pair, strict=True):
        assert (total is None) == (partial is None)
        if total is not None:
            torch.testing.assert_close(total, partial.double().sum(0).float())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_norm_writes_the_dtype_that_is_asked_for(dtype):
    x, w, dy = (torch.randn(s, device=DEVICE).to(dtype) for s in ((70, 40), (40,), (70, 40)))
    operands = (dy, None, x, w, NormRule("layer", 1e-5), (True, True, True))
    wide, narrow = norm_grad(*operands), norm_grad(*operands, dtype)
    assert torch.equal(wide[0], narrow[0])
    for full, rounded in zip(wide[1:], narrow[1:], strict=True):
        assert full.dtype == torch.float32
        assert torch.equal(full.to(dtype), rounded)
