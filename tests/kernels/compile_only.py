"""Compiles kernel launches for a chip that is not there and reads the compiler's output.

The interpreter proves a kernel's numbers; this proves, also without a GPU, that the same source
compiles for each chip and comes out without spills, serialized wgmma or an empty body. Whether a
kernel is interpreted is fixed when it is decorated, so tests call `compile_all`, which runs

    python -m tests.kernels.compile_only sm_90 MODULE:FUNC [sm_100 MODULE:FUNC ...]
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from traceback import format_exception
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fusedckpt.kernels import norm
from tests.kernels import sass
from tests.kernels.sass import body

ROOT = Path(__file__).parents[2]


class Chip(NamedTuple):
    """What kernels are compiled for, and what they may take."""

    target: GPUTarget
    # bytes that a block may use
    shared: int
    # instructions of every inexact dot
    mma: str
    # bytes of a multiprocessor, for all its blocks
    multiprocessor: int
    # its launches of compile_launches.py
    launches: str = "everything"


IS_NEWER = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
# up to Triton 3.7 their programs are those of sm_80; from 3.8 on not where threads sum
_LIKE_SM_80 = "everything" if IS_NEWER else "near_limits"

CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 163 << 10, "mma_sync", 164 << 10),
    "sm_86": Chip(GPUTarget("cuda", 86, 32), 99 << 10, "mma_sync", 100 << 10, _LIKE_SM_80),
    "sm_89": Chip(GPUTarget("cuda", 89, 32), 99 << 10, "mma_sync", 100 << 10, _LIKE_SM_80),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 227 << 10, "wgmma", 228 << 10),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 227 << 10, "tcgen05", 228 << 10),
    "sm_120": Chip(GPUTarget("cuda", 120, 32), 99 << 10, "mma_sync", 100 << 10, "one_of_each"),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 << 10, "mfma", 64 << 10),
    "gfx1100": Chip(GPUTarget("hip", "gfx1100", 32), 64 << 10, "wmma", 64 << 10, "one_of_each"),
}

# with Triton 3.8, by kernel and chip, the most bytes of registers that a program spills: it has the
# same values, and takes longer. The pinned Triton's programs spill none
NEWER_SPILLS = {
    ("split_norm_grad_kernel", "sm_86"): 8,
    ("split_norm_grad_kernel", "sm_89"): 8,
    ("split_norm_grad_kernel", "sm_100"): 360,
    ("split_norm_grad_kernel", "sm_120"): 16,
    ("gemm_kernel", "sm_90"): 24,
    ("gemm_kernel", "sm_100"): 24,
    ("gemm_kernel", "sm_120"): 8,
    ("wide_grad_kernel", "sm_100"): 16,
}

# opcodes in `Compiled.counts`. Stores: to global memory; ATOMG only publishes TMA descriptors
OPCODES = {
    "wgmma": r"[BDHIQ]GMMA",
    "tcgen05": r"UTC[A-Z]*MMA",
    "mma_sync": r"[BDHIOQ]MMA",
    "mfma": r"v_s?mfma\w*",
    "wmma": r"v_wmma\w*",
    "cp_async": r"LDGSTS",
    "tma_loads": r"UTMALDG",
    "stores": r"STG?|REDG?|UTMASTG|UTMAREDG|(global|buffer|flat)_(store|atomic)\w*",
    "instructions": r"(?!NOP$|s_nop$).*",
}


# metadata cached beside a kernel come from this version of `sass`
_READ_BY = hashlib.sha256(Path(sass.__file__).read_bytes()).hexdigest()[:12]


@dataclass(frozen=True)
class Compiled:
    """One specialization of a kernel on one chip."""

    target: str
    kernel: str
    # the name with dtypes, constexprs and absent operands
    label: str
    launches: int = 0
    error: str | None = None
    num_warps: int = 0
    num_stages: int = 0
    # per thread: registers (AMD: VGPRs), bytes spilled as stores and loads (AMD: registers)
    registers: int = 0
    max_registers: int = 0
    spills: dict[str, int] = field(default_factory=dict)
    # per block: bytes, columns
    shared: int = 0
    tensor_memory: int = 0
    # ptxas' C75xx remarks: wgmma serialized, setmaxnreg ignored
    remarks: list[str] = field(default_factory=list)
    # "bf16", "f32:ieee", "f32:tf32"
    dots: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    # of the first launch: blocks, elements and rows of a tile, bytes per element of its matrices
    grid: int = 0
    tile: tuple[int, int] = (0, 0)
    operand_bytes: int = 0
    # of a GEMM: its K, how often a block goes around its loop, and bytes that it loads each time
    loop: tuple[int, int, int] = (0, 1, 0)
    # on NVIDIA: sass.Body, and a hash of the PTX without the names of the chip and of lines
    body: Sequence[int] = ()
    ptx: str = ""


def check(record: Compiled) -> list[str]:
    """Return the problems of a compiled kernel, a sentence each."""
    return [f"{record.label} on {record.target} {problem}" for problem in _problems(record)]


def _problems(record: Compiled) -> Iterator[str]:
    if record.error:
        yield f"does not compile: {record.error}"
        return
    chip, counts = CHIPS[record.target], record.counts
    allowed = NEWER_SPILLS.get((record.kernel, record.target), 0) if IS_NEWER else 0
    if sum(record.spills.values()) > allowed:
        yield "spills " + ", ".join(f"{what} {size}" for what, size in record.spills.items())
    yield from (f"draws from ptxas: {remark}" for remark in record.remarks)
    fast = [dot for dot in record.dots if dot not in ("f32:ieee", "f64")]
    if fast and counts[chip.mma] == 0:
        yield f"multiplies {', '.join(fast)} without {chip.mma}"
    if record.shared > chip.shared:
        yield f"takes {record.shared} bytes of shared memory of {chip.shared}"
    # triton turns such a kernel into an empty one and raises only at a launch
    if record.tensor_memory > 512:
        yield f"takes {record.tensor_memory} columns of tensor memory of 512"
    if counts["stores"] == 0:
        yield f"stores nothing in its {counts['instructions']} instructions"


@contextmanager
def compile_for(target: str) -> Iterator[Collection[Compiled]]:
    """Compile launches on meta tensors for `target`; yields a live view of their records."""
    assert not knobs.runtime.interpret, "kernels are interpreted: unset TRITON_INTERPRET"
    records: dict[str, Compiled] = {}
    launch: Any = JITFunction.run
    stand_in = SimpleNamespace(
        get_current_target=lambda: CHIPS[target].target,
        # kernels keep compiled code by device: a name keeps the chips apart
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
    )

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        label = label_of(self, args, kwargs)
        try:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
            key, read = kernel.hash, _read(kernel)
        except Exception as error:
            read: dict[str, Any] = {"error": "".join(format_exception(error, limit=0))}
            kernel, key = None, label + read["error"]
        read |= _geometry(self, args, kwargs, grid)
        known = records.get(key, Compiled(target, self.fn.__name__, label, **read))
        records[key] = replace(known, launches=known.launches + 1)
        return kernel

    with (
        knobs.cache.scope(),
        patch.object(driver, "_active", stand_in),
        patch.object(JITFunction, "run", run),
        patch.object(CUDABackend, "make_cubin", _recording(CUDABackend.make_cubin)),
        # tensors are on no device whose properties could be read
        patch.object(norm, "shared_per_multiprocessor", lambda _: CHIPS[target].multiprocessor),
    ):
        # apart from the user's cache: its kernels come without a log
        knobs.cache.dir += f"_compile_only_{_READ_BY}"
        yield records.values()


def _recording(make_cubin: Callable[..., bytes]) -> Callable[..., bytes]:
    """`make_cubin` that leaves ptxas' log and the opcodes in the metadata, which triton caches."""

    def recording(self: CUDABackend, src: str, metadata: dict[str, Any], *args: Any) -> bytes:
        with knobs.nvidia.scope(), redirect_stdout(StringIO()) as log:
            knobs.nvidia.dump_ptxas_log = True
            cubin = make_cubin(self, src, metadata, *args)
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            # triton's own disassembler loses all instructions after the 4096th
            command = [knobs.nvidia.nvdisasm.path, "--print-code", "--no-dataflow", file.name]
            listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        line = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)"
        metadata["ptxas_log"] = log.getvalue()
        metadata["opcodes"] = Counter(re.findall(line, listing, re.M))
        metadata["body"] = list(body(listing))
        return cubin

    return recording


