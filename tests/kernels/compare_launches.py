"""Compares remembered launches to Triton's own, on no device and without compiling.

Arguments are drawn at random from few values, so that launches repeat and differ in one argument:
0.0 and -0.0, 1, 1.0 and True, integers about 16 and 2**31, addresses that are multiples of 16 and
others, records of two classes with the same members. Each launch runs twice, as `kernel[grid]` and
as Triton's own `run`; both must get the same compiled kernel with the same arguments. Then one by
one the states of a program in which every launch is Triton's own.

Prints what is not so. Run by test_launches, in a process of its own.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from torch import Tensor, nn
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fusedckpt.kernels import launch as launching
from fusedckpt.kernels.launch import Kernel

# how many launches are compared, and the different ones among them
LAUNCHES = 4_000
DIFFERENT = 300
FACTOR = tl.constexpr(2)
numbers = itertools.count()
here = threading.local()
# the tensors' device, and the current one
place = SimpleNamespace(tensors=0, current=0)


class Pair(NamedTuple):
    """Operands of the kernel."""

    x: Any
    n: Any


class OtherPair(NamedTuple):
    """Other operands, with the same members."""

    x: Any
    n: Any


@triton.jit
def doubled(value):
    """Return twice the value."""
    return value * FACTOR


@triton.jit
def halved(value):
    """Return half the value."""
    return value / FACTOR


@Kernel
def some_kernel(
    t, first, second, third, ALPHA: tl.constexpr, FLAG: tl.constexpr = 5, LAST: tl.constexpr = None
):
    """Read a global, call a function."""
    tl.store(t.x, doubled(t.n) * FACTOR)


class Launched(NamedTuple):
    """What a compiled kernel is launched with."""

    function: int
    grid: tuple[Any, ...]
    stream: Any
    args: tuple[Any, ...]
    # whether Triton's own run has launched it
    is_own: bool


def note(x: int, y: int, z: int, stream: Any, function: int, metadata: Any, *others: Any) -> None:
    """Stand in for the launcher of compiled code."""
    about, enter, leave, *args = others
    assert (about is None) == (enter is None) == (leave is None)
    here.launched = Launched(function, (x, y, z), stream, tuple(args), enter is not None)


def compiled(src: Any, **options: Any) -> CompiledKernel:
    """Stand in for the compiler."""
    # which finds the globals that the code reads
    src.fn.cache_key  # noqa: B018
    kernel = object.__new__(CompiledKernel)
    vars(kernel).update(
        module=object(), function=next(numbers), src=src, name="some_kernel", packed_metadata=()
    )
    kernel._run = note
    return kernel


class Stub(SimpleNamespace):
    """A driver without a device."""

    utils = SimpleNamespace(unload_module=lambda module: None)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return place.current

    def get_current_stream(self, device: int) -> int:
        return 100 + device


_describe = launching.describe


def create_binder(self: JITFunction) -> Any:
    """Compile by `compiled`."""
    binder = JITFunction.create_binder(self)
    self.compile = compiled
    return binder


def describe(values: Any, key: list[Any]) -> tuple[int, int]:
    """Take tensors on the CPU for those of a GPU."""
    _, addresses = _describe(values, key)
    has_tensor = any(isinstance(a, Tensor) for a in launching._leaves(values))
    return place.tensors if has_tensor else -1, addresses


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Stand in for torch.cuda.device."""
    before = place.current
    place.current = device
    try:
        yield
    finally:
        place.current = before


memory = torch.zeros(64, dtype=torch.uint8)
# by place, then by dtype: two places are no multiples of 16
tensors = [
    [memory[start : start + 16].view(dtype) for dtype in (torch.float32, torch.bfloat16)]
    for start in (0, 16, 4, 8)
]
INTEGERS = (0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 15, 2**63 - 1, 2**63)
SCALARS = (*INTEGERS, 0.0, -0.0, 1.0, 16.0, float("nan"), True, False, None)
FUNCTIONS = (doubled, halved)
ALPHAS = (1.0, 0.0, -0.0, 1, True, *FUNCTIONS)
CONSTANTS = (*INTEGERS[:8], True, False, None, "a", torch.float32, tl.float32, *FUNCTIONS)


