"""A module that checkpoints its forward and is in all else the module that it was made of."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedckpt.checkpointing.checkpoint import checkpoint

__all__ = ["Checkpoint"]


class Options(NamedTuple):
    """Those of `checkpoint`."""

    preserve_rng_state: bool = True
    preserve_python_rng: bool = False
    debug: bool = False


class Checkpoint(nn.Module):
    """A module whose forward is checkpointed; its state is the given module's own.

        block = Checkpoint(block)

    Both objects share everything that a module has: parameters, buffers, children, hooks, training
    mode, attributes. So names, state_dict, indexing and isinstance are those of the given module,
    and what wraps or shards modules can take either. Hooks of the module itself run outside the
    checkpoint, once per step; those of its children run in the recompute too, see `is_recomputing`.

    Args:
        module: any module with a forward.
        preserve_rng_state, preserve_python_rng, debug: see `checkpoint`.

    Raises:
        TypeError: `module` is no nn.Module, has no forward of its class, or is a TorchScript
            module, compiled, or sharded by FSDP: compile or shard the Checkpoint of it.
    """

    options = Options()

    def __new__(
        cls,
        module: nn.Module,
        *,
        preserve_rng_state: bool = True,
        preserve_python_rng: bool = False,
        debug: bool = False,
    ) -> Any:
        """Return the same module once more, with a forward that is checkpointed."""
        _check_module(module)
        kind = type(module)
        if isinstance(module, Checkpoint):
            # its forward would be recomputed twice
            kind = kind.__mro__[2]
        options = Options(preserve_rng_state, preserve_python_rng, debug)
        checkpointed = object.__new__(_checkpointed(kind, options))
        checkpointed.__dict__ = module.__dict__
        return checkpointed

    def __init__(self, *args: Any, **kwargs: Any):
        # the module was initialised before
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, keeping its arguments alone."""
        return checkpoint(super().forward, *args, **self.options._asdict(), **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class was made here, and has no name to be found by
        return _rebuild, (type(self).__mro__[2], tuple(self.options)), self.__dict__


@cache
def _checkpointed(kind: type[nn.Module], options: Options) -> type[nn.Module]:
    """Return the class that checkpoints the forward of `kind`."""
    return type(f"Checkpoint{kind.__name__}", (Checkpoint, kind), {"options": options})


def _rebuild(kind: type[nn.Module], options: tuple[bool, bool, bool]) -> nn.Module:
    return object.__new__(_checkpointed(kind, Options(*options)))


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"Checkpoint: expected an nn.Module, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("Checkpoint: a TorchScript module cannot be checkpointed")
    name = type(module).__name__
    is_compiled = _is_a(module, "torch._dynamo.eval_frame", "OptimizedModule")
    if is_compiled or module._compiled_call_impl is not None:
        raise TypeError(f"Checkpoint: {name} is compiled: compile the Checkpoint of it instead")
    if "forward" in vars(module):
        raise TypeError(
            f"Checkpoint: the forward of this {name} was replaced, by {vars(module)['forward']!r}: "
            "replace it on the Checkpoint, or call `checkpoint`"
        )
    if type(module).forward is nn.Module.forward:
        raise TypeError(f"Checkpoint: {name} has no forward")
    if _is_a(module, "torch.distributed.fsdp", "FSDPModule"):
        # FSDP finds its state by the object
        raise TypeError(f"Checkpoint: {name} is sharded: fully_shard the Checkpoint of it instead")


def _is_a(module: nn.Module, source: str, name: str) -> bool:
    """Whether a module is of a class of torch's that is slow to import, if nobody did."""
    kind = getattr(sys.modules.get(source), name, None)
    return kind is not None and isinstance(module, kind)
