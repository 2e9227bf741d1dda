"""Triton's interpreter as the tests patch it gives the bits of Triton's own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedckpt
from fusedckpt import functional
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels import partials
from fusedckpt.kernels.runtime import HAS_TRITON

D, HIDDEN, ROWS = 24, 40, 7


def results(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the results and gradients of layers whose kernels have most of Triton's functions."""
    torch.manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    x, w, b = randn(ROWS, D), randn(D), randn(D)
    up, gate, down = randn(HIDDEN, D), randn(HIDDEN, D), randn(D, HIDDEN)
    ys = [
        functional.layer_norm(x, (D,), w, b),
        functional.rms_norm(x, (D,), w),
        functional.linear_act(x, up, activation="gelu"),
        functional.gated_mlp(x, gate, up, down, activation="silu"),
    ]
    loss = sum(y.float().square().sum() for y in ys)
    assert isinstance(loss, torch.Tensor)
    return [*ys, *torch.autograd.grad(loss, [x, w, b, up, gate, down])]


def digest() -> str:
    """Return a digest of the bits of all results."""
    found = hashlib.sha256()
    with forced_path("triton"):
        for dtype in (torch.float32, torch.bfloat16):
            for y in results(dtype):
                found.update(y.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="nothing is interpreted")
def test_bits():
    code = (
        "import test_quick_interpreter as t; "
        # the order of sums is that of the tile
        f"t.partials.SUM_TILE.update({partials.SUM_TILE}); "
        "print(t.digest())"
    )
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(Path(fusedckpt.__file__).parents[1])])
    # a sum's order is also that of the threads
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    environment = {**os.environ, **threads, "PYTHONPATH": path}
    plain = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert plain.stdout.split()[-1] == digest()
