"""The PTX that Triton compiles of every kernel, for sm_80 and sm_90, executed on this CPU.

FUSEDCKPT_PTX=all adds each case warp by warp with races checked, and each mutant.
"""

import ast
import fnmatch
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need Triton")
from tests.ptx.table import ARCHS, cases_of

# labels of the compile guard that no case launches, and why
LONGER = "rows of 4096 columns run: a longer one only gives a thread more elements"
NOT_RUN = {
    "norm_kernel[[]bfloat16, float32, t.bias=None, *ROUND=True, *BLOCK_N=8192, *": LONGER,
    "norm_kernel[[]bfloat16, float32, t.bias=None, *ROUND=True, *BLOCK_N=16384, *": LONGER,
    "split_norm_grad_kernel[[]float32, bfloat16, *PARTS=2, STAGES=2]": "four parts run",
}


@pytest.mark.parametrize(("arch", "name"), [(a, n) for a in ARCHS for n in cases_of(a)])
def test_a_kernel_obeys_the_error_rule(ask, arch, name):
    answer = ask("case", arch=arch, name=name)
    assert answer["problem"] is None, answer["problem"]
    assert answer["ratio"] is not None
    assert answer["launches"]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_of_the_guard_runs_or_says_why_not(ask, arch):
    labels = ask("not_run", arch=arch)
    unexplained = [x for x in labels if not any(fnmatch.fnmatchcase(x, key) for key in NOT_RUN)]
    assert not unexplained
    # a reason for nothing would hide the next kernel
    assert all(any(fnmatch.fnmatchcase(x, key) for x in labels) for key in NOT_RUN)


def test_the_guard_has_every_kernel():
    """So that a new kernel is compiled by the guard, and run here by the test above."""
    folder = Path(__file__).parents[2] / "kernels"
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    kernels = {f.name for f in functions if f.name.endswith("_kernel") and f.decorator_list}
    guard = (Path(__file__).parents[1] / "kernels" / "test_compile.py").read_text()
    assert len(kernels) >= 15
    assert all(f'"{name}"' in guard for name in kernels)
