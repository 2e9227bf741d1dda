"""Runs every public function and its backward through Triton's own launcher, on no device.

libcuda.c stands in for the driver, tensors lie on the CPU at the sizes of models, and the vendor's
GEMMs return what they find in memory. Prints the layers that launch otherwise than LAUNCHES says,
in Triton kernels and ATen's ops. Run by test_launches, in a process of its own:

    python tests/kernels/launch_layers.py
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_folder = tempfile.TemporaryDirectory(prefix="libcuda-")
# before triton looks for a driver
os.environ["TRITON_LIBCUDA_PATH"] = _folder.name
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# the profiler's own messages
os.environ["KINETO_LOG_LEVEL"] = "99"
sys.path.insert(0, str(HERE.parents[1]))

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils  # noqa: E402
from triton.runtime import driver  # noqa: E402

from fusedckpt import NormSpec, functional  # noqa: E402
from fusedckpt.autograd.dispatch import forced_path  # noqa: E402
from fusedckpt.kernels import products, routed, runtime  # noqa: E402

# off a CPU all rows are one block
runtime.BLOCK_ELEMENTS = sys.maxsize
# what ATen does beside the kernels: the vendor's GEMMs and passes over what they wrote. Copies and
# fills are not counted, as a CPU needs some where a GPU needs none
ATEN = ("mm", "addmm", "add", "add_", "mul", "sum", "index_select")
TOKENS, D, F = 512, 4096, 14336
EXPERTS, TOP_K, EXPERT_D, EXPERT_F = 128, 8, 2048, 768
SPLIT, WIDE, MISALIGNED = 12288, 20480, 1001


def libcuda() -> ctypes.CDLL:
    """Build the stand-in and load it under the name that Triton asks for."""
    target = Path(_folder.name) / "libcuda.so.1"
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    options = ("-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{headers}")
    subprocess.run(["gcc", *options, "-o", target, HERE / "libcuda.c"], check=True)
    library = ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)
    library.take_launches.restype = ctypes.c_char_p
    return library


class Hopper(CudaDriver):
    """Triton's driver, but for what it asks torch."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_device_capability = lambda device=None: (9, 0)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=None: 0
        self.set_current_device = lambda device: None


@contextmanager
def counted(library: ctypes.CDLL) -> Iterator[Counter[str]]:
    """Count launches by the name of the kernel or of ATen's op."""
    found: Counter[str] = Counter()
    library.take_launches()
    with torch.profiler.profile() as profiler:
        yield found
    found.update(line.split()[0] for line in library.take_launches().decode().splitlines())
    events = (event.name.removeprefix("aten::") for event in profiler.events())
    found.update(f"aten::{name}" for name in events if name in ATEN)


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


