"""A fused Llama in what distributes training, here over one process: the same gradients."""

import copy

import pytest
import torch
from support import DEVICE
from transformers_cases import MODELS

from fusedckpt import fuse, unfuse
from fusedckpt.blocks import norm_sharing

distributed = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")


@pytest.fixture
def group(tmp_path):
    backend = "gloo" if DEVICE.type == "cpu" else "nccl"
    store = f"file://{tmp_path}/store"
    distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def pair(group):
    torch.manual_seed(0)
    eager = MODELS["llama"].build()
    fused = copy.deepcopy(eager)
    fuse(fused)
    return eager, fused, MODELS["llama"].inputs()


def assert_same_gradients(fused, eager, inputs):
    for model in (fused, eager):
        model(**inputs).loss.backward()
    pairs = zip(fused.named_parameters(), eager.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        torch.testing.assert_close(grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def shared(monkeypatch):
    """Count the MLPs that keep their norm's input."""
    seen = []
    recipe = norm_sharing.Recipe
    monkeypatch.setattr(norm_sharing, "Recipe", lambda *args: (seen.append(1), recipe(*args))[1])
    return seen


@pytest.mark.parametrize("apart", [False, True], ids=["layers", "every module"])
def test_fully_sharded(pair, apart, monkeypatch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    eager, fused, inputs = pair
    mesh = init_device_mesh(DEVICE.type, (1,))
    for layer in fused.model.layers:
        for part in (layer.post_attention_layernorm, layer.mlp) if apart else ():
            fully_shard(part, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(fused, mesh=mesh)
    seen = shared(monkeypatch)
    assert_same_gradients(fused, eager, inputs)
    # a norm sharded by itself has its weight only for as long as its own call
    assert len(seen) == (0 if apart else 2)
    if apart:
        with pytest.raises(ValueError, match="became a FSDPFusedLlama"):
            unfuse(fused)
