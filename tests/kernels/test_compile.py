"""Every kernel compiles for every chip, without spills, serialised wgmma or an empty body."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")
from compile_only import CHIPS, Compiled, check, compile_all


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return compile_all("compile_launches:everything")


@pytest.mark.parametrize("chip", CHIPS)
def test_guard(compiled, chip):
    records = [record for record in compiled if record.target == chip]
    assert not [problem for record in records for problem in check(record)]
    kernels = {record.kernel for record in records}
    assert kernels == {
        "gemm_kernel",
        "act_kernel",
        "act_grad_kernel",
        "norm_kernel",
        "norm_grad_kernel",
        "wide_norm_kernel",
        "wide_dx_kernel",
        "wide_dw_kernel",
    }
