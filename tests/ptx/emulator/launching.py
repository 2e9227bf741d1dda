"""Runs every launch of a Triton kernel on CPU tensors in the emulator, compiled for a chip.

Triton compiles as for the chip, up to PTX; ptxas is left out. What it caches so is no kernel, and
stays in a folder beside its own, which runs share.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .hopper import TensorMap
from .machine import Hostility, Param, run
from .parser import Program, parse

_FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


# cases that follow one another share kernels; a program holds the registers of its units
_parse_once = lru_cache(32)(parse)


class Ran(NamedTuple):
    """A launch that has run; seconds: of the CPU, the compiler's not counted."""

    kernel: str
    seconds: float


@dataclass
class Emulator:
    """Runs launches as one chip would, and notes them."""

    # such as sm_90
    arch: str
    how: Hostility = field(default_factory=Hostility)
    # called with each program before it first runs, such as to remove a barrier
    change: Callable[[Program], None] | None = None
    # the launches in order
    ran: list[Ran] = field(default_factory=list)
    # by the hash of their compiled kernel
    programs: dict[str, Program] = field(default_factory=dict)

    def execute(self, kernel: Any, grid: tuple[int, int, int], args: list[tuple[str, Any]]) -> None:
        """Run a compiled kernel on its parameters in order, each a type and a value."""
        program, metadata = self._program_of(kernel), kernel.metadata
        params, maps = _encode(args, getattr(metadata, "tensordesc_meta", None) or [])
        assert len(params) == len(program.params), f"{metadata.name}: parameters"
        started = cpu_seconds()
        with np.errstate(all="ignore"):
            run(
                program,
                grid,
                metadata.num_warps * 32,
                metadata.shared,
                dict(zip(program.params, params, strict=True)),
                [value for kind, value in args if kind.startswith("*")],
                maps,
                self.how,
            )
        self.ran.append(Ran(metadata.name, cpu_seconds() - started))

    def _program_of(self, kernel: Any) -> Program:
        if kernel.hash not in self.programs:
            ptx = kernel.asm["ptx"]
            program = _parse_once(ptx) if self.change is None else parse(ptx)
            self.programs[kernel.hash] = program
            if self.change is not None:
                self.change(program)
        return self.programs[kernel.hash]

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Run the launches inside."""
        compile_only: Any = JITFunction.run

        def launch(
            function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any
        ) -> Any:
            kernel = compile_only(function, *args, grid=grid, warmup=True, **kwargs)
            values, types = bound_arguments(function, args, kwargs), kernel.src.signature
            leaves = [leaf for name in values for leaf in _leaves(types[name], values[name])]
            sizes: Any = grid(values) if callable(grid) else grid
            x, y, z = (*map(int, sizes), 1, 1)[:3]
            self.execute(kernel, (x, y, z), leaves)
            return kernel

        with compiling_for(self.arch), patch.object(JITFunction, "run", launch):
            yield


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Compile launches for a chip that is not there, up to PTX."""
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", int(arch[3:]), 32),
        # kernels keep compiled code by device: a name keeps the chips apart
        get_current_device=lambda: f"emulated {arch}",
        get_current_stream=lambda device: 0,
    )

    def no_cubin(*args: Any) -> bytes:
        return b"not assembled: the emulator runs the PTX"

    with (
        knobs.cache.scope(),
        patch.object(driver, "_active", device),
        patch.object(CUDABackend, "make_cubin", no_cubin),
    ):
        knobs.cache.dir += "_ptx_emulator"
        yield


def bound_arguments(
    function: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a launch by name, defaults included, launch options left out."""
    known = {name: kwargs[name] for name in kwargs if name in function.signature.parameters}
    bound = function.signature.bind(*args, **known)
    bound.apply_defaults()
    return bound.arguments


def cpu_seconds() -> float:
    """Return the CPU seconds of this process."""
    return sum(os.times()[:2])


def _leaves(signature: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield type and value of the parameters that the compiler made of an argument."""
    if isinstance(signature, tuple | list):
        for inner, item in zip(signature, value, strict=True):
            yield from _leaves(inner, item)
    elif signature != "constexpr":
        yield signature, value


def _encode(
    args: list[tuple[str, Any]], metas: list[Any]
) -> tuple[list[Param], dict[int, TensorMap]]:
    """Encode parameters as Triton's launcher does, and the tensor maps among them by number."""
    params, maps, remaining = [], {}, iter(metas)
    for kind, value in args:
        if kind.startswith("tensordesc"):
            handle, meta = 0xD000 + len(maps), next(remaining)
            maps[handle] = _tensor_map(value, meta)
            params.append(Param(bytes(128), handle))
            params += [Param(struct.pack("<i", size)) for size in value.shape]
            params += [Param(struct.pack("<q", stride)) for stride in value.strides]
        elif kind.startswith("*"):
            params.append(Param(struct.pack("<Q", value.data_ptr())))
        else:
            params.append(Param(struct.pack("<" + _FORMATS[kind], value)))
    # Triton's scratch of a launch and of its profiler, which no kernel of ours has
    return [*params, Param(bytes(8)), Param(bytes(8))], maps


def _tensor_map(descriptor: Any, meta: Any) -> TensorMap:
    assert meta is not None, "a descriptor without a tensor map"
    assert descriptor.padding == "zero", "padding with NaN"
    return TensorMap(
        descriptor.base,
        shape=list(descriptor.shape),
        strides=list(descriptor.strides),
        box=list(meta["block_size"]),
        swizzle=meta["swizzle"],
        # triton 3.6 lacks it
        rounds_to_tf32=getattr(descriptor, "round_f32_to_tf32", False),
    )
