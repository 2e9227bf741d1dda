"""Axolotl: a plugin that fuses the model, takes our checkpoint, and plans on the first batch.

    plugins:
      - fusedckpt.integrations.axolotl.FusedckptPlugin
    fusedckpt_fuse:          # true, which is the default, false, or arguments of fusedckpt.fuse
      head: true
    fusedckpt_checkpoint:    # true, which is the default, false, or arguments
      save_regions: [attention]
    fusedckpt_plan:          # arguments of fusedckpt.plan; none by default
      budget: 20GiB

It fuses where the model is built, before adapters, DDP and FSDP. `gradient_checkpointing: true`
takes `fusedckpt.checkpoint`, see `FuseCallback`.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

# the checkers' environment does not have it
# pyright: reportMissingImports=false
try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, ConfigDict

    from fusedckpt.fusing.fuser import fuse
    from fusedckpt.integrations.transformers import FuseCallback
except ImportError as error:
    # Axolotl logs an ImportError of a plugin, and would train without it
    raise RuntimeError(f"fusedckpt.integrations.axolotl cannot be imported: {error}") from error

__all__ = ["FusedckptArgs", "FusedckptPlugin"]

logger = logging.getLogger("fusedckpt")


class CheckpointArgs(BaseModel):
    """Arguments of the checkpoint that `gradient_checkpointing` takes."""

    model_config = ConfigDict(extra="forbid")

    # regions that are not run again, as "attention"
    save_regions: list[str] = []


class FusedckptArgs(BaseModel):
    """The keys that a configuration of Axolotl may have for fusedckpt."""

    # whether the model is fused, or the arguments of `fusedckpt.fuse`
    fusedckpt_fuse: bool | dict[str, Any] = True
    # whether gradient checkpointing takes `fusedckpt.checkpoint`, or its arguments
    fusedckpt_checkpoint: bool | CheckpointArgs = True
    # the arguments of `fusedckpt.plan`, which is made on the first batch
    fusedckpt_plan: dict[str, Any] | None = None


class FusedckptPlugin(BasePlugin):
    """Fuse the model that Axolotl trains."""

    def get_input_args(self) -> str:
        """Name the keys of the configuration."""
        return f"{FusedckptArgs.__module__}.{FusedckptArgs.__name__}"

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        """Fuse the model, before it gets adapters and is sharded."""
        if cfg.fusedckpt_fuse is not False:
            logger.warning("%s", fuse(model, **_options(cfg.fusedckpt_fuse)))

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[Any]:
        """Return the callback that takes our checkpoint, and plans on the first batch."""
        options: dict[str, Any] = {
            **_options(cfg.fusedckpt_checkpoint),
            **_options(cfg.fusedckpt_fuse),
        }
        if cfg.fusedckpt_fuse is False:
            # no copy of the model runs to find attention
            options["attention"] = False
        return [
            _AfterFuse(
                checkpoint=cfg.fusedckpt_checkpoint is not False,
                plan=cfg.fusedckpt_plan,
                log=lambda result: logger.warning("%s", result),
                **options,
            )
        ]


class _AfterFuse(FuseCallback):
    """FuseCallback for a model that was fused when it was built, or should not be."""

    def _fuse(self, model: nn.Module, state: Any) -> None:
        pass


def _options(value: Any) -> dict[str, Any]:
    """Return the arguments that a key gives, none for a flag; the configuration fills others."""
    if value is None or isinstance(value, bool):
        return {}
    return {name: option for name, option in dict(value).items() if option is not None}