# forward, backward; map: a tensor map that the host encoded for a launch
LAUNCHES = {
    "linear": ("addmm", "2 mm, sum"),
    "linear_act split": ("addmm, act", "addmm, act_grad, sum_partials, 2 mm"),
    "linear_act preact": ("addmm, act", "act_grad, sum_partials, 2 mm"),
    "linear_act fused": ("2 map, gemm", "2 map, gemm, sum_partials, 2 mm"),
    # rows that are no multiple of 16 bytes
    "linear_act fused odd": ("gemm", "gemm, 2 mm"),
    "linear_act fused float32": ("2 map, gemm", "2 map, gemm, sum_partials, 2 mm"),
    "rms_norm": ("norm", "norm_grad, sum_partials"),
    "rms_norm frozen": ("norm", "norm_grad"),
    "rms_norm split": ("norm", "split_norm_grad, sum_partials"),
    "rms_norm wide": ("wide_norm", "wide_stats, wide_grad, sum_partials"),
    "layer_norm": ("norm", "norm_grad, sum_partials"),
    "gated_rms_norm": ("gated_norm", "gated_norm_grad, sum_partials"),
    "add_rms_norm": ("norm", "norm_grad, sum_partials"),
    "add_layer_norm": ("norm", "norm_grad, sum_partials"),
    "norm_linear": ("norm, 3 mm", "norm, 4 mm, 2 addmm, norm_grad, sum_partials"),
    "token_logprobs": ("mm, cross_entropy", "3 mm, add_, cross_entropy_grad"),
    "mlp split": ("2 addmm, act", "addmm, act_grad, sum_partials, 4 mm, sum"),
    "regelu2": ("coded_act", "coded_grad"),
    "mlp hybrid": ("2 addmm, act", "addmm, 2 map, gemm, sum_partials, 3 mm, sum"),
    # the gradient of x is the sum of two products in float32
    "gated_mlp split": ("3 mm, act", "act_grad, 7 mm, addmm"),
    "gated_mlp hybrid": ("3 mm, act", "2 map, gemm, 6 mm, addmm"),
    # and on a device a gather, the assertion that no index is negative
    "experts": (
        "count, scan, place, index_select, 2 grouped_gemm, gate, combine",
        "count, scan, place, 2 index_select, 3 grouped_gemm, gate_grad, 2 grouped_grad, combine",
    ),
    "norm, gated_mlp, residual": (
        "norm, 3 mm, act, add",
        "norm, act_grad, 7 mm, addmm, norm_grad, sum_partials",
    ),
    "norm, gated_mlp, residual, preact": (
        "norm, 3 mm, act, add",
        "norm, act_grad, 5 mm, addmm, norm_grad, sum_partials",
    ),
}


def layers() -> dict[str, tuple[Callable[..., Any], Sequence[Tensor]]]:
    """Name -> a function and what it takes, every tensor a leaf that wants its gradient."""
    x, norm_weight, wide = leaf(TOKENS, D), leaf(D), leaf(TOKENS, WIDE)
    gate, up, down = leaf(F, D), leaf(F, D), leaf(D, F)
    bias, down_bias, query, key = leaf(F), leaf(D), leaf(D, D), leaf(1024, D)
    odd, odd_weight = leaf(TOKENS, MISALIGNED), leaf(F, MISALIGNED)
    linear_act, mlp, gated = functional.linear_act, functional.mlp, functional.gated_mlp

    def block(x: Tensor, norm_weight: Tensor, *weights: Tensor, **options: Any) -> Tensor:
        spec = NormSpec("rms", norm_weight)
        return gated(x, *weights, norm=spec, residual=True, kernel="split", **options)

    def head(x: Tensor, weight: Tensor) -> Any:
        target = torch.zeros(TOKENS, dtype=torch.int64)
        return functional.token_logprobs(x, weight, target, entropy=True)

    def projections(x: Tensor, norm_weight: Tensor, *weights: Tensor) -> Any:
        return functional.norm_linear(x, NormSpec("rms", norm_weight), weights)

    def plain(x: Tensor, *weights: Tensor, kernel: str) -> Tensor:
        return mlp(x, *weights, kernel=kernel)

    def mixture(x: Tensor, scores: Tensor, *weights: Tensor) -> Tensor:
        index = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
        return functional.experts(x, index, scores, *weights)

    linear = x, gate, bias
    return {
        "linear": (lambda *a: linear_act(*a, activation="identity"), (x, query, down_bias)),
        "linear_act split": (lambda *a: linear_act(*a, kernel="split"), linear),
        "linear_act preact": (lambda *a: linear_act(*a, kernel="split", save="preact"), linear),
        "linear_act fused": (lambda *a: linear_act(*a, kernel="fused"), linear),
        "linear_act fused odd": (lambda *a: linear_act(*a, kernel="fused"), (odd, odd_weight)),
        "linear_act fused float32": (
            lambda *a: linear_act(*a, kernel="fused"),
            [leaf(*t.shape, dtype=torch.float32) for t in linear],
        ),
        "rms_norm": (lambda x, w: functional.rms_norm(x, D, w), (x, norm_weight)),
        "rms_norm frozen": (lambda x: functional.rms_norm(x, D), (x,)),
        "rms_norm split": (
            lambda x, w: functional.rms_norm(x, SPLIT, w),
            (leaf(TOKENS, SPLIT), leaf(SPLIT)),
        ),
        "rms_norm wide": (lambda x, w: functional.rms_norm(x, WIDE, w), (wide, leaf(WIDE))),
        "layer_norm": (lambda x, w, b: functional.layer_norm(x, D, w, b), (x, down_bias, leaf(D))),
        "gated_rms_norm": (
            lambda x, gate, w: functional.gated_rms_norm(x, gate, D, w),
            (x, leaf(TOKENS, D), norm_weight),
        ),
        "add_rms_norm": (
            lambda x, r, w: functional.add_rms_norm(x, r, D, w),
            (x, leaf(TOKENS, D), norm_weight),
        ),
        "add_layer_norm": (
            lambda x, r, w, b: functional.add_layer_norm(x, r, D, w, b),
            (x, leaf(TOKENS, D), norm_weight, down_bias),
        ),
        "norm_linear": (projections, (x, norm_weight, query, key, leaf(1024, D))),
        "token_logprobs": (head, (x, gate)),
        "mlp split": (lambda *a: plain(*a, kernel="split"), (x, gate, bias, down, down_bias)),
        "regelu2": (functional.regelu2, (x,)),
        "mlp hybrid": (lambda *a: plain(*a, kernel="hybrid"), (x, gate, bias, down, down_bias)),
        "gated_mlp split": (lambda *a: gated(*a, kernel="split"), (x, gate, up, down)),
        "gated_mlp hybrid": (lambda *a: gated(*a, kernel="hybrid"), (x, gate, up, down)),
        "experts": (
            mixture,
            (
                leaf(TOKENS, EXPERT_D, dtype=torch.float16),
                leaf(TOKENS, TOP_K, dtype=torch.float32),
                leaf(EXPERTS, 2 * EXPERT_F, EXPERT_D, dtype=torch.float16),
                leaf(EXPERTS, EXPERT_D, EXPERT_F, dtype=torch.float16),
            ),
        ),
        "norm, gated_mlp, residual": (block, (x, norm_weight, gate, up, down)),
        "norm, gated_mlp, residual, preact": (
            lambda *a: block(*a, save="preact"),
            (x, norm_weight, gate, up, down),
        ),
    }