def _read(kernel: Any) -> dict[str, Any]:
    metadata, ttir, amdgcn = kernel.metadata, kernel.asm["ttir"], kernel.asm.get("amdgcn", "")
    if amdgcn:
        log, opcodes = "", Counter(re.findall(r"^\t([a-z]\w*)", amdgcn, re.M))
        registers = re.findall(r"\.vgpr_count: +(\d+)", amdgcn)
        spills = re.findall(r"\.([sv]gpr)_spill_count: +(\d+)", amdgcn)
    else:
        log, opcodes = metadata.ptxas_log, metadata.opcodes
        registers = re.findall(r"Used (\d+) registers", log)
        spills = [pair[::-1] for pair in re.findall(r"(\d+) bytes spill (\w+)", log)]
    # triton writes tf32 beside 16-bit operands too, and nothing for ieee
    dots = re.findall(r"tt\.dot.*?(?:inputPrecision = (\w+).*?)?: tensor<[\dx]*x(\w+)>", ttir)
    return {
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "registers": max(map(int, registers)),
        "max_registers": min(
            255, getattr(metadata, "maxnreg", None) or 65536 // (32 * metadata.num_warps)
        ),
        "spills": {name: sum(int(n) for what, n in spills if what == name) for name, _ in spills},
        "shared": metadata.shared,
        "tensor_memory": getattr(metadata, "tmem_size", None) or 0,
        "remarks": re.findall(r"\(C75\d\d\).*", log),
        "dots": sorted({f"f32:{how or 'ieee'}" if d == "f32" else d for how, d in dots}),
        "counts": {
            name: sum(count for opcode, count in opcodes.items() if re.fullmatch(pattern, opcode))
            for name, pattern in OPCODES.items()
        },
        "body": () if amdgcn else metadata.body,
        "ptx": "" if amdgcn else _hash_of(kernel.asm["ptx"]),
    }


