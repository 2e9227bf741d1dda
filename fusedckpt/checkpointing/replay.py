"""What a segment's recompute must find as its forward found it, besides its arguments.

Random number generators, autocast, the kernels of attention, the default device, and the
parameters and buffers of every module that the segment's function holds.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from fusedckpt.checkpointing.holdings import Holdings
from fusedckpt.checkpointing.module_state import ModuleState
from fusedckpt.checkpointing.versions import stale, version_of

_current_kernels: Any = getattr(torch.nn.attention, "_cur_sdpa_kernel_backends", None)


class Conditions:
    """What a forward found, taken before it runs; `restored` brings it back for the recompute."""

    def __init__(
        self,
        held: Holdings,
        devices: Iterable[torch.device],
        *,
        rng: bool,
        python_rng: bool,
    ):
        self.modules = ModuleState(held.modules)
        # others, such as counters and flags, may well change
        kinds = nn.Module, torch.Tensor, types.FunctionType
        self.globals = [entry for entry in held.globals if isinstance(entry.value, kinds)]
        self.tensors = [(tensor, version_of(tensor)) for tensor in held.tensors]
        read = (*(entry.tensor for entry in self.modules.parameters), *held.tensors)
        devices = {*devices, *(tensor.device for tensor in read)}
        if torch.cuda.is_initialized() and {device.type for device in devices} <= {"cpu"}:
            # what runs there is reached by a way that is not looked into
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self.random = None
        if rng or python_rng:
            self.random = _Random(devices, held.generators if rng else (), rng, python_rng)
        kinds = {"cpu", *(device.type for device in devices)}
        self.autocasts = [(k, _autocast(k)) for k in kinds if torch.amp.is_autocast_available(k)]
        self.device = torch.get_default_device()
        self.attention = _attention_kernels()

    def settle(self) -> None:
        """Learn, once the forward has run, which buffers it changed; let go of other copies."""
        self.modules.settle()

    def check(self) -> None:
        """Raise where what the segment reads was written in place since its forward ran."""
        self.modules.check()
        for space, name, value in self.globals:
            if space.get(name) is not value:
                raise RuntimeError(
                    f"checkpoint: the global {name!r} was bound to another object between forward "
                    "and backward: pass what it stands for as an argument"
                )
        for tensor, version in self.tensors:
            if version_of(tensor) != version:
                raise RuntimeError(stale("a tensor that it reads", tensor))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run as the forward ran, and leave everything outside as it is."""
        with ExitStack() as stack:
            if self.random is not None:
                stack.enter_context(self.random.restored())
            for kind, options in self.autocasts:
                if _autocast(kind) != options:
                    stack.enter_context(torch.autocast(kind, **options))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.attention and self.attention != _attention_kernels():
                stack.enter_context(sdpa_kernel(self.attention))
            stack.enter_context(self.modules.restored())
            yield


def _autocast(kind: str) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _attention_kernels() -> list[Any]:
    """Return those that scaled_dot_product_attention may choose from, as sdpa_kernel set them."""
    return [] if _current_kernels is None else _current_kernels()


class _Random:
    """States of random number generators: torch's, those that it holds, Python's, numpy's."""

    def __init__(
        self,
        devices: Iterable[torch.device],
        generators: Iterable[torch.Generator],
        torch_rng: bool,
        python_rng: bool,
    ):
        self.generators = list(generators)
        self.devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.torch_rng, self.python_rng = torch_rng, python_rng
        on_cuda = torch_rng and any(device.type == "cuda" for device in self.devices)
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "checkpoint: the state of a random number generator cannot be read while a CUDA "
                "graph is captured: pass preserve_rng_state=False"
            )
        self.states = self._read()

    def _read(self) -> tuple[Any, ...]:
        torch_states = python_states = None
        if self.torch_rng:
            others = [_rng(device).get_rng_state(*_index(device)) for device in self.devices]
            own = [generator.get_state() for generator in self.generators]
            torch_states = torch.get_rng_state(), others, own
        if self.python_rng:
            python_states = random.getstate(), np.random.get_state()
        return torch_states, python_states

    def _write(self, states: tuple[Any, ...]) -> None:
        torch_states, python_states = states
        if torch_states is not None:
            torch.set_rng_state(torch_states[0])
            for device, state in zip(self.devices, torch_states[1], strict=True):
                _rng(device).set_rng_state(state, *_index(device))
            for generator, state in zip(self.generators, torch_states[2], strict=True):
                generator.set_state(state)
        if python_states is not None:
            random.setstate(python_states[0])
            np.random.set_state(python_states[1])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring the states back, and those of now afterwards."""
        now = self._read()
        self._write(self.states)
        try:
            yield
        finally:
            self._write(now)


def _rng(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # the one MPS device goes unnamed
    return () if device.type == "mps" else (device,)
