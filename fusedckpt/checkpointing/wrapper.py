"""Modules with a checkpoint as forward: by a wrapper, or by a forward set on the module itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd.private import ActivationWrapper
from fusedckpt.checkpointing.segment import OPTIONS, checkpoint

_NAME = "_checkpoint_wrapped_module"


class Checkpoint(ActivationWrapper):  # type: ignore[misc]  # one of two
    """A module that checkpoints the forward of the module it wraps.

        model.block = Checkpoint(model.block)

    The wrapped module is unchanged, and is `block._checkpoint_wrapped_module`, as in torch's
    `checkpoint_wrapper`; the base class is the same. Names in state_dict, named_parameters,
    named_buffers and named_modules are those without the wrapper. Attributes, length, items and
    iteration are the module's; setting an attribute that the module has sets the module's.

    isinstance(block, Block) is False, as type(block) is Checkpoint. named_children, and tools that
    replace parameters of a module, such as pruning, need the wrapped module itself. Hooks of the
    wrapper run outside of the checkpoint, once per step; those of the module and its children run
    in the recompute too, see `is_recomputing`.

    Args:
        module: any module. Of another Checkpoint only the wrapped module is taken, without its
            options and hooks.
        options: those of `checkpoint`. Keyword arguments of a call go to the module's forward, also
            those with the name of an option.

    Raises:
        TypeError: `module` is not an nn.Module, or `checkpoint` has no such option.
        ImportError: this torch was built without torch.distributed, which has the base class.
    """

    def __init__(self, module: nn.Module, **options: Any):
        if ActivationWrapper is nn.Module:
            raise ImportError("Checkpoint: needs torch.distributed, which this torch lacks")
        if not isinstance(module, nn.Module):
            raise TypeError(f"Checkpoint: module must be an nn.Module, got {type(module).__name__}")
        if unknown := {*options} - OPTIONS:
            raise TypeError(f"Checkpoint: unknown options {', '.join(sorted(unknown))}")
        # subclasses, such as FSDP's, have a state of their own
        super().__init__(getattr(module, _NAME) if type(module) is Checkpoint else module)
        self.training, self._checkpoint_options = module.training, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module, saving only its arguments."""
        return _run(self._checkpoint_wrapped_module, self._checkpoint_options, args, kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield names and modules as nn.Module does, the names without the wrapper."""
        for name, module in nn.Module.named_modules(self, memo, prefix, remove_duplicate):
            yield ".".join(part for part in name.split(".") if part != _NAME), module

    def extra_repr(self) -> str:
        """Return the options."""
        return ", ".join(f"{name}={value!r}" for name, value in self._checkpoint_options.items())

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look for special methods, of this module
        special = name.startswith("__") or _NAME not in vars(self).get("_modules", {})
        return nn.Module.__getattr__(self, name) if special else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = vars(self).get("_modules", {}).get(_NAME)
        own = name in vars(self) or hasattr(type(self), name)
        if own or module is None or not hasattr(module, name):
            super().__setattr__(name, value)
        elif name in module._parameters and isinstance(value, Tensor):
            # also one that is no Parameter, which torch.func.functional_call sets
            module._parameters[name] = value
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        try:
            super().__delattr__(name)
        except AttributeError:
            delattr(self._checkpoint_wrapped_module, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._checkpoint_wrapped_module[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._checkpoint_wrapped_module[key]

    def __bool__(self) -> bool:
        return bool(self._checkpoint_wrapped_module)

    def __len__(self) -> int:
        return len(self._checkpoint_wrapped_module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._checkpoint_wrapped_module)


def checkpoint_in_place(module: nn.Module, **options: Any) -> nn.Module:
    """Set `module.forward` to a checkpoint of the module's forward, and return the module.

    The module's class, names, parameters and hooks are unchanged. Its hooks run outside of the
    checkpoint, once per step. A second call changes the options alone; `del module.forward` undoes
    both.
    """
    own = vars(module).get("forward")
    module.forward = _Forward(module, own._own if isinstance(own, _Forward) else own, options)
    return module


class _Forward:
    """Checkpoints a module's forward: `own`, which was set on the module, or that of its class."""

    def __init__(self, module: nn.Module, own: Any, options: dict[str, Any]):
        # as a bound method has it; in a copy of the module it is the copy
        self.__self__, self._own, self._options = module, own, options

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward without a checkpoint; fusing changes the module's class."""
        module = self.__self__
        if self._own is None and torch.compiler.is_compiling():
            # torch 2.11 traces no binding of methods
            return partial(type(module).forward, module)
        return self._own or type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self.__wrapped__, self._options, args, kwargs)


def _run(call: Any, options: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Checkpoint a call; its keyword arguments may have names of options."""
    return checkpoint(**options)(call)(*args, **kwargs)
