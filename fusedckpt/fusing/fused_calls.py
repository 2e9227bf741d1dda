"""Which fused modules a step's forward runs, how, and the bytes that other paths cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fusedckpt.autograd.private import local_of
from fusedckpt.fusing import fuse_report
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.memory import SavedStorage


@dataclass(frozen=True)
class FusedModule:
    """A fused module in one step."""

    # its name in the model
    name: str
    # its text in the report of `fuse`
    change: str
    # how often its forward was called; 0 in torch.compile'd code, too, which is not looked into
    calls: int
    # why it ran as its class would in the last such call, None if all ran fused
    reason: str | None
    # the bytes that it saves more for that, at most; None if unknown
    extra_bytes: int | None


class FusedCalls:
    """Sees the calls of fused modules in a forward."""

    def __init__(self, model: nn.Module):
        self._parts = list(fuse_report.placed_parts(model))
        self._inner: dict[nn.Module, list[str]] = {}
        for part in self._parts:
            self._inner.setdefault(part.module, []).append(part.inner)
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: Counter[nn.Module] = Counter()
        self._tokens: dict[nn.Module, int] = {}
        self._reasons: dict[tuple[nn.Module, str], NotFused] = {}
        fuse_report.forget_notes(model)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow every module call made inside."""
        hook = register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            hook.remove()
        # compiled code leaves notes, too
        for module in self._inner:
            self._note(module)

    def modules(self, saved: Iterable[SavedStorage]) -> tuple[FusedModule, ...]:
        """Return every fused module, given the storages that the step saved."""
        storages = list(saved)
        modules = []
        for name, module, inner, part in self._parts:
            reason = self._reasons.get((module, inner))
            tokens = self._tokens.get(module)
            extra_bytes = 0 if reason is None else None
            if reason is not None and tokens is not None and part.saved is not None:
                before, after = part.saved
                # a checkpoint around it may drop storages
                saved_by_it = _saved_by(self._names[module], storages)
                extra_bytes = min(round(tokens * (before - after)), saved_by_it)
            modules.append(
                FusedModule(
                    name,
                    part.change,
                    self._calls[module],
                    reason=None if reason is None else str(reason),
                    extra_bytes=extra_bytes,
                )
            )
        return tuple(modules)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._inner:
            return
        self._calls[module] += 1
        if self._note(module) and isinstance(output, Tensor):
            self._tokens[module] = self._tokens.get(module, 0) + _tokens(output)

    def _note(self, module: nn.Module) -> bool:
        """Note why parts of a module did not run fused; return whether any did not."""
        reasons = {inner: fuse_report.reason_now(module, inner) for inner in self._inner[module]}
        fallbacks.take_fallback(module)
        reasons_by_part = {
            (module, inner): reason for inner, reason in reasons.items() if reason is not None
        }
        self._reasons.update(reasons_by_part)
        return bool(reasons_by_part)


def _saved_by(name: str, storages: list[SavedStorage]) -> int:
    """Return the bytes that a module and those in it saved."""
    inside = [s for s in storages if not name or f"{s.owner}.".startswith(f"{name}.")]
    return sum(storage.nbytes for storage in inside)


def _tokens(output: Tensor) -> int:
    """Return how many rows this process has of a module's output, a tensor of any class."""
    local = local_of(output)
    if local.is_nested:
        return local.values().shape[0] if local.layout == torch.jagged else 0
    return math.prod(local.shape[:-1])
