"""torchtitan: overrides that fuse every block and its experts, and checkpoint it with ours.

    --override.imports fusedckpt.integrations.torchtitan.fused_block
    --override.imports 'fusedckpt.integrations.torchtitan.fused_block={"save": "preact"}'
    --override.imports fusedckpt.integrations.torchtitan.full_checkpoint

    --override.imports 'fusedckpt.integrations.torchtitan.fused_experts={"save": "gate"}'

`full_checkpoint={"save_regions": ["attention"]}` does not run attention again. Blocks are fused
where they are built, before tensor parallelism, checkpoints, compile and FSDP. `fused_experts` runs
the experts of mixtures by the steps of `functional.experts`; under expert parallelism, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# the checkers' environment does not have it
# pyright: reportMissingImports=false
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import TransformerBlock
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger

from fusedckpt.blocks.block import run_linears
from fusedckpt.blocks.builder import ROUTED_GATED, Linears
from fusedckpt.blocks.experts import ExpertOptions
from fusedckpt.checkpointing.regions import patterns_of
from fusedckpt.checkpointing.wrapper import checkpoint_in_place
from fusedckpt.fusing.swap import fuse

__all__ = ["full_checkpoint", "fused_block", "fused_experts"]


@override(target=TransformerBlock.Config, description="fusedckpt.fuse")
def fused_block(config: Any, **options: Any) -> Any:
    """Return a config that builds the block as its own does, and fuses it; options of `fuse`."""

    class FusedBlockConfig(type(config)):
        __slots__ = ()

        def build(self, **kwargs: Any) -> nn.Module:
            block = super().build(**kwargs)
            logger.info(fuse(block, **options))
            return block

    return derive(config, FusedBlockConfig)


class _FullCheckpoint(FullAC):
    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        """As full activation checkpointing's, and the regions that are not run again."""

        save_regions: tuple[str, ...] = ()

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        """Checkpoint the block in place: some releases drop the returned module."""
        names = ("preserve_rng_state", "determinism_check", "debug")
        options = {name: getattr(self.config, name) for name in names}
        # releases that build on torch_remat accept False alone, as that cannot preserve it
        options["preserve_rng_state"] |= not _RNG.default
        return checkpoint_in_place(module, save_regions=self.config.save_regions, **options)


_RNG = next(field for field in fields(FullAC.Config) if field.name == "preserve_rng_state")


@override(target=FullAC.Config, description="fusedckpt.checkpoint")
def full_checkpoint(config: Any, save_regions: str | Sequence[str] = ()) -> Any:
    """Return a config of full activation checkpointing that checkpoints blocks with ours.

    save_regions: that of `fusedckpt.checkpoint`; regions of torch_remat are recomputed in any case.
    """
    made = derive(config, _FullCheckpoint.Config)
    return replace(made, save_regions=patterns_of(save_regions))


class _FusedExperts(GroupedExperts):
    """Experts on rows in the order of their experts; see `functional.experts` for the levels."""

    _fusedckpt_options: ExpertOptions

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Map rows [R, D] by the expert that each belongs to; rows of no expert become zeros."""
        local = (p.to_local() if isinstance(p, DTensor) else p for p in self._parameters.values())
        # as torchtitan multiplies, in any dtype of x
        w1, w2, w3 = (p.bfloat16() for p in local)
        ends = num_tokens_per_expert.cumsum(0)
        rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
        index = torch.searchsorted(ends, rows, right=True)[:, None]
        scores = torch.ones(index.shape, device=x.device)
        pairs = [(w1, None), (w3, None), (w2, None)]
        options = self._fusedckpt_options
        with torch.autocast(x.device.type, enabled=False):
            return run_linears(options, x.bfloat16(), (index, scores), pairs).type_as(x)


@override(target=GroupedExperts.Config, description="fusedckpt.functional.experts")
def fused_experts(config: Any, save: str = "inputs", chunks: int | None = None) -> Any:
    """Return a config whose experts save only their rows; see `functional.experts` for the levels.

    Experts of a class with another forward, or other products, are built as they are.
    """
    linears = Linears(ROUTED_GATED)
    options = ExpertOptions("fused_experts", "silu", save=save, chunks=chunks, linears=linears)
    options.chosen(None)

    class FusedExpertsConfig(type(config)):
        __slots__ = ()

        def build(self, **kwargs: Any) -> nn.Module:
            module = super().build(**kwargs)
            names = [name[:2] for name in module._parameters]
            if type(module) is GroupedExperts and names == ["w1", "w2", "w3"]:
                module.__class__, module._fusedckpt_options = _FusedExperts, options
            return module

    return derive(config, FusedExpertsConfig)
