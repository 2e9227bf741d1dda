"""`bench contexts`: its rows, and its weights of 4 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench import contexts
from bench.__main__ import main
from bench.results import groups, read
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import saved_tensors


def mlp(size: int) -> tuple[nn.Module, torch.Tensor]:
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    return nn.Sequential(*blocks), torch.randn(size, 64)


def test_a_row_for_each_way_that_a_model_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(contexts, "MODELS", {"mlp": contexts.Model("an MLP", mlp, "factory")})
    # of so small a model, larger cards hold millions of tokens, which are computed in many chunks
    monkeypatch.setattr(contexts, "CARDS", (1, 2, 4))
    ways = ["--way=eager", "--way=fuse", "--way=fuse, head"]
    with forced_path("aten"):
        assert main(["contexts", "--model=mlp", *ways, f"--out={tmp_path}"]) == 0
    ((eager, fused),) = groups(read(tmp_path / "contexts.jsonl"))
    assert (eager["name"], fused["name"]) == ("eager", "fuse")
    for small, large in zip(eager["largest"], fused["largest"], strict=True):
        assert 0 < small["size"] < large["size"]
        assert small["peak_bytes"] <= 0.9 * small["card_bytes"] < small["next_peak_bytes"]
    printed = capsys.readouterr().out
    assert f"{fused['largest'][2]['size']:,}" in printed
    assert "estimated" in printed
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    assert main(["show", str(tmp_path / "contexts.jsonl"), "--plot"]) == 0
    assert (tmp_path / "contexts.png").stat().st_size > 10_000


def test_weights_of_4_bits_are_dense_in_a_gemm_alone():
    weight = contexts.Nibbles.of(torch.ones(32, 64))
    weight.packed.fill_(0x9C)
    weight.scales.fill_(0.5)
    assert weight.packed.nbytes + weight.scales.nbytes == 32 * 64 // 2 + 4 * 32
    dense = torch.tensor([2.0, 0.5]).repeat(32, 32)
    assert torch.equal(weight.dense(), dense)
    x = torch.randn(3, 64, requires_grad=True)
    with saved_tensors() as saved:
        y = F.linear(x, nn.Parameter(weight, requires_grad=False))
    assert saved.nbytes == 0
    torch.testing.assert_close(y, x @ dense.t())
    y.sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, 64))
