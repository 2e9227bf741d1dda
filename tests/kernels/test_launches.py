"""Layers launch through Triton's own launcher, at models' sizes, as `launch_layers.py` lists.

Launches without a device: the driver is libcuda.c, which refuses what a real one refuses. On a GPU
the other tests launch.
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
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "launch_layers.py")]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == ""
