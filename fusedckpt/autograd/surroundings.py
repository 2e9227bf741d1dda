"""What a recompute must find as the forward found it: random numbers, autocast, default device."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

# what tells whether a kernel of scaled_dot_product_attention is enabled, and its name
_KERNELS = [
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(SDPBackend, backend))
    for name, backend in getattr(torch.nn.attention, "_backend_names", {}).items()
]
_CPU = torch.device("cpu")
_clear_stack: Any = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", None)


class Surroundings:
    """The state of now, on the CPU and on the devices of the tensors given."""

    def __init__(self, given: list[Any], rng: bool, python_rng: bool):
        devices = {x.device for x in given if isinstance(x, Tensor)}
        if torch.cuda.is_initialized() and all(device.type == "cpu" for device in devices):
            # the function may move them there
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self._generators = _generators(devices, given) if rng else []
        if python_rng:
            self._generators += [
                (random.getstate, random.setstate),
                (np.random.get_state, np.random.set_state),
            ]
        self._states = [read() for read, _ in self._generators]
        kinds = {"cpu", *(device.type for device in devices)}
        self._autocasts = [(k, _autocast(k)) for k in kinds if torch.amp.is_autocast_available(k)]
        self._device, self._kernels = _default_device(), _current_kernels()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring it back, and afterwards what was there before."""
        now = [read() for read, _ in self._generators]
        try:
            self._write(self._states)
            with ExitStack() as stack:
                for context in self._changed():
                    stack.enter_context(context)
                yield
        finally:
            self._write(now)

    def _changed(self) -> list[AbstractContextManager[Any]]:
        """Return what brings back the settings that are others now."""
        autocasts = [torch.autocast(k, **o) for k, o in self._autocasts if _autocast(k) != o]
        device = [self._device] if self._device != _default_device() else []
        kernels = [sdpa_kernel(self._kernels)] if self._kernels != _current_kernels() else []
        return [*autocasts, *device, *kernels]

    def _write(self, states: list[Any]) -> None:
        for (_, write), state in zip(self._generators, states, strict=True):
            write(state)


def _generators(devices: set[torch.device], given: list[Any]) -> list[tuple[Any, Any]]:
    """Return what reads and writes the state of each random number generator."""
    cpu = torch.default_generator
    found: list[tuple[Any, Any]] = [(cpu.get_state, cpu.set_state)]
    found += [(x.get_state, x.set_state) for x in given if isinstance(x, torch.Generator)]
    for device in devices:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "checkpoint: the state of a random number generator cannot be read while a CUDA "
                "graph is captured: pass preserve_rng_state=False"
            )
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device.type)
            # the one MPS device goes unnamed
            where = {} if device.type == "mps" else {"device": device}
            found.append(
                (partial(module.get_rng_state, **where), partial(module.set_rng_state, **where))
            )
    return found


def _autocast(kind: str) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _current_kernels() -> list[SDPBackend]:
    return [kernel for is_enabled, kernel in _KERNELS if is_enabled()]


def _default_device() -> torch.device:
    # torch.get_default_device takes some microseconds to find that there is none
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


def unbatched() -> AbstractContextManager[Any]:
    """Leave the vmap of a batched backward: the forward was not in it, and random ops refuse it."""
    if _clear_stack is None or not torch._C._are_functorch_transforms_active():
        return nullcontext()
    return _clear_stack()


# data, of which a container may hold very much
_ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None)))


def objects_in(value: Any) -> Iterator[Any]:
    """Yield what is in plain lists, tuples and dicts but data; nothing else is looked into."""
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for part in [part for part in value if type(part) not in _ATOMS]:
            yield from objects_in(part)
    else:
        yield value


@contextmanager
def no_trace(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put back, on leaving, random states and all modules with buffers that this thread called.

    Random states are those of Python, NumPy, the CPU and the devices of `tensors`. Modules with
    buffers get back all of their attributes, and work on copies of the buffers meanwhile.
    """
    seen: set[nn.Module] = set()
    thread = threading.get_ident()

    def keep(called: nn.Module, _: Any) -> None:
        for module in called.modules() if threading.get_ident() == thread else ():
            if module in seen or not module._buffers:
                continue
            seen.add(module)
            if not isinstance(module, LazyModuleMixin):
                undo.callback(_restore, module, dict(vars(module)))
                copies = pytree.tree_map_only(Tensor, _copied_buffer, dict(module._buffers))
                vars(module)["_buffers"] = copies
            elif isinstance(module, _NormBase):
                # initialised as ever, but its statistics are yet to begin
                undo.callback(module.reset_running_stats)

    with ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.enter_context(torch.random.fork_rng([]))
        for device in {tensor.device for tensor in tensors}:
            # the generator of mps cannot be forked
            if device.type not in ("cpu", "meta", "mps"):
                undo.enter_context(torch.random.fork_rng([device.index], device_type=device.type))
        handle = register_module_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()


def _copied_buffer(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _restore(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(state)
