"""Every kernel compiles for every chip, without spills, serialised wgmma or an empty body.

FUSEDCKPT_COMPILE=every_size does so at every size that benchmarks have.
"""

import ast
import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need Triton")
from tests.kernels import compile_only, model_table
from tests.kernels.compile_only import CHIPS, Compiled, check, compile_all
from tests.kernels.model import model


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    chosen = os.environ.get("FUSEDCKPT_COMPILE", "everything")
    return compile_all(f"tests.kernels.compile_launches:{chosen}")


@pytest.mark.parametrize("chip", CHIPS)
def test_guard(compiled, chip):
    records = [record for record in compiled if record.target == chip]
    assert not [problem for record in records for problem in check(record)]
    kernels = {record.kernel for record in records}
    assert kernels == {
        "gemm_kernel",
        "grouped_gemm_kernel",
        "grouped_grad_kernel",
        "clear_unused_kernel",
        "count_kernel",
        "scan_kernel",
        "place_kernel",
        "combine_kernel",
        "gate_kernel",
        "gate_grad_kernel",
        "act_kernel",
        "act_grad_kernel",
        "cross_entropy_kernel",
        "coded_act_kernel",
        "coded_grad_kernel",
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
        assert row.trips == 1, row
        if record.tile[0] // record.tile[1] == 4096:
            assert row.in_flight >= 32 << 10, row


def test_the_gradient_of_a_norm_reads_a_row_once(compiled):
    """And all programs that are launched run at the same time."""
    for record in norms(compiled, "norm_grad_kernel"):
        row = model(record)
        assert row.blocks == record.grid, row
        assert row.moved == row.minimum, row


def test_a_gemm_has_enough_of_its_tiles_under_way(compiled):
    """And its epilogue moves at least what there is: the table has read its loop apart from it."""
    found = [r for r in compiled if (r.target, r.kernel) == ("sm_90", "gemm_kernel")]
    tiled = [r for r in found if "DESCRIPTORS=True" in r.label and "bfloat16" in r.label]
    assert len(tiled) >= 16
    for record in tiled:
        row = model(record)
        assert row.in_flight >= 32 << 10, row
        assert row.minimum <= row.moved <= 1.5 * row.minimum, row


def test_the_table_of_models(compiled, monkeypatch, capsys):
    records = [record for record in compiled if record.target == "sm_90"]
    monkeypatch.setattr(compile_only, "compile_all", lambda *chosen: records)
    assert model_table.main(["--arch=sm_90"]) == 0
    out = capsys.readouterr().out
    assert "32 KB in flight" in out
    assert "norm_grad rms 1x4096" in out
    assert "gemm hidden_grad silu" in out


def kernels() -> list[ast.FunctionDef]:
    """All functions under triton.jit, in kernels/."""
    folder = Path(__file__).parents[2] / "kernels"
    found = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in found if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if "triton.jit" in map(ast.unparse, f.decorator_list)]


def test_kernels_are_short():
    assert len(kernels()) > 50
    for kernel in kernels():
        start = kernel.body[1 if ast.get_docstring(kernel) else 0].lineno
        assert kernel.end_lineno - start < 60, kernel.name
        assert len(kernel.args.args) <= 20, kernel.name
