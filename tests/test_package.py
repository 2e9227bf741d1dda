"""The package as a whole: how it imports, switches, is laid out and documented."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import DEVICE

import fusedckpt
from fusedckpt import functional
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels.routed import has_kernel
from fusedckpt.kernels.runtime import HAS_TRITON, IS_INTERPRETED

ROOT = Path(__file__).parents[1]

# a model with every layer that fuse swaps, before and after
MODELS = """
import copy, sys, torch, fusedckpt
from fusedckpt import functional
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
eager = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.RMSNorm(6))
fused = copy.deepcopy(eager)
assert len(fusedckpt.fuse(fused).swapped) == 3
x = torch.randn(5, 6, requires_grad=True)
found, expected = (
    [y := model(x), *torch.autograd.grad(y.exp().sum(), [x, *model.parameters()])]
    for model in (fused, eager)
)
paths = set(fusedckpt.backends("cpu", torch.float32).values())
"""

WITHOUT_TRITON = f"""
import sys, warnings
sys.modules["triton"] = None
{MODELS}
with warnings.catch_warnings(record=True) as seen:
    compiled = torch.compile(eager, backend="eager")
    fusedckpt.checkpoint(compiled, x).sum().backward()
assert not any("global hooks" in str(warning.message) for warning in seen), seen
torch.testing.assert_close(found, expected)
assert found[0].grad_fn.name() != expected[0].grad_fn.name()
assert paths == {{"aten"}}
try:
    functional.linear_act(x, eager[1].weight, kernel="fused")
except ValueError as error:
    assert "needs Triton" in str(error)
else:
    raise AssertionError("it ran")
"""

DISABLED = f"""
{MODELS}
assert all(map(torch.equal, found, expected))
assert paths == {{"eager"}}
sys.path.append("tests")
from cases import CASES
from support import as_tuple

# an approximate derivative has no eager twin to equal
exact = set(functional.__all__) - {{"regelu2", "resilu2"}}
assert {{case.name.partition("-")[0] for case in CASES}} == exact
for case in CASES:
    inputs = case.inputs((5,), 6, 9)
    pair = (as_tuple(function(*inputs)) for function in (case.fused, case.eager))
    for ours, twin in zip(*pair, strict=True):
        assert torch.equal(ours, twin), case.name
        assert ours.grad_fn.name() == twin.grad_fn.name(), case.name
"""


def run(code: str, **environment: str) -> str:
    """Run code in a process of its own, without Triton's interpreter, and return what it prints."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_works_without_triton():
    run(WITHOUT_TRITON)


def test_disabled_runs_the_eager_twins():
    run(DISABLED, FUSEDCKPT_DISABLE="1")


def test_import_is_light_and_zero_does_not_disable():
    code = "import sys, fusedckpt; print(fusedckpt.autograd.dispatch.DISABLED, *sys.modules)"
    disabled, *loaded = run(code, FUSEDCKPT_DISABLE="0").split()
    assert disabled == "False"
    assert "torch" in loaded
    heavy = {"transformers", "accelerate", "matplotlib", "rich", "scipy", "sklearn", "bench"}
    heavy |= {"torch._dynamo", "torch._inductor", "sympy"}
    assert not heavy & set(loaded)


def test_paths():
    kernels = "interpreter" if IS_INTERPRETED else "triton" if HAS_TRITON else "aten"
    expected = {torch.float32: kernels, torch.bfloat16: kernels, torch.float16: kernels}
    for dtype, path in (expected | {torch.float64: "aten"}).items():
        for device in (DEVICE, str(DEVICE)):
            paths = dict.fromkeys(functional.__all__, path)
            if path == "triton" and has_kernel(DEVICE, dtype):
                paths["experts"] = "aten"
            assert fusedckpt.backends(device, dtype) == paths
    with forced_path("aten"):
        assert set(fusedckpt.backends(DEVICE, torch.float32).values()) == {"aten"}


def test_kernels_is_a_folder_beside_the_package():
    # a top-level package of this name would shadow another project's
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert os.readlink(ROOT / "fusedckpt" / "kernels") == "../kernels"
    assert (ROOT / "fusedckpt" / "py.typed").exists()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda path: path.name
)
def test_kernels_import_torch_triton_and_themselves(path):
    allowed = {"torch", "triton", "numpy", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [str(node.module)]
        else:
            continue
        assert {name.partition(".")[0] for name in names} <= allowed


def test_one_version():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.+)"$', text, re.M) == [fusedckpt.__version__]
    assert f"## [{fusedckpt.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_wheels_have_every_folder():
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'"([^"]+)"', project.partition("packages = [")[2].partition("]")[0])
    found = {path.parent for path in (ROOT / "fusedckpt").rglob("__init__.py")}
    folders = {".".join(path.relative_to(ROOT).parts) for path in found}
    assert sorted(listed) == sorted(folders | {"fusedckpt.kernels"})
