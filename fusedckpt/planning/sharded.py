"""Planned modules that FSDP2 shards, `fully_shard(module)`: before a plan is applied, or after.

`fully_shard` makes a subclass of a module's class, as a plan does, and gathers parameters in hooks
of the module's call. A segment's recompute calls forwards without their hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from fusedckpt.autograd.backward import backward_id

__all__ = ["class_name", "gathering"]


def _is_sharded(module: nn.Module) -> bool:
    # who has not imported it has sharded nothing
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, the same after `fully_shard` as before."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if _is_sharded(module) else name


def gathering(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the module's forward, which in a recompute finds the parameters it found before."""
    return _Gathering(module, forward) if _is_sharded(module) else forward


class _Gathering:
    """A sharded module's forward; in backward it gathers parameters where no hook has."""

    def __init__(self, module: Any, forward: Callable[..., Any]):
        self.__self__, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if backward_id() == -1:
            return self._forward(*args, **kwargs)
        module = self.__self__
        before = [*module.parameters()]
        module.unshard()
        gathered = any(a is not b for a, b in zip(before, module.parameters(), strict=True))
        try:
            return self._forward(*args, **kwargs)
        finally:
            # of the module whose backward it is, FSDP's own hook gives them back
            if gathered:
                module.reshard()
