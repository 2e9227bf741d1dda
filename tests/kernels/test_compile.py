"""Every kernel compiles for every chip, without spills, serialized wgmma or an empty body.

Chips compile the launches that their rows of CHIPS name. FUSEDCKPT_COMPILE=everything has all of
them compile everything, FUSEDCKPT_COMPILE=every_size does so at every size that benchmarks have.
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
    return compile_all("tests.kernels.compile_launches", os.environ.get("FUSEDCKPT_COMPILE"))


@pytest.mark.parametrize("chip", CHIPS)
def test_guard(compiled, chip):
    records = [record for record in compiled if record.target == chip]
    assert not [problem for record in records for problem in check(record)]
    if CHIPS[chip].launches == "near_limits":
        # the rest is that of sm_80: see below
        assert len(records) >= 20
        return
    # long rows take two kernels on AMD's chips, and rows of 768 columns those of others
    only = {"split_norm_grad_kernel", "warp_norm_grad_kernel"}
    split = only if chip.startswith("sm_") else set()
    kernels = {record.kernel for record in records}
    assert kernels == split | {
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
        "cross_entropy_grad_kernel",
        "coded_act_kernel",
        "coded_grad_kernel",
        "pack_int8_kernel",
        "unpack_int8_kernel",
        "dropout_kernel",
        "norm_kernel",
        "norm_grad_kernel",
        "gated_norm_kernel",
        "gated_norm_grad_kernel",
        "wide_gated_norm_kernel",
        "wide_gated_norm_grad_kernel",
        "modulated_norm_kernel",
        "channel_norm_kernel",
        "gated_sum_kernel",
        "wide_norm_kernel",
        "wide_stats_kernel",
        "wide_grad_kernel",
        "sum_partials_kernel",
    }


# by how many registers a kernel of the same PTX may differ: on sm_86 at most 10 more, of 145
ROOM = 16


@pytest.mark.parametrize("chip", [name for name in CHIPS if CHIPS[name].launches == "near_limits"])
def test_kernels_of_sm_80_fit_chips_that_share_their_ptx(compiled, chip):
    """There only those near a limit are compiled: the others have room for all that may differ."""
    records = [record for record in compiled if record.target == chip]
    first = {record.ptx: record for record in compiled if record.target == "sm_80"}
    # rows that do not fit the shared memory of these chips take other kernels there
    smaller = {"wide_stats_kernel", "wide_grad_kernel"}
    assert {record.ptx for record in records if record.kernel not in smaller} <= first.keys()
    for ptx in first.keys() - {record.ptx for record in records}:
        if first[ptx].kernel == "split_norm_grad_kernel":
            continue
        assert first[ptx].registers + ROOM <= first[ptx].max_registers, first[ptx].label
        assert first[ptx].shared <= CHIPS[chip].shared, first[ptx].label


@pytest.mark.parametrize("chip", [name for name in CHIPS if name.startswith("sm_")])
def test_all_programs_of_a_norms_gradient_run_at_the_same_time(compiled, chip):
    """One that waits for the others would take as long again."""
    names = "norm_grad_kernel", "warp_norm_grad_kernel"
    gradients = [r for r in compiled if r.target == chip and r.kernel in names]
    assert len(gradients) >= 10, chip
    for record in gradients:
        registers = -(-record.registers // 8) * 8 * 32 * record.num_warps
        assert record.grid * registers <= 65536, record.label
        assert record.grid * (record.shared + 1024) <= CHIPS[chip].multiprocessor, record.label


def norms(compiled: list[Compiled], kernel: str) -> list[Compiled]:
    records = [r for r in compiled if (r.target, r.kernel) == ("sm_90", kernel)]
    assert {r.tile[0] // r.tile[1] for r in records} >= {128, 1024, 2048, 4096, 8192}
    return records


def is_packed(record: Compiled) -> bool:
    """Whether it reads x in nine bits."""
    return "PACKED=None" not in record.label


@pytest.mark.parametrize("kernel", ["norm_kernel", "norm_grad_kernel"])
def test_a_norm_waits_for_memory_once_a_row(compiled, kernel):
    """Every load is issued before the first reduction, and enough of them to hide the way."""
    for record in norms(compiled, kernel):
        row = model(record)
        # scales of nine bits are loaded apart from copies, a tile ahead: none waits for them
        is_ahead = is_packed(record) and kernel == "norm_grad_kernel"
        assert row.trips == 1 + is_ahead, row
        if record.tile[0] // record.tile[1] == 4096:
            assert row.in_flight >= 32 << 10, row


def test_the_gradient_of_a_norm_reads_a_row_once(compiled):
    """And all programs that are launched run at the same time."""
    for record in norms(compiled, "norm_grad_kernel"):
        row = model(record)
        assert row.blocks == record.grid, row
        # four threads read a scale in float32
        assert 0 <= row.moved - row.minimum <= is_packed(record) / 2, row


def test_a_gemm_has_enough_of_its_tiles_under_way(compiled):
    """And its epilogue moves at least what there is: the table has read its loop apart from it."""
    records = [r for r in compiled if (r.target, r.kernel) == ("sm_90", "gemm_kernel")]
    tiled = [r for r in records if "DESCRIPTORS=True" in r.label and "bfloat16" in r.label]
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
    """All functions under triton.jit, in kernels/, those that the host launches among them."""
    folder = Path(__file__).parents[2] / "kernels"
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    decorators = {"triton.jit", "jit_kernel"}
    return [f for f in functions if decorators & set(map(ast.unparse, f.decorator_list))]


def test_kernels_that_the_host_launches_are_remembered():
    for kernel in kernels():
        is_launched = "jit_kernel" in map(ast.unparse, kernel.decorator_list)
        assert is_launched == kernel.name.endswith("_kernel"), kernel.name


def test_kernels_are_short():
    assert len(kernels()) > 50
    for kernel in kernels():
        start = kernel.body[1 if ast.get_docstring(kernel) else 0].lineno
        assert kernel.end_lineno - start < 60, kernel.name
        assert len(kernel.args.args) <= 20, kernel.name