def written(counts: Counter[str]) -> set[str]:
    names = {name.removeprefix("aten::").removesuffix("_kernel"): counts[name] for name in counts}
    return {name if count == 1 else f"{count} {name}" for name, count in names.items()}


def sorted_by_none(index: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Launch the kernels that sort rows, which write nothing here; ATen reads their results."""
    return tuple(t.zero_() for t in _sort(index, num_experts))


_sort = routed.sorted_rows


def main() -> None:
    routed.sorted_rows = sorted_by_none
    library = libcuda()
    driver.set_active(Hopper())
    # as on a GPU of NVIDIA's, a GEMM of half precision writes float32
    products.writes_wider = lambda device, dtype: dtype.itemsize == 2
    vendor = torch.library.Library("aten", "IMPL")
    vendor.impl("mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "CPU")
    vendor.impl("mm.dtype", lambda a, b, t: a.new_empty(a.shape[0], b.shape[1], dtype=t), "CPU")
    vendor.impl("addmm", lambda c, a, b, **_: a.new_empty(a.shape[0], b.shape[1]), "CPU")
    vendor.impl("mm.out", lambda a, b, out: out, "CPU")
    vendor.impl("addmm.out", lambda c, a, b, out, **_: out, "CPU")
    vendor.impl("addmm.dtype_out", lambda c, a, b, t, out, **_: out, "CPU")
    assert layers().keys() == LAUNCHES.keys()
    with forced_path("triton"):
        for name, (function, inputs) in layers().items():
            with counted(library) as forward:
                outputs = function(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            grads = [torch.empty_like(y) for y in outputs]
            with counted(library) as backward:
                torch.autograd.grad(outputs, inputs, grads)
            found = written(forward), written(backward)
            if found != tuple(set(way.split(", ")) for way in LAUNCHES[name]):
                print(name, *found)


if __name__ == "__main__":
    main()