def arguments(draw: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of `some_kernel`, by place and by name."""

    def tensor() -> Tensor:
        t = draw.choice(draw.choice(tensors[:2]))
        return nn.Parameter(t, requires_grad=False) if draw.random() < 0.2 else t

    def any_of() -> Any:
        return draw.choice(SCALARS) if draw.random() < 0.7 else tensor()

    second = draw.choice((any_of(), (any_of(), any_of()), ((any_of(),), any_of())))
    args = [Pair(tensor(), any_of()), 16, second, draw.choice(SCALARS), draw.choice(ALPHAS)]
    if draw.random() < 0.3:
        return [*args, draw.choice(CONSTANTS)], {}
    names = draw.sample(("FLAG", "LAST"), draw.randrange(3))
    kwargs = {name: draw.choice(CONSTANTS) for name in names}
    return args, kwargs | ({"num_warps": draw.choice((4, 8))} if draw.random() < 0.2 else {})


def alike(value: Any, draw: random.Random) -> Any:
    """Return another value that a key may take for this one."""
    if isinstance(value, Pair | OtherPair):
        kind = draw.choice((Pair, OtherPair))
        return kind(alike(value.x, draw), value.n) if draw.random() < 0.5 else kind(*value)
    if isinstance(value, tuple):
        flat = tuple(launching._leaves(value))
        ways = [flat, (flat,), ((flat[0],), *flat[1:]), (*value[:-1], alike(value[-1], draw))]
        return draw.choice(ways)
    if isinstance(value, Tensor):
        dtype = int(value.dtype is torch.bfloat16)
        return draw.choice(tensors)[dtype if draw.random() < 0.7 else 1 - dtype]
    equal = [a for a in (*SCALARS, *ALPHAS) if a == value and type(a) is not Tensor]
    return draw.choice(equal if equal and draw.random() < 0.6 else SCALARS)


def changed(
    args: list[Any], kwargs: dict[str, Any], draw: random.Random
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of which one is another, or has another name."""
    if kwargs and draw.random() < 0.4:
        name = draw.choice(list(kwargs))
        if name == "num_warps":
            return args, kwargs | {name: 2}
        if draw.random() < 0.5:
            return args, kwargs | {name: alike(kwargs[name], draw)}
        other = {"FLAG": "LAST", "LAST": "FLAG"}
        return args, {other.get(key, key): value for key, value in kwargs.items()}
    index = draw.randrange(len(args))
    return [*args[:index], alike(args[index], draw), *args[index + 1 :]], kwargs


def both(args: list[Any], kwargs: dict[str, Any], grid: Any = (3,)) -> list[Any]:
    """Return a launch by `kernel[grid]`, and Triton's own."""
    results: list[Any] = []
    for run in (
        some_kernel[grid],
        lambda *a, **k: some_kernel.run(*a, grid=grid, warmup=False, **k),
    ):
        here.launched = None
        try:
            run(*args, **kwargs)
            results.append(here.launched)
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def are_same(ours: Any, own: Any) -> bool:
    if isinstance(ours, str) or isinstance(own, str):
        return ours == own
    pairs = zip(launching._leaves(ours.args), launching._leaves(own.args), strict=True)
    return ours[:3] == own[:3] and own.is_own and all(a is b for a, b in pairs)


def compare(seed: int, count: int, problems: list[str]) -> None:
    """Compare launches with arguments that are drawn at random."""
    draw = random.Random(seed)
    known = [arguments(draw) for _ in range(DIFFERENT // 6)]
    known += [changed(*draw.choice(known), draw) for _ in range(DIFFERENT - len(known))]
    remembered = 0
    for _ in range(count):
        args, kwargs = draw.choice(known)
        ours, own = both(args, kwargs)
        if not are_same(ours, own):
            problems.append(f"{args} {kwargs}: {ours} where Triton launches {own}")
        remembered += isinstance(ours, Launched) and not ours.is_own
    if remembered < count // 4:
        problems.append(f"remembered {remembered} of {count} launches")


def plain() -> bool:
    """Launch with the same plain arguments; return whether that was Triton's own launch."""
    some_kernel[3,](Pair(tensors[0][0], 16), 16, None, 1.0, 1.0, FLAG=3)
    return here.launched.is_own


@contextmanager
def changed_global() -> Iterator[None]:
    """Change a constant that the code has read, for which Triton raises."""
    global FACTOR
    before = FACTOR
    FACTOR = tl.constexpr(3)
    try:
        yield
    except RuntimeError as error:
        is_own = "FACTOR has changed" in str(error)
        here.launched = here.launched._replace(is_own=is_own)
    finally:
        FACTOR = before


@contextmanager
def hooked(hooks: Any) -> Iterator[None]:
    """Call a hook, of a profiler for example."""
    hooks.add(print_nothing)
    try:
        yield
    finally:
        hooks.remove(print_nothing)


def print_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def unusual() -> Iterator[tuple[str, Any]]:
    """Name the states in which a launch is Triton's own."""
    runtime = knobs.runtime
    yield "an enter hook", hooked(runtime.launch_enter_hook)
    yield "an exit hook", hooked(runtime.launch_exit_hook)
    yield "another chain of hooks", patch.object(runtime, "launch_enter_hook", knobs.HookChain())
    yield "debugging", patch.object(runtime, "debug", True)
    yield "instrumentation", patch.object(knobs.compilation, "instrumentation_mode", "fpsan")
    if hasattr(runtime, "add_stages_inspection_hook"):
        hook: Callable[[], Any] = lambda: ("key", "hash")  # noqa: E731
        yield "stages of the compiler", patch.object(runtime, "add_stages_inspection_hook", hook)
    yield "a hook of the kernel", patch.object(some_kernel, "pre_run_hooks", [print_nothing])
    yield "a run that was replaced", patch.object(JITFunction, "run", replaced)
    yield "a changed constant", changed_global()
    yield "an AMD GPU", patch.object(launching, "REMEMBERS", False)


_run: Any = JITFunction.run


def replaced(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a run that a test or a tool has replaced."""
    return _run(self, *args, **kwargs)


def check_unusual(problems: list[str]) -> None:
    for name, state in unusual():
        plain()
        if plain():
            problems.append(f"before {name}: a launch was not remembered")
        is_own = False
        with state:
            is_own = plain()
        if not (is_own or here.launched.is_own):
            problems.append(f"{name}: a launch was not Triton's own")
    plain()
    args = Pair(tensors[0][0], 16), 16, None, 1.0, 1.0
    some_kernel[lambda bound: (bound["first"],)](*args, FLAG=3)
    if here.launched[1] != (16, 1, 1) or not here.launched.is_own:
        problems.append(f"a grid that is computed: {here.launched}")
    # as where somebody has the compiler's options changed
    before = here.launched.function
    some_kernel.device_caches.clear()
    if not plain() or here.launched.function == before:
        problems.append("compiled kernels were dropped, and one was launched")
    for number in range(2 * launching.MOST):
        some_kernel[1,](Pair(tensors[0][0], number), 16, None, 1.0, 1.0, FLAG=3)
    if len(some_kernel._launches) > launching.MOST:
        problems.append(f"{len(some_kernel._launches)} launches are remembered")


def check_devices(problems: list[str]) -> None:
    """Launch on the device of the tensors, with its compiled kernel and its stream."""
    found = set()
    for tensors_on in (0, 1, 0, 1):
        place.tensors = tensors_on
        plain()
        found.add((here.launched.function, here.launched.stream, here.launched.is_own))
    place.tensors = 0
    if len({function for function, _, _ in found}) != 2 or place.current != 0:
        problems.append(f"two devices: {found}")
    if {(stream, own) for _, stream, own in found} < {(100, False), (101, False)}:
        problems.append(f"two devices: {found}")


def main() -> None:
    """Print the launches that differ."""
    problems: list[str] = []
    with (
        patch.object(driver, "_active", Stub()),
        patch.object(
            some_kernel, "device_caches", defaultdict(partial(create_binder, some_kernel))
        ),
        patch.object(launching, "REMEMBERS", torch.version.hip is None),
        patch.object(launching, "_current_device", lambda: place.current),
        patch.object(launching, "_current_stream", lambda device: 100 + device),
        patch.object(launching, "describe", describe),
        patch.object(torch.cuda, "device", on_device),
        patch.object(launching, "MOST", 1 << 16),
    ):
        compare(0, LAUNCHES, problems)
        threads = [
            threading.Thread(target=compare, args=(seed, LAUNCHES // 4, problems))
            for seed in range(1, 4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        some_kernel._launches.clear()
        with patch.object(launching, "MOST", 256):
            check_unusual(problems)
        check_devices(problems)
    for problem in problems[:20]:
        print(problem)


if __name__ == "__main__":
    main()
