"""torchtitan: overrides that fuse every block, and checkpoint it by fusedckpt.

    --override.imports fusedckpt.integrations.torchtitan.fused_block
    --override.imports 'fusedckpt.integrations.torchtitan.fused_block={"save": "preact"}'
    --override.imports fusedckpt.integrations.torchtitan.full_checkpoint

`full_checkpoint={"save_regions": ["attention"]}` does not run attention again. Blocks are fused
where they are built, before tensor parallelism, checkpoints, compile and FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

# the checkers' environment does not have it
# pyright: reportMissingImports=false
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import TransformerBlock
from torchtitan.tools.logging import logger

from fusedckpt.checkpointing.regions import patterns_of
from fusedckpt.checkpointing.wrapper import checkpoint_module
from fusedckpt.fusing.fuser import fuse

__all__ = ["full_checkpoint", "fused_block"]


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
        return checkpoint_module(module, save_regions=self.config.save_regions, **options)


_RNG = next(field for field in fields(FullAC.Config) if field.name == "preserve_rng_state")


@override(target=FullAC.Config, description="fusedckpt.checkpoint")
def full_checkpoint(config: Any, save_regions: str | Sequence[str] = ()) -> Any:
    """Return a config of full activation checkpointing that checkpoints blocks by fusedckpt.

    save_regions: that of `fusedckpt.checkpoint`; regions of torch_remat are recomputed in any case.
    """
    made = derive(config, _FullCheckpoint.Config)
    return replace(made, save_regions=patterns_of(save_regions))
