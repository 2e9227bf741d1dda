"""The state around a call of a segment: random numbers, autocast, device, kernels, subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedckpt.autograd import private
from fusedckpt.state import rng

# of scaled_dot_product_attention: whether each is enabled, and its name
_KERNELS = [(is_enabled, getattr(SDPBackend, name)) for is_enabled, name in private.sdpa_kernels]
_CPU = torch.device("cpu")


class Surroundings:
    """The state of now, on the CPU and on the devices of the tensors among `objects`."""

    def __init__(self, objects: list[Any], torch_rng: bool, python_rng: bool):
        devices = set()
        generators = []
        for x in objects:
            if isinstance(x, Tensor) and x.device.type != "cpu":
                devices.add(x.device)
            elif isinstance(x, torch.Generator):
                generators += [rng.of_object(x)]
        if not devices and torch.cuda.is_initialized():
            # the function may move them there
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        if torch_rng:
            generators.append(rng.CPU)
            for device in devices:
                _check_capture(device)
                generators += rng.of_device(device)
        else:
            generators = []
        if python_rng:
            generators += rng.PYTHON
        self._random_states = rng.RandomStates(generators)
        self._kinds = ["cpu"]
        for device in devices:
            if device.type not in self._kinds and torch.amp.is_autocast_available(device.type):
                self._kinds.append(device.type)
        self._settings = _settings_of(self._kinds)

    def random_states(self) -> rng.RandomStates:
        """Return the states of the generators now."""
        return rng.RandomStates(self._random_states.generators)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring that state back, and afterwards the state from before."""
        with ExitStack() as stack:
            if private.are_transforms_active():
                # a batched backward: the forward was not in its vmap, random ops refuse it
                stack.enter_context(private.outside_vmap())
            # and that of is_grads_batched, which no stack tells of
            stack.enter_context(private.outside_legacy_vmap())
            stack.enter_context(self._random_states.restored())
            try:
                if (now := _settings_of(self._kinds)) != self._settings:
                    for (enter, setting), (_, other) in zip(self._settings, now, strict=True):
                        if setting != other:
                            stack.enter_context(enter(*setting))
                yield
            finally:
                for _, (_, _, is_enabled, _) in self._settings[3:]:
                    # else casts of weights live on, where autocast is still on in backward
                    if is_enabled:
                        torch.clear_autocast_cache()


def _settings_of(kinds: list[str]) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return settings, each with a context that sets it.

    They are the default device, the kernels of attention, whether classes of tensors see functions,
    and autocast of kinds of devices.
    """
    # torch.get_default_device takes some microseconds to find that there is none
    device = torch.get_default_device() if private.num_function_modes() else _CPU
    kernels = []
    for is_enabled, kernel in _KERNELS:
        if is_enabled():
            kernels.append(kernel)
    settings: list[Any] = [
        (torch.device, (device,)),
        (sdpa_kernel, (kernels,)),
        (private.asking_subclasses, (private.are_subclasses_asked(),)),
    ]
    for kind in kinds:
        dtype = torch.get_autocast_dtype(kind)
        is_enabled = torch.is_autocast_enabled(kind)
        settings.append(
            (torch.autocast, (kind, dtype, is_enabled, torch.is_autocast_cache_enabled()))
        )
    return settings


def _check_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "checkpoint: the state of a random number generator cannot be read while a CUDA graph "
            "is captured: pass preserve_rng_state=False"
        )
