"""Private touches of torch.distributed: FSDP's parameters, a DTensor's part, its wrappers.

As in `private`, a name that this torch lacks has a fallback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def fsdp_parameters(module: nn.Module) -> list[Any]:
    """Return the record that FSDP2 has of each parameter of a module; none without its names."""
    return [param for group in _fsdp_groups(_fsdp_state(module)) for param in group.fsdp_params]


def fsdp_lazy_state(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the objects and attributes of FSDP2 that the first forward of a root sets.

    None where that was: its root has been found.
    """
    states = {id(state): state for state in map(_fsdp_state, model.modules())}
    for state in states.values():
        if getattr(state, "_is_root", ...) is None:
            places = [state, *_fsdp_groups(state)]
            names = "_is_root", "_state_ctx", "_comm_ctx", "comm_ctx", "post_forward_mesh_info"
            yield from ((place, name) for place in places for name in names if name in vars(place))


def _fsdp_state(module: nn.Module) -> Any:
    if not hasattr(module, "_get_fsdp_state"):
        return None
    return module._get_fsdp_state()  # type: ignore[operator]


def _fsdp_groups(state: Any) -> list[Any]:
    if state is None:
        return []
    # torch 2.11 has one group
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group]


def unsharded_of(param: Any) -> Any:
    """Return the whole parameter of a record of FSDP2, None before it is first gathered."""
    return getattr(param, "_unsharded_param", None)


def is_fsdp_managed(module: nn.Module) -> bool:
    """Whether FSDP1 shards a module's parameters. Without the name, fuse does not say so."""
    return getattr(module, "_is_fsdp_managed_module", False)


def is_fsdp2_module(module: nn.Module) -> bool:
    """Whether a module gathers parameters for its calls by FSDP2."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether a module gathers parameters for its calls, by FSDP1 or FSDP2."""
    return is_fsdp2_module(module) or "_fsdp_wrapped_module" in module._modules


class Ranks(NamedTuple):
    """The ranks on which DistributedDataParallel calls a module."""

    group: Any
    device: torch.device

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the greatest of each number on all ranks."""
        mine = torch.tensor(numbers, dtype=torch.int32, device=self.device)
        if numbers:
            torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX, self.group)
        return mine.tolist()


def ranks_of(module: nn.Module) -> Ranks | None:
    """Return the ranks that call a module now, by DistributedDataParallel around it."""
    parallel: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if parallel is None or parallel.module is not module:
        return None
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return Ranks(parallel.process_group, device)


def local_of(tensor: Any) -> Any:
    """Return a DTensor's part on this rank, any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def activation_wrappers() -> tuple[Any, ...]:
    """Return torch's CheckpointWrapper and OffloadWrapper; empty tuples if no program uses them."""
    library = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return tuple(getattr(library, f"{name}Wrapper", ()) for name in ("Checkpoint", "Offload"))
