"""A diffusion transformer of diffusers: recipes reach its modulated norms and gates.

    python -m bench.examples.diffusion

Prints the report of `fuse`, then the bytes that a step saves in four ways: plain, fused, fused with
recipes, which save less again, and diffusers' checkpointing by our checkpoint, which saves least.
The losses are equal.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers import DiTTransformer2DModel  # type: ignore[reportMissingImports] # no extra has it

import fusedckpt
from fusedckpt.integrations.transformers import use_checkpoint
from fusedckpt.memory import saved_tensors


def ways(model: Any) -> dict[str, Any]:
    """Return copies of the model, each prepared in its way."""
    models = {name: copy.deepcopy(model) for name in ("plain", "fused", "recipes", "checkpoint")}
    print(fusedckpt.fuse(models["fused"]))
    fusedckpt.fuse(models["recipes"], recompute_elementwise=True)
    fusedckpt.fuse(models["checkpoint"])
    models["checkpoint"].enable_gradient_checkpointing()
    use_checkpoint(models["checkpoint"])
    return models


def main() -> dict[str, int]:
    """Return the saved bytes by way."""
    torch.manual_seed(0)
    # recipes leave tensors below 1 MiB as they are; here activations are no smaller
    model: Any = DiTTransformer2DModel(
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=16,
        sample_size=64,
    ).train()
    noisy, noise = torch.randn(2, 4, 4, 64, 64).unbind()
    inputs = {"timestep": torch.tensor([10, 200, 500, 900]), "class_labels": torch.arange(4)}
    sizes = {}
    for name, way in ways(model).items():
        # a tenth of the labels is dropped at random
        torch.manual_seed(0)
        with saved_tensors() as saved:
            loss = (way(noisy, **inputs).sample - noise).square().mean()
        sizes[name] = saved.nbytes
        loss.backward()
        print(f"{name:12}{saved.nbytes:12,} bytes, loss {loss.item():.4f}")
    return sizes


if __name__ == "__main__":
    main()
