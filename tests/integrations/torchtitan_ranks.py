"""One of two ranks: torchtitan's Llama 3 under FSDP, with our overrides and without.

Run by test_torchtitan.py.
"""

from __future__ import annotations

import os

import torch
import torchtitan.distributed.parallel_dims as parallel_dims
from support import flops
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import saved_tensors

OURS = "fusedckpt.integrations.torchtitan."
LAYERS, TOKENS = 2, 16


def build(imports: list, checkpointing: FullAC.Config | None) -> nn.Module:
    """Return what torchtitan's Trainer makes of a config, on the CPU and in float32."""
    config = llama3_debugmodel()
    config.activation_checkpoint = checkpointing
    config.parallelism.spmd_backend = "default"
    config.training.mixed_precision_param = "float32"
    config.override.imports = imports
    spec = config.model_spec
    spec.model.layers = spec.model.layers[:LAYERS]
    for layer in spec.model.layers:
        # torchtitan's other attentions train on a GPU alone
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model.update_from_config(config=config)
    replaced = apply_overrides(config.override, config)
    assert len(replaced) == sum(LAYERS if "block" in str(one) else 1 for one in imports)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model = spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims.from_config(config.parallelism, 2),
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no sum that is scaled
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    return model.train()


def step(model: nn.Module, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    model.zero_grad()
    loss = model(torch.randint(0, 2048, (2, TOKENS), generator=generator)).square().mean()
    loss.backward()
    return [loss.detach(), *(whole(p.grad) for p in model.parameters())]


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def kept(model: nn.Module) -> int:
    with saved_tensors() as saved:
        model(torch.zeros(2, TOKENS, dtype=torch.long))
    return saved.nbytes


@forced_path("aten")
def main(rank: int) -> None:
    os.environ["WORLD_SIZE"] = "2"
    parallel_dims.device_type = "cpu"
    eager = build([], None)
    expected = step(eager, rank)

    fused = build([f"{OURS}fused_block"], None)
    report = fusedckpt.fuse(fused)
    same(step(fused, rank), expected)
    # each block's norms, attention and feed-forward, and no one of them ran as its class
    assert len(report.already) == 4 * LAYERS
    assert not report.fallbacks
    d, f, rows = 256, 768, 2 * TOKENS
    # a number and a normalized row of each norm, and its output; query, key and value; gate,
    # silu(gate), up, the product
    values = rows * (2 * (1 + d) + 2 * d + 3 * d + 4 * f)
    # the rotations of all positions, which each layer has
    rotations = sum(b.nbytes for b in eager.buffers()) // LAYERS
    assert kept(eager) - kept(fused) == LAYERS * (4 * values + rotations)

    preact = build([(f"{OURS}fused_block", {"save": "preact"})], None)
    same(step(preact, rank), expected)
    # gate and up; attention is not run again
    assert kept(preact) - kept(fused) == LAYERS * (4 * rows * (2 * f + 3 * d) + rotations)

    theirs = build([], FullAC.Config())
    ours = build([f"{OURS}fused_block", f"{OURS}full_checkpoint"], FullAC.Config())
    same(step(ours, rank), expected)
    assert [*ours.state_dict()] == [*eager.state_dict()]
    # the last GEMM of each block is not run again
    last = 2 * rows * d * f
    counts = [flops(lambda model=model: step(model, rank)) for model in (theirs, ours)]
    assert counts[0] - counts[1] == LAYERS * last
