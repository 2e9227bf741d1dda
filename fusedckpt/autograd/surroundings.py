"""What a recompute must find as the forward found it: random numbers, autocast, default device."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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
_CPU_GENERATOR = torch.default_generator.get_state, torch.default_generator.set_state
_PYTHON_GENERATORS = [
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
]
_clear_stack: Any = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", None)


class Surroundings:
    """The state of now, on the CPU and on the devices of the tensors among `objects`."""

    def __init__(self, objects: list[Any], rng: bool, python_rng: bool):
        devices, generators = set(), []
        for x in objects:
            if isinstance(x, Tensor) and x.device.type != "cpu":
                devices.add(x.device)
            elif isinstance(x, torch.Generator):
                generators.append((x.get_state, x.set_state))
        if not devices and torch.cuda.is_initialized():
            # the function may move them there
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self._generators = []
        if rng:
            self._generators = [_CPU_GENERATOR, *generators]
            for device in devices:
                self._generators += _generator_of(device)
        if python_rng:
            self._generators += _PYTHON_GENERATORS
        self._states = []
        for read, _ in self._generators:
            self._states.append(read())
        self._kinds = ["cpu"]
        for device in devices:
            if device.type not in self._kinds and torch.amp.is_autocast_available(device.type):
                self._kinds.append(device.type)
        self._settings = _settings_of(self._kinds)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring it back, and afterwards what was there before."""
        with ExitStack() as stack:
            if _clear_stack is not None and torch._C._are_functorch_transforms_active():
                # vmap of a batched backward: the forward was not in it, random ops refuse it
                stack.enter_context(_clear_stack())
            present = []
            for read, _ in self._generators:
                present.append(read())
            try:
                for (_, write), state in zip(self._generators, self._states, strict=True):
                    write(state)
                if (now := _settings_of(self._kinds)) != self._settings:
                    self._enter_changed(now, stack)
                yield
            finally:
                for (_, write), state in zip(self._generators, present, strict=True):
                    write(state)

    def _enter_changed(self, now: list[Any], stack: ExitStack) -> None:
        """Bring back the settings that are others now."""
        device, kernels, *autocasts = self._settings
        if device != now[0]:
            stack.enter_context(device)
        if kernels != now[1]:
            stack.enter_context(
                sdpa_kernel([x for (_, x), on in zip(_KERNELS, kernels, strict=True) if on])
            )
        for kind, autocast, other in zip(self._kinds, autocasts, now[2:], strict=True):
            if autocast != other:
                stack.enter_context(torch.autocast(kind, *autocast))


def _settings_of(kinds: list[str]) -> list[Any]:
    """Return the default device, the kernels of attention, and autocast of kinds of devices."""
    # torch.get_default_device takes some microseconds to find that there is none
    device = torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU
    kernels = []
    for is_enabled, _ in _KERNELS:
        kernels.append(is_enabled())
    settings, cache_enabled = [device, kernels], torch.is_autocast_cache_enabled()
    for kind in kinds:
        autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled
        settings.append(autocast)
    return settings


def _generator_of(device: torch.device) -> list[tuple[Any, Any]]:
    """Return what reads and writes the state of a device's random number generator, if any."""
    if device.type == "meta":
        return []
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "checkpoint: the state of a random number generator cannot be read while a CUDA graph "
            "is captured: pass preserve_rng_state=False"
        )
    module = torch.get_device_module(device.type)
    # the one MPS device goes unnamed
    where = {} if device.type == "mps" else {"device": device}
    return [(partial(module.get_rng_state, **where), partial(module.set_rng_state, **where))]


# data, of which a container may hold very much
ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None)))


def objects_in(value: Any) -> Iterator[Any]:
    """Yield what is in plain lists, tuples and dicts but data; nothing else is looked into."""
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for part in [part for part in value if type(part) not in ATOMS]:
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
