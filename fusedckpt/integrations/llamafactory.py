"""LLaMA-Factory v1: a kernel plug-in, which fuses the model as it is loaded.

    # train.py, run as `python train.py config.yaml`, or by torchrun
    from fusedckpt.integrations.llamafactory import register_kernel
    from llamafactory.v1.trainers.sft_trainer import run_sft

    register_kernel()
    run_sft()

with `kernel_config: {name: fusedckpt}` in the configuration. LLaMA-Factory's own commands import no
plug-in of others: there the name is not registered, and they raise. Its trainers of before v1 take
transformers' callbacks, see the README.
"""

from __future__ import annotations

from typing import Any

# the checkers' environment does not have it
# pyright: reportMissingImports=false
from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin
from llamafactory.v1.utils import logging
from torch import nn

from fusedckpt.fusing.fuser import fuse

__all__ = ["register_kernel"]

# LLaMA-Factory's logger, with the level that it sets
logger = logging.get_logger()


def register_kernel(name: str = "fusedckpt", **options: Any) -> None:
    """Register `fusedckpt.fuse` as a kernel plug-in of LLaMA-Factory v1.

    It fuses after adapters, and before the model is sharded or wrapped. `include_kernels` of the
    configuration is not read.

    Args:
        name: its name in `kernel_config`.
        options: those of `fusedckpt.fuse`.
    """

    def apply(model: nn.Module, include_kernels: Any = None) -> nn.Module:
        logger.info_rank0(str(fuse(model, **options)))
        return model

    KernelPlugin(name).register()(apply)
