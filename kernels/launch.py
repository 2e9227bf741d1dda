"""Kernels with later launches that skip Triton's search for the compiled code.

At every launch Triton binds and specializes all arguments and looks the compiled code up by a long
string: 9 us of the host on one core, where the launch itself takes 1.5. Compiled code depends on
dtypes, on whether addresses are multiples of 16, on integers, constants and options. So a launch is
remembered by these, integers and constants by type and value, for addresses that all are. The first
of its kind is Triton's own; so is any that is unusual: another address, an argument of a class that
is not listed here, a grid that is computed, a hook, a debugger or profiler, an AMD GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from triton import knobs
from triton import language as tl
from triton.runtime.jit import JITFunction

# launches that a kernel remembers: texts of any length make new ones in every step
MOST = 1024
# with later releases these launches have not been compared to Triton's own
LATEST = 3, 8
# on AMD's GPUs compiled code depends on the bytes behind a pointer, too
REMEMBERS = (
    torch.version.hip is None
    and hasattr(torch._C, "_cuda_getDevice")
    and tuple(map(int, triton.__version__.split(".")[:2])) <= LATEST
)

_own_run: Any = JITFunction.run
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_runtime: Any = knobs.runtime
_compilation: Any = knobs.compilation
_enter_hooks: Any = _runtime.launch_enter_hook
_exit_hooks: Any = _runtime.launch_exit_hook
# the classes of arguments by name, and by position; any function under `triton.jit` beside them
_CONSTANTS = (type(None), int, bool, str, torch.dtype, tl.dtype)
_ARGUMENTS = (*_CONSTANTS, float, Tensor, nn.Parameter)


class Launch(NamedTuple):
    """A remembered launch."""

    # the compiled kernel's launcher
    run: Callable[..., None]
    # an argument of it: the handle of the compiled function
    function: Any
    # another: the packed metadata
    metadata: Any
    # the values of the parameters after the positional arguments
    constants: tuple[Any, ...]
    # Triton's compiled kernels of this device: not the same once they are dropped
    compiled: Any
    # the globals that the code has read: namespace, name, value
    read: tuple[tuple[dict[str, Any], str, Any], ...]
    # the kernel, and functions among the arguments, whose addresses are in the key
    held: tuple[Any, ...]


class Kernel(JITFunction):
    """A function under `triton.jit` that the host launches, on the device of its tensors."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.launch, grid)

    def launch(self, grid: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel; return Triton's own result, or None for a remembered launch."""
        described = [*kwargs, *map(type, kwargs.values()), *kwargs.values()]
        device, addresses = describe(args, described)
        if device >= 0 and device != _current_device():
            with torch.cuda.device(device):
                return _launch(self, grid, *args, **kwargs)
        if (
            device < 0
            or addresses & 15
            or type(grid) is not tuple
            or self.pre_run_hooks
            or is_watched()
        ):
            return self.run(*args, grid=grid, warmup=False, **kwargs)
        described.append(device)
        key = tuple(described)
        try:
            launch = self._launches.get(key)
        except TypeError:
            # a descriptor, or another argument without a hash
            return self.run(*args, grid=grid, warmup=False, **kwargs)
        is_known = launch is not None and launch.compiled is self.device_caches.get(device)
        if is_known:
            for namespace, name, value in launch.read:
                # Triton raises for a constant that has changed
                is_known = is_known and namespace.get(name) is value
        if not is_known:
            kernel = self.run(*args, grid=grid, warmup=False, **kwargs)
            self._remember(key, kernel, args, kwargs)
            return kernel
        x, y, z = (*grid, 1, 1)[:3]
        stream = _current_stream(device)
        # without hooks of a profiler, and their metadata
        no_hooks = (None, None, None)
        function, metadata = launch.function, launch.metadata
        launch.run(x, y, z, stream, function, metadata, *no_hooks, *args, *launch.constants)
        return None

    def _remember(
        self, key: tuple[Any, ...], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Remember a launch, if the key tells all of its arguments apart."""
        functions = [a for a in _leaves((args, *kwargs.values())) if isinstance(a, JITFunction)]
        kinds = set(map(type, functions))
        if not (
            isinstance(kernel, triton.compiler.CompiledKernel)
            and kinds.union(_ARGUMENTS).issuperset(map(type, _leaves(args)))
            and kinds.union(_CONSTANTS).issuperset(map(type, kwargs.values()))
        ):
            return
        constants = {name: value for name, value in kwargs.items() if name in self.arg_names}
        bound = self.signature.bind(*args, **constants)
        bound.apply_defaults()
        read = [
            (namespace, name, namespace.get(name))
            for (name, _), (_, namespace) in self.used_global_vals.items()
        ]
        if len(self._launches) >= MOST:
            self._launches.clear()
        self._launches[key] = Launch(
            kernel.run,
            kernel.function,
            kernel.packed_metadata,
            tuple(bound.arguments.values())[len(args) :],
            self.device_caches[key[-1]],
            tuple(read),
            (kernel, *functions),
        )


# not the method by its name, which a test or a profiler may have replaced to count launches
_launch = Kernel.launch


def describe(values: Iterable[Any], key: list[Any]) -> tuple[int, int]:
    """Append the properties of these arguments on which compiled code may depend to `key`.

    Return the index of the first tensor's device, -1 for none that is on a GPU, and the bits that
    are set in any address.
    """
    device = -1
    addresses = 0
    for a in values:
        kind = type(a)
        if kind is Tensor or kind is nn.Parameter:
            addresses |= a.data_ptr()
            key.append(a.dtype)
            if device < 0:
                device = a.get_device()
        elif kind is int or a is None:
            key.append(a)
        elif kind is float:
            key.append(kind)
            # 0.0 equals -0.0
            key.append(a or repr(a))
        elif isinstance(a, tuple):
            key.append(kind)
            key.append(len(a))
            place, bits = describe(a, key)
            addresses |= bits
            if device < 0:
                device = place
        else:
            key.append(kind)
            key.append(id(a) if isinstance(a, JITFunction) else a)
    return device, addresses


def is_watched() -> bool:
    """Whether other code sees launches, or has them compiled in another way."""
    enter = _runtime.launch_enter_hook
    leave = _runtime.launch_exit_hook
    return bool(
        not REMEMBERS
        or enter is not _enter_hooks
        or leave is not _exit_hooks
        or enter.calls
        or leave.calls
        or _runtime.debug
        or _compilation.instrumentation_mode
        or getattr(_runtime, "add_stages_inspection_hook", None)
        or JITFunction.run is not _own_run
    )


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for a in values:
        if isinstance(a, tuple):
            yield from _leaves(a)
        else:
            yield a
