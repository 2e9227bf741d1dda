"""The finetune command at toy sizes: one line per way of training, equal losses, less kept."""

import json

import pytest
import torch

from fusedckpt.autograd.dispatch import forced_path

pytest.importorskip("matplotlib", reason="needs the bench extra")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from bench import __main__ as command
from bench.quantised import Int8
from bench.settings import BASES

SIZES = ("--pretrain=2", "--steps=3", "--layers=2", "--dim=64", "--seq=32", "--batch=2")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("finetune")
    with forced_path("aten"):
        assert command.main(["finetune", "--device=cpu", *SIZES, "--rank=4", f"--out={out}"]) == 0
    assert len(list(out.glob("*.png"))) == len(BASES)
    return {base: json.loads((out / f"finetune_{base}_r4.json").read_text()) for base in BASES}


@pytest.mark.parametrize("base", BASES)
def test_ways_train_alike_and_keep_less(results, base):
    result = results[base]
    runs = {run["name"]: run for run in result["runs"]}
    assert list(runs) == ["eager", "checkpoint", "fuse", "fuse preact", "fuse+plan"]
    assert result["settings"]["base"] == base
    assert all(run["loss_difference"] < 1e-4 for run in runs.values())
    eager, fused, kept = (runs[name]["saved_mib"] for name in ("eager", "fuse", "fuse preact"))
    assert fused < kept < eager
    assert "LlamaMLP -> gated_mlp" in result["fused"]
    assert "not run fused" not in result["fused"]


def test_int8_is_near_what_it_was_made_of():
    dense = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    weight = Int8.of(dense)
    largest = dense.abs().amax(1, keepdim=True)
    assert ((weight.dequantize() - dense).abs() <= largest / 254 * 1.001).all()
    torch.testing.assert_close(
        torch.nn.functional.linear(dense, weight), dense @ weight.dequantize().T
    )
