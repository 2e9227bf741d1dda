"""Every layer launches through Triton's own launcher, at models' sizes, as often as is listed here.

Launches without a device: the driver is libcuda.c, which refuses what a real one refuses. On a GPU
the other tests launch.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

SCRIPT = Path(__file__).parent / "launch_layers.py"
# forward, backward; map: a tensor map that the host encoded for a launch
LAUNCHES = {
    "linear": ("addmm", "2 mm, sum"),
    "linear_act split": ("addmm, act", "addmm, act_grad, sum_partials, 2 mm"),
    "linear_act preact": ("addmm, act", "act_grad, sum_partials, 2 mm"),
    "linear_act fused": ("2 map, gemm", "2 map, gemm, sum_partials, 2 mm"),
    # rows that are no multiple of 16 bytes
    "linear_act fused odd": ("gemm", "gemm, 2 mm"),
    "linear_act fused float32": ("2 map, gemm", "2 map, gemm, sum_partials, 2 mm"),
    "rms_norm": ("norm", "norm_grad, sum_partials"),
    "rms_norm frozen": ("norm", "norm_grad"),
    "rms_norm wide": ("wide_norm", "wide_dx, wide_dw, sum_partials"),
    "layer_norm": ("norm", "norm_grad, sum_partials"),
    "add_rms_norm": ("norm", "norm_grad, sum_partials"),
    "add_layer_norm": ("norm", "norm_grad, sum_partials"),
    "norm_linear": ("norm, 3 mm", "norm, 4 mm, 2 addmm, norm_grad, sum_partials"),
    "token_logprobs": ("mm, cross_entropy", "3 mm, add_, cross_entropy"),
    "mlp split": ("2 addmm, act", "addmm, act_grad, sum_partials, 4 mm, sum"),
    # the weights are frozen
    "mlp approximate": ("addmm, mm, coded_act", "2 mm, coded_grad"),
    "mlp hybrid": ("2 addmm, act", "addmm, 2 map, gemm, sum_partials, 3 mm, sum"),
    "gated_mlp split": ("3 mm, act", "act_grad, 6 mm"),
    "gated_mlp hybrid": ("3 mm, act", "2 map, gemm, 5 mm"),
    "norm, gated_mlp, residual": (
        "norm, 3 mm, act, add",
        "norm, act_grad, 6 mm, norm_grad, sum_partials",
    ),
    "norm, gated_mlp, residual, preact": (
        "norm, 3 mm, act, add",
        "norm, act_grad, 4 mm, norm_grad, sum_partials",
    ),
}


def written(counts: dict[str, int]) -> set[str]:
    names = {name.removeprefix("aten::").removesuffix("_kernel"): counts[name] for name in counts}
    return {name if count == 1 else f"{count} {name}" for name, count in names.items()}


@pytest.fixture(scope="module")
def launched() -> dict[str, dict[str, dict[str, int]]]:
    if shutil.which("gcc") is None:
        pytest.skip("the driver that stands in is built by gcc")
    if torch.cuda.is_available():
        pytest.skip("kernels are launched for real here")
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def test_launches_per_layer(launched):
    found = {name: tuple(map(written, ways.values())) for name, ways in launched.items()}
    assert found == {
        name: tuple(set(way.split(", ")) for way in ways) for name, ways in LAUNCHES.items()
    }
