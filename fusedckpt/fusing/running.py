"""Modules that mix tokens, found by running the model once on a batch.

A copy runs, without gradients: it shares the parameters, and all else is its own, so that nothing
that a forward writes is left behind. It finds the innermost module with weights that runs where a
function of attention or of a mixer is called, whatever code calls it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fusedckpt.checkpointing.attention import NAME, watched
from fusedckpt.checkpointing.scans import CONVOLUTION, SCAN
from fusedckpt.fusing.mixing import innermost
from fusedckpt.fusing.replica import undisturbed


def mixers_of(model: nn.Module, batch: Any) -> dict[str, frozenset[str]] | str:
    """Return the names of the modules that mix tokens, and kinds of functions; or why it failed.

    batch: the model's arguments, a dict of them, a tuple, or one tensor.
    """
    try:
        # generators too, whose states are put back
        shared = {id(x): x for x in (*model.parameters(), *_generators(model))}
        twin = copy.deepcopy(model, shared)
    except Exception as error:
        return f"a copy of the model raised {type(error).__name__}: {error}"
    states = [(g, g.get_state()) for g in _generators(model)]
    seen = _Seen()
    try:
        seen.run(twin.train(), batch)
    except Exception as error:
        return f"the model raised {type(error).__name__}: {error}"
    finally:
        for generator, state in states:
            generator.set_state(state)
    names = {module: name for name, module in twin.named_modules()}
    return innermost({names[m]: frozenset(kinds) for m, kinds in seen.kinds.items() if m in names})


def _generators(model: nn.Module) -> list[torch.Generator]:
    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Generator)]


class _Seen:
    """The modules that run where functions are called."""

    def __init__(self) -> None:
        self.kinds: dict[nn.Module, set[str]] = {}
        self._running: list[nn.Module] = []
        self._thread = threading.get_ident()

    def run(self, model: nn.Module, batch: Any) -> None:
        """Run a model on a batch."""
        args, kwargs = _arguments(batch)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            with undisturbed(device), torch.no_grad(), watched(self._see):
                model(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._running[-1:] == [module]:
            self._running.pop()

    def _see(self, kind: str) -> None:
        if kind not in (NAME, SCAN, CONVOLUTION) or threading.get_ident() != self._thread:
            return
        for module in reversed(self._running):
            # a module without weights is there for the call alone
            if any(p.dim() > 1 for p in module.parameters()):
                self.kinds.setdefault(module, set()).add(kind)
                return


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    return tuple(batch), {}