def _hash_of(ptx: str) -> str:
    """Hash the code: without the chip, and the debug sections, which name the source's folder."""
    code = re.split(r"^\s*\.section\b", ptx, maxsplit=1, flags=re.M)[0]
    lines = re.sub(r"//.*|^\s*\.(version|target|loc|file).*", "", code, flags=re.M).split()
    return hashlib.sha256(" ".join(lines).encode()).hexdigest()[:16]


def _geometry(
    kernel: JITFunction, args: Sequence[Any], kwargs: dict[str, Any], grid: Sequence[int]
) -> dict[str, Any]:
    arguments = dict(zip(kernel.arg_names, args, strict=False))
    leaves = [value for _, value in _leaves("", tuple(arguments.values()))]
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    largest = max(t.numel() for t in tensors)
    rows, columns, depth = kwargs.get("BLOCK_M", 1), kwargs.get("BLOCK_N"), kwargs.get("BLOCK_K")
    geometry = {
        "grid": math.prod(grid),
        "tile": (rows * (columns or kwargs.get("BLOCK", 1)), rows),
        "operand_bytes": sum(t.element_size() for t in tensors if t.numel() == largest),
    }
    if columns and depth:
        operand = getattr(arguments["x"], "base", arguments["x"])
        loaded = (rows + columns) * depth * operand.element_size()
        # the epilogue's data are as large as its result
        out = [
            value for _, value in _leaves("", arguments["out"]) if isinstance(value, torch.Tensor)
        ]
        numel = max(t.numel() for t in out)
        nbytes = sum(t.element_size() for t in out if t.numel() == numel)
        # an expert's share of rows
        k = arguments["k"] if "k" in arguments else operand.shape[0] // arguments["ends"].shape[0]
        geometry |= {"loop": (k, -(-k // depth), loaded), "operand_bytes": nbytes}
    return geometry


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        for member, item in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from _leaves(f"{name}.{member}", item)
    else:
        yield name, value


def label_of(kernel: JITFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return a launch's kernel with its dtypes, constexprs and absent operands."""
    known = {name: value for name, value in kwargs.items() if name in kernel.signature.parameters}
    bound = kernel.signature.bind_partial(*args, **known)
    bound.apply_defaults()
    dtypes, parts = [], []
    for param in kernel.params:
        for name, value in _leaves(param.name, bound.arguments.get(param.name)):
            if isinstance(value, torch.Tensor):
                dtypes.append(str(value.dtype).removeprefix("torch."))
            elif param.is_constexpr or value is None:
                parts.append(f"{name}={getattr(value, '__name__', value)}")
    return f"{kernel.fn.__name__}[{', '.join([*dict.fromkeys(dtypes), *parts])}]"


def compile_all(
    module: str, function: str | None = None, targets: Sequence[str] = tuple(CHIPS)
) -> list[Compiled]:
    """Return the kernels that a function of a module launches, compiled in a process per target.

    Without a function each chip compiles the launches that its row names.
    """
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    names = [f"{module}:{function or CHIPS[target].launches}" for target in targets]
    pairs = [word for pair in zip(targets, names, strict=True) for word in pair]
    command = [sys.executable, "-m", "tests.kernels.compile_only", *pairs]
    how: Any = {"cwd": ROOT, "env": environment, "check": True}
    said = subprocess.run(command, stdout=subprocess.PIPE, **how)
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    return [Compiled(**{k: line[k] for k in line if k != "problems"}) for line in lines]


def _compiled(target: str, function: str) -> list[Compiled]:
    """Return the kernels that a function, given as MODULE:FUNC, launches on a chip."""
    module, _, name = function.partition(":")
    # standard output is for the records alone
    with redirect_stdout(sys.stderr), compile_for(target) as records:
        getattr(importlib.import_module(module), name)()
    return list(records)


def main() -> None:
    """Print a line of JSON for each kernel that functions launch on chips."""
    targets, functions = sys.argv[1::2], sys.argv[2::2]
    # before the forks, of which each compiles for one chip
    for function in functions:
        importlib.import_module(function.partition(":")[0])
    context = multiprocessing.get_context("fork")
    with context.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        pairs = list(zip(targets, functions, strict=True))
        for records in pool.starmap(_compiled, pairs, chunksize=1):
            for record in records:
                print(json.dumps(asdict(record) | {"problems": check(record)}))


if __name__ == "__main__":
    main()
