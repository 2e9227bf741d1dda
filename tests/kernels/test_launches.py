"""Launches without a device; on a GPU the other tests launch.

Layers launch through Triton's own launcher, at models' sizes, as `launch_layers.py` lists: there
the driver is libcuda.c, which refuses what a real one refuses. A remembered launch is Triton's own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")


def test_launches_per_layer():
    if shutil.which("gcc") is None:
        pytest.skip("the driver that stands in is built by gcc")
    if torch.cuda.is_available():
        pytest.skip("kernels are launched for real here")
    assert output_of("launch_layers.py") == ""


def test_a_remembered_launch_is_that_of_triton():
    """The same compiled kernel, arguments, grid and stream; Triton's own where it is unusual."""
    assert output_of("compare_launches.py") == ""


def output_of(script: str) -> str:
    """Run a script of this folder where kernels are not interpreted."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / script)]
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
