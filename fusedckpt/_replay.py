"""What a segment's recompute must find as its forward found it, besides its arguments.

Random number generators, autocast, the default device, and the parameters and buffers of every
module that the segment's function holds.
"""

from __future__ import annotations

import functools
import random
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# names of the buffers that a module's forward was seen to change
_changing: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class Holdings:
    """Modules and tensors that a function holds: as itself, in bound methods, partials, closures.

    What it reaches otherwise, through globals or attributes of other objects, is not found.
    """

    def __init__(self, *objects: Any):
        self.modules: dict[nn.Module, None] = {}
        self.tensors: list[Tensor] = []
        for obj in objects:
            self._find(obj, depth=4)

    def _find(self, obj: Any, depth: int) -> None:
        if isinstance(obj, nn.Module):
            self.modules.update(dict.fromkeys(obj.modules()))
        elif isinstance(obj, Tensor):
            self.tensors.append(obj)
        elif depth and not isinstance(obj, (str, int, float, type(None))):
            for part in _parts(obj):
                self._find(part, depth - 1)


def _parts(obj: Any) -> Iterable[Any]:
    if isinstance(obj, types.MethodType):
        return obj.__self__, obj.__func__
    if isinstance(obj, functools.partial):
        return obj.func, *obj.args, *obj.keywords.values()
    if isinstance(obj, types.FunctionType):
        cells = obj.__closure__ or ()
        return [cell.cell_contents for cell in cells if cell != types.CellType()]
    if isinstance(obj, Mapping):
        return obj.values()
    return obj if isinstance(obj, (list, tuple)) else ()


class _Buffer(NamedTuple):
    """A buffer before the segment ran; `value` is a copy where the forward may change it."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor | None

    @property
    def changed(self) -> bool:
        return (
            self.module._buffers.get(self.name) is not self.tensor
            or self.tensor._version != self.version
        )


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
        parameters = [p for m in held.modules for p in m._parameters.values() if p is not None]
        self.versions = [(tensor, tensor._version) for tensor in (*parameters, *held.tensors)]
        self.buffers = [buffer for m in held.modules if m._buffers for buffer in _buffers(m)]
        devices = {*devices, *(tensor.device for tensor, _ in self.versions)}
        self.random = _Random(devices, rng, python_rng) if rng or python_rng else None
        kinds = {"cpu", *(device.type for device in devices)}
        self.autocasts = [(k, _autocast(k)) for k in kinds if torch.amp.is_autocast_available(k)]
        self.device = torch.get_default_device()

    def settle(self) -> None:
        """Learn, once the forward has run, which buffers it changed; let go of other copies."""
        settled = []
        for buffer in self.buffers:
            known = _changing.setdefault(buffer.module, set())
            if buffer.changed:
                known.add(buffer.name)
            stays = buffer.name in known or _has_statistics(buffer.module)
            version = buffer.tensor._version
            settled.append(buffer if stays else buffer._replace(version=version, value=None))
        self.buffers = settled

    def check(self) -> None:
        """Raise where what the segment reads was written in place since its forward ran."""
        for tensor, version in self.versions:
            if tensor._version != version:
                kind = "a parameter" if isinstance(tensor, nn.Parameter) else "a tensor it reads"
                raise RuntimeError(stale(kind, tensor))
        for buffer in self.buffers:
            if buffer.value is None and buffer.changed:
                name = f"buffer {buffer.name!r} of {type(buffer.module).__name__}"
                raise RuntimeError(stale(name, buffer.tensor))

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
            stack.enter_context(self._buffers_before())
            yield

    @contextmanager
    def _buffers_before(self) -> Iterator[None]:
        """Let the recompute see, and change, copies of the buffers that the forward changed."""
        after = []
        for module, name, _, _, value in self.buffers:
            if value is not None:
                after.append((module, name, module._buffers[name]))
                module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for module, name, tensor in after:
                module._buffers[name] = tensor


def _buffers(module: nn.Module) -> Iterator[_Buffer]:
    """Copy those that the forward may change: all of a module that was never seen to run."""
    known = _changing.get(module)
    for name, tensor in module._buffers.items():
        if tensor is None:
            continue
        copies = known is None or name in known or _has_statistics(module)
        value = tensor.detach().clone() if copies else None
        yield _Buffer(module, name, tensor, tensor._version, value)


def _has_statistics(module: nn.Module) -> bool:
    # their kernels write the running statistics without raising the version
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def stale(what: str, tensor: Tensor | None = None) -> str:
    """Say that something was written in place between forward and backward."""
    which = "" if tensor is None else f" ({tensor.dtype} {list(tensor.shape)})"
    return (
        f"checkpoint: {what}{which} was changed in place between forward and backward, so that "
        "recomputing would give other values"
    )


def _autocast(kind: str) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


class _Random:
    """States of the random number generators: torch's on the CPU and devices, Python's, numpy's."""

    def __init__(self, devices: Iterable[torch.device], torch_rng: bool, python_rng: bool):
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
            torch_states = torch.get_rng_state(), others
        if self.python_rng:
            python_states = random.getstate(), np.random.get_state()
        return torch_states, python_states

    def _write(self, states: tuple[Any, ...]) -> None:
        torch_states, python_states = states
        if torch_states is not None:
            torch.set_rng_state(torch_states[0])
            for device, state in zip(self.devices, torch_states[1], strict=True):
                _rng(device).set_rng_state(state, *_index(device))
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
