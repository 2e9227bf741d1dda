"""ms-swift: a callback, which fuses the model when the trainer is made.

    # fused.py
    from fusedckpt.integrations.swift import register_callback

    register_callback()

    swift sft --external_plugins fused.py --callbacks fusedckpt ...

`--external_plugins` needs a file of yours: it puts the file's folder on Python's path, and the
modules beside this one have the names of other libraries.
"""

from __future__ import annotations

from typing import Any

# the checkers' environment does not have it
# pyright: reportMissingImports=false
from swift.callbacks import callbacks_map

from fusedckpt.integrations.transformers import FuseCallback

__all__ = ["register_callback"]


def register_callback(name: str = "fusedckpt", **options: Any) -> None:
    """Register `FuseCallback` as a callback of ms-swift.

    It fuses after adapters, and before DDP, FSDP and torch.compile.

    Args:
        name: its name in `--callbacks`.
        options: those of `FuseCallback`.
    """
    # ms-swift calls it with its arguments and the trainer
    callbacks_map[name] = lambda args, trainer: FuseCallback(**options)
