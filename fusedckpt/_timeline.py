"""How memory rises and falls through one training step, and which module runs meanwhile.

The profiler records every allocation and free, also those inside ops. Instant markers that hooks on
all modules set say which module's forward runs (hooks of single modules would keep fused layers
from fusing). In backward nothing is hooked: tensor hooks would hold gradients longer and module
backward hooks put views around outputs. The profiler's events carry autograd's sequence number
instead, that of the forward op which made a node and of the engine's call of that node. CUDA's
caching allocator reports to the same profiler; that part has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.profiler import record_function

from fusedckpt.memory import live_bytes

__all__ = ["LOSS", "OPTIMIZER", "ROOT", "Moment", "Watch", "timeline"]

# what stands for a module's name: the model itself, what runs outside of it
ROOT, LOSS, OPTIMIZER = "(model)", "(loss)", "(optimizer)"
_MARK = "fusedckpt.report:"
_NODE = "autograd::engine::evaluate_function: "


class Moment(NamedTuple):
    """Live bytes after one allocation or free, `time_ns` nanoseconds into the step."""

    time_ns: int
    live_bytes: int
    # forward, backward or optimizer
    phase: str
    module: str


class Watch:
    """Knows which module's forward runs, and leaves markers for `timeline` in the profile."""

    def __init__(self, model: nn.Module):
        self._names = {module: name or ROOT for name, module in model.named_modules()}
        self._running: list[str] = []

    def current(self) -> str:
        """Return the name of the innermost module that runs."""
        return self._running[-1] if self._running else LOSS

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow every module call made inside."""
        with ExitStack() as hooks:
            enter = register_module_forward_pre_hook(self._enter)
            hooks.callback(enter.remove)
            # after an exception too: a checkpoint that stops its recompute early raises one
            leave = register_module_forward_hook(self._leave, always_call=True)
            hooks.callback(leave.remove)
            yield

    def phase(self, name: str) -> None:
        """Mark the beginning of forward, backward, optimizer, or the end."""
        _mark("phase", name)

    def _enter(self, module: nn.Module, args: Any) -> None:
        # a compiled region is one module: its ops run in another order
        if torch.compiler.is_compiling() or module not in self._names:
            return
        self._running.append(self._names[module])
        _mark("enter", self._names[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._names:
            return
        self._running.pop()
        _mark("leave", "")


def _mark(kind: str, name: str) -> None:
    with record_function(f"{_MARK}{kind}:{name}"):
        pass


class _Item(NamedTuple):
    """One thing in a profile that matters here."""

    time_ns: int
    # phase, enter, leave: markers; op, node, done: autograd; memory
    kind: str
    content: Any


def timeline(events: Iterable[Any], device: torch.device, resident: int) -> list[Moment]:
    """Read one step from a profile's event tree, where `resident` bytes lived at its start."""
    items = sorted(_items(events, device), key=lambda item: item.time_ns)
    lives = live_bytes(item.content for item in items if item.kind == "memory")
    sweep = _Sweep()
    start = live = 0
    moments: list[Moment] = []
    for item in items:
        if item.kind == "memory":
            live = next(lives)
        else:
            sweep.follow(item)
        start = start or item.time_ns
        if sweep.phase and item.kind in ("memory", "phase"):
            time_ns = item.time_ns - start
            moments.append(Moment(time_ns, resident + live, sweep.phase, sweep.module))
    return moments


class _Sweep:
    """Follows markers and autograd nodes in the order of time."""

    def __init__(self):
        self.phase = ""
        self._running: list[str] = []
        # by sequence number, who ran the forward op that made the node
        self._makers: dict[int, str] = {}
        self._last = LOSS

    @property
    def module(self) -> str:
        """Who runs now; between two nodes of a backward, who ran the former one's forward."""
        return self._running[-1] if self._running else self._last

    def follow(self, item: _Item) -> None:
        """Take the next marker, op or node."""
        getattr(self, f"_{item.kind}")(item.content)

    def _phase(self, name: str) -> None:
        self.phase = name if name != "end" else ""
        self._last = {"forward": ROOT, "optimizer": OPTIMIZER}.get(name, LOSS)

    def _enter(self, name: str) -> None:
        self._running.append(name)

    def _leave(self, _: str) -> None:
        self._running.pop()
        if not self._running:
            self._last = LOSS

    def _op(self, sequence_number: int) -> None:
        # the number is the next node's: of all ops that show it, the last one made the node
        self._makers[sequence_number] = self.module

    def _node(self, sequence_number: int) -> None:
        # AccumulateGrad has no number, and runs right after the node that fed it
        self._running.append(self._makers.get(sequence_number, self.module))

    def _done(self, _: int) -> None:
        self._last = self._running.pop()


def _items(events: Iterable[Any], device: torch.device) -> Iterator[_Item]:
    for event in events:
        fields, start = event.extra_fields, event.start_time_ns
        number = getattr(fields, "sequence_number", -1)
        if event.name == "[memory]":
            if _same(fields.device, device):
                yield _Item(start, "memory", fields)
        elif event.name.startswith(_MARK):
            kind, name = event.name.removeprefix(_MARK).split(":", 1)
            yield _Item(start, kind, name)
        elif event.name.startswith(_NODE):
            yield _Item(start, "node", number)
            yield from _items(event.children, device)
            yield _Item(event.end_time_ns, "done", number)
        else:
            if number >= 0:
                yield _Item(start, "op", number)
            yield from _items(event.children, device)


def _same(found: torch.device, wanted: torch.device) -> bool:
    return found.type == wanted.type and (found.type == "cpu" or found.index == wanted.index)
