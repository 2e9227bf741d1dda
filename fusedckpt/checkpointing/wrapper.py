"""`checkpoint_module`: a module that is checkpointed in place, by a forward that is set on it.

There is no wrapper: code that reads, copies, shards or loads a model gets the module itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fusedckpt.autograd import arguments
from fusedckpt.checkpointing.entry import OPTIONS, checkpoint


def checkpoint_module(module: nn.Module, **options: Any) -> nn.Module:
    """Checkpoint every call of a module's forward, and return the module.

        for block in model.blocks:
            fusedckpt.checkpoint_module(block)

    The module keeps its class, its names, its parameters and its hooks; only `module.forward` is
    set. Its hooks run outside of the checkpoint, once per step; those of the modules inside run in
    the recompute too, see `is_recomputing`. A second call replaces the options, and
    `del module.forward` undoes both. torch's `apply_activation_checkpointing` takes this function
    as its `checkpoint_wrapper_fn`.

    Args:
        module: any module.
        options: those of `checkpoint`. Keyword arguments of a call go to the module's forward, also
            those with the name of an option.

    Raises:
        TypeError: `module` is not an nn.Module, or `checkpoint` has no such option.
        ValueError: use_reentrant is True.
    """
    arguments.module("checkpoint_module", "module", module)
    if unknown := {*options} - OPTIONS:
        raise TypeError(
            f"checkpoint_module: unknown options {', '.join(sorted(unknown))}: "
            f"pass options of checkpoint, {', '.join(sorted(OPTIONS))}"
        )
    # raises where a value is not valid
    checkpoint(**options)
    present = vars(module).get("forward")
    if isinstance(present, CheckpointedForward):
        present = present.set_forward
    module.forward = CheckpointedForward(module, present, options)
    return module


class CheckpointedForward:
    """Checkpoints a module's forward: one that was set on the module, or that of its class."""

    def __init__(self, module: nn.Module, set_forward: Any, options: dict[str, Any]):
        # as a bound method has it; in a deep copy of the module it is the copy
        self.__self__ = module
        # the forward that was set on the module before, or None
        self.set_forward = set_forward
        self.options = options

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward without a checkpoint."""
        return self._forward_of(self.__self__)

    def _forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return a module's forward without a checkpoint; fusing changes the module's class."""
        if self.set_forward is not None:
            return self.set_forward
        if torch.compiler.is_compiling():
            # torch 2.11 traces no binding of methods
            return partial(type(module).forward, module)
        # not a plan's, which calls this
        forwards = (vars(kind).get("forward") for kind in type(module).__mro__)
        return next(f for f in forwards if f and not hasattr(f, "is_role")).__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, saving only its arguments."""
        module = self.__self__
        if not torch.compiler.is_compiling():
            # shallow copies, such as replicas of DataParallel, have this object as their forward:
            # the caller's frame alone knows which module is called
            caller = sys._getframe(1).f_locals.get("self")
            if isinstance(caller, nn.Module) and vars(caller).get("forward") is self:
                module = caller
        return checkpoint(**self.options)(self._forward_of(module))(*args, **kwargs)
