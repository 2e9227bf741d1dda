"""`bench step`: how ops and launches are priced, and its rows."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench import step
from bench.__main__ import main
from bench.results import groups, read

H100 = step.CARDS["H100"]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def priced(run: Any) -> step.Cost:
    cost = step.Cost()
    with step.Priced(cost):
        run()
    return cost


def test_operands_and_results_move_once_and_views_not_at_all():
    x, w = meta(64, 32), meta(1, 32)
    cost = priced(lambda: F.silu(x).t().view(32, 64))
    assert (cost.op_bytes, cost.num_ops) == (2 * 64 * 32 * 2, 1)
    # an expanded operand is as large as its memory; a result over an operand is written, too
    cost = priced(lambda: x.mul_(w.expand(64, 32)))
    assert cost.op_bytes == 64 * 32 * 2 * 2 + 32 * 2
    assert priced(lambda: torch.empty_like(x)).num_ops == 0


def test_products_are_priced_by_their_flops():
    x, w = meta(64, 32, grad=True), meta(128, 32, grad=True)

    def backward():
        F.linear(x, w).backward(meta(64, 128))

    assert priced(backward).gemm_flops == 3 * 2 * 64 * 32 * 128
    wide = priced(lambda: torch.mm(x.detach(), w.detach().t(), out_dtype=torch.float32))
    assert wide.gemm_flops == 2 * 64 * 32 * 128
    assert wide.op_bytes == 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_attention_counts_half(is_causal):
    q = torch.randn(1, 2, 64, 16)
    cost = priced(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=is_causal))
    assert cost.attention_flops == 2 * 2 * 2 * 64 * 64 * 16 / (2 if is_causal else 1)
    assert cost.gemm_flops == 0


def launch_of(name: str, module: str, **arguments: Any) -> Any:
    kernel = SimpleNamespace(src=SimpleNamespace(fn=SimpleNamespace(__module__=module)))
    return SimpleNamespace(name=name, kernel=kernel, arguments=arguments, grid=(1, 1, 1))


def test_launches_are_priced_by_who_launches_them(monkeypatch):
    times = {"act_kernel": 20.0, "scan_kernel": None}
    monkeypatch.setattr(step, "_us_of", lambda launch, card: times[launch.name])
    start, per_byte = step.fit(H100.arch)
    x, dy, w = meta(64, 32), meta(64, 8), meta(4, 32, 8)
    known = "fusedckpt.kernels.linear"
    launches = [
        launch_of("act_kernel", known, x=x),
        # the model gives it no time: its bytes
        launch_of("scan_kernel", known, x=x),
        launch_of("_triton_rope", "liger_kernel.ops.rope", x=x),
        launch_of("grouped_gemm_kernel", known, x=x, w=w, n=8),
        launch_of("grouped_grad_kernel", known, x=x, dy=dy),
    ]
    cost = step.Cost()
    step.add_launches(cost, launches, H100)
    bytes_us = 64 * 32 * 2 * per_byte
    assert cost.kernel_us == pytest.approx(20.0 - start + step.NEXT + bytes_us + step.NEXT)
    assert (cost.num_kernels, cost.num_untimed) == (2, 1)
    assert (cost.op_bytes, cost.num_ops) == (2 * 64 * 32 * 2, 3)
    assert cost.gemm_flops == 2 * (2 * 64 * 32 * 8)


def test_rows_of_a_layer(tmp_path, monkeypatch, capsys):
    def make(batch: int, seq: int) -> Any:
        block = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))
        return block, lambda layer, x: layer(x)

    monkeypatch.setattr(step, "LAYERS", {"mlp": step.Layer("an MLP", make, 16, 1024, False)})
    pytest.importorskip("triton", reason="launches are Triton's")
    # kernels are interpreted in tests, and these ways launch none
    monkeypatch.setattr("tests.kernels.emulated.recorded", lambda *_: nullcontext([]))
    ways = ["--way=eager", "--way=checkpoint", "--way=Liger"]
    assert main(["step", "--card=H100", "--layer=mlp", *ways, f"--out={tmp_path}"]) == 0
    ((eager, checkpoint),) = groups(read(tmp_path / step.FILE))
    # a recompute ends before its last GEMM
    flops = 3 * 2 * (2 * step.TOKENS * 16 * 64)
    assert (eager["flops"], checkpoint["flops"]) == (flops, flops * 7 / 6)
    sizes = 16 + 64 + 64, 16
    assert (eager["saved_bytes"], checkpoint["saved_bytes"]) == tuple(
        step.TOKENS * 2 * width for width in sizes
    )
    assert checkpoint["predicted_ms"][0] > eager["predicted_ms"][0]
    assert "predicted, not measured" in capsys.readouterr().out


def test_every_time_is_called_predicted():
    assert [head for head in step.COLUMNS if " ms" in head] == ["predicted ms", "host ms"]
