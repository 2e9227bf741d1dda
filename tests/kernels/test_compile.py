"""Every kernel compiles for every chip, without spills, serialised wgmma or an empty body."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")
from compile_only import CHIPS, Compiled, check, compile_all, model


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
        "dropout_kernel",
        "norm_kernel",
        "norm_grad_kernel",
        "wide_norm_kernel",
        "wide_dx_kernel",
        "wide_dw_kernel",
        "sum_partials_kernel",
    }


def norms(compiled: list[Compiled], kernel: str) -> list[Compiled]:
    found = [r for r in compiled if (r.target, r.kernel) == ("sm_90", kernel)]
    assert {r.tile[0] // r.tile[1] for r in found} >= {64, 1024, 2048, 4096, 8192}
    return found


@pytest.mark.parametrize("kernel", ["norm_kernel", "norm_grad_kernel"])
def test_a_norm_waits_for_memory_once_a_row(compiled, kernel):
    """Every load is issued before the first reduction, and enough of them to hide the way."""
    for record in norms(compiled, kernel):
        row = model(record)
        assert row["trips"] == 1, row
        if record.tile[0] // record.tile[1] == 4096:
            assert row["in_flight"] >= 32 << 10, row


def test_the_gradient_of_a_norm_reads_a_row_once(compiled):
    """And all programs that are launched run at the same time."""
    for record in norms(compiled, "norm_grad_kernel"):
        row = model(record)
        assert row["blocks"] == record.grid, row
        assert row["moved"] == row["minimum"], row
