"""Private touches of torch.distributed: FSDP's parameters, a DTensor's part, its wrappers.

As in `private`, a name that this torch lacks has a fallback.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def fsdp_parameters(module: nn.Module) -> list[Any]:
    """Return the record that FSDP2 has of each parameter of a module; none without its names."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    # torch 2.11 has one group
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [param for group in groups if group for param in group.fsdp_params]


def unsharded_of(param: Any) -> Any:
    """Return the whole parameter of a record of FSDP2, None before it is first gathered."""
    return getattr(param, "_unsharded_param", None)


def is_fsdp_managed(module: nn.Module) -> bool:
    """Whether FSDP1 shards a module's parameters. Without the name, fuse does not say so."""
    return getattr(module, "_is_fsdp_managed_module", False)


def local_of(tensor: Any) -> Any:
    """Return a DTensor's part on this rank, any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def activation_wrappers() -> tuple[Any, ...]:
    """Return torch's CheckpointWrapper and OffloadWrapper; empty tuples if no program uses them."""
    library = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return tuple(getattr(library, f"{name}Wrapper", ()) for name in ("Checkpoint", "Offload"))
