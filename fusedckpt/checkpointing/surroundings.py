"""The state around a call of a segment: random numbers, autocast, device, kernels, subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedckpt.autograd import private
from fusedckpt.state import rng

# of scaled_dot_product_attention: whether each is enabled, and its name
_KERNELS = [(is_enabled, getattr(SDPBackend, name)) for is_enabled, name in private.sdpa_kernels]
_CPU = torch.device("cpu")
# a context that does nothing
NOTHING = nullcontext()
# a context that sets a setting, and its arguments
_Setting = tuple[Callable[..., Any], tuple[Any, ...]]


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
        around = _around(tuple(devices), torch_rng, python_rng)
        if not torch_rng:
            generators = []
        gpus = around.gpus
        is_captured = bool(gpus) and torch.cuda.is_current_stream_capturing()
        self._random_states = _states_of([*generators, *around.generators], is_captured)
        # while a CUDA graph is captured: that graph, and by GPU the position in its random numbers
        self._graph = private.captured_graph() if is_captured else None
        self._positions = {x: rng.position_on(x) for x in gpus} if is_captured else {}
        self._has_drawn = False
        self._kinds = around.kinds
        self._settings = _settings_of(self._kinds)

    def end(self) -> None:
        """Note, while a CUDA graph is captured, whether the call drew random numbers."""
        if self._positions:
            now = {device: rng.position_on(device) for device in self._positions}
            self._has_drawn = now != self._positions

    def _check_graph(self) -> None:
        """Raise where another graph is captured than that of the call, which drew numbers."""
        if not self._has_drawn:
            return
        is_captured = torch.cuda.is_current_stream_capturing()
        if not is_captured or private.captured_graph() is not self._graph:
            raise RuntimeError(
                "checkpoint: forward and backward are captured in two CUDA graphs, as "
                "torch.cuda.make_graphed_callables does, so the recompute would draw other random "
                "numbers than the forward: capture the whole step in one torch.cuda.graph"
            )

    def random_states(self) -> rng.RandomStates:
        """Return the states of the generators now."""
        return rng.RandomStates(self._random_states.generators)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring that state back, and afterwards the state from before."""
        # the forward was not in the vmap of a batched backward, which random ops refuse
        is_batched = private.are_transforms_active()
        with private.outside_vmaps() if is_batched else private.outside_legacy_vmap():
            self._check_graph()
            now = _settings_of(self._kinds)
            before = rng.RandomStates(self._random_states.generators)
            try:
                self._random_states.restore()
                with NOTHING if now == self._settings else self._set(now):
                    yield
            finally:
                before.restore()
                for _, (_, _, is_enabled, _) in self._settings[3:]:
                    # else casts of weights live on, where autocast is still on in backward
                    if is_enabled:
                        torch.clear_autocast_cache()

    @contextmanager
    def _set(self, now: Sequence[_Setting]) -> Iterator[None]:
        """Set the settings of the call where those of now differ."""
        with ExitStack() as stack:
            for (enter, setting), (_, other) in zip(self._settings, now, strict=True):
                if setting != other:
                    stack.enter_context(enter(*setting))
            yield


class _Around(NamedTuple):
    """The state around calls on some devices."""

    # those of `random` and `numpy.random`, and of torch
    generators: Sequence[rng.GeneratorCalls]
    # GPUs with a generator among these
    gpus: Sequence[torch.device]
    # kinds of devices with autocast
    kinds: Sequence[str]


@lru_cache(256)
def _around(devices: tuple[torch.device, ...], torch_rng: bool, python_rng: bool) -> _Around:
    generators = []
    if torch_rng:
        generators.append(rng.CPU)
        for device in devices:
            generators += rng.of_device(device)
    if python_rng:
        generators += rng.PYTHON
    gpus = [device for device in devices if device.type == "cuda"] if torch_rng else []
    kinds = ["cpu"]
    for device in devices:
        if device.type not in kinds and torch.amp.is_autocast_available(device.type):
            kinds.append(device.type)
    return _Around(generators, gpus, kinds)


def _settings_of(kinds: Sequence[str]) -> list[_Setting]:
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


def _states_of(generators: list[rng.GeneratorCalls], is_captured: bool) -> rng.RandomStates:
    """Return the states of generators; while a CUDA graph is captured, those within the graph."""
    try:
        return rng.RandomStates(generators)
    except RuntimeError as error:
        if not is_captured:
            raise
        raise RuntimeError(
            "checkpoint: this version of torch cannot read the state of a random number generator "
            "while a CUDA graph is captured: use torch 2.14 or later, or pass "
            "preserve_rng_state=False if the function draws no random numbers"
        ) from error
