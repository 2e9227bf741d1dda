"""Which path a call takes: eager twin, Triton (compiled or interpreted), or ATen.

Triton runs float32, bfloat16 and float16 tensors on a GPU, and on a CPU when Triton's interpreter
is on; everything else runs on ATen, with the same saved tensors. FUSEDCKPT_DISABLE=1, read once at
import, runs every eager twin instead. So does whatever writes a program down, such as
`torch.export`: it then consists of torch's own ops, which anyone can load, differentiate and lower.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fusedckpt.autograd import arguments
from fusedckpt.kernels.runtime import HAS_TRITON, IS_INTERPRETED, KERNEL_DTYPES, arch
from fusedckpt.kernels.tiles import gains_by_fusion
from fusedckpt.kernels.tuned import VARIANTS, tuned

logger = logging.getLogger("fusedckpt")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# read once: the plan of every layer that has it, where a call names none
_PREFERRED = os.environ.get("FUSEDCKPT_KERNEL") or None
if _PREFERRED not in (None, *VARIANTS):
    raise ValueError(f"FUSEDCKPT_KERNEL must be one of {', '.join(VARIANTS)}, got {_PREFERRED!r}")

DISABLED = os.environ.get("FUSEDCKPT_DISABLE", "0") not in ("", "0")

# before, torch's rms_norm was not among the functions that autocast widens
_AUTOCASTS_RMS = torch.__version__ >= "2.12"

_forced: str | None = None


def path_of(device: torch.device, dtype: torch.dtype) -> str:
    """Return "triton", "interpreter" or "aten" for tensors of this device and dtype."""
    if _forced == "aten" or not HAS_TRITON or dtype not in KERNEL_DTYPES:
        return "aten"
    if IS_INTERPRETED:
        return "interpreter" if device.type == "cpu" else "aten"
    # meta tensors get here only where launches are compiled without running
    return "triton" if device.type == "cuda" or _forced == "triton" else "aten"


@contextmanager
def forced_path(path: str | None) -> Iterator[None]:
    """Override the path inside, for tests: "aten" anywhere, "triton" to compile on meta tensors."""
    global _forced
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before


def plan_for(
    op: str,
    x: Tensor,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    kernel: str | None,
    fused: str,
) -> str:
    """Return the plan of a layer on tensors like x: "aten", "split", or `fused`.

    `sizes` are the GEMM's m, n and k; `kernel` is what the call asked for. Next come the
    environment's preference, what `bench tune` measured on this machine, and a rule. The choice is
    logged at level DEBUG.
    """
    if 0 in sizes or path_of(x.device, dtype) == "aten":
        return "aten"
    if kernel is None and _PREFERRED in ("split", fused):
        kernel = _PREFERRED
    if kernel is None:
        measured = tuned().variant(op, arch(), dtype.itemsize, sizes)
        kernel = measured if measured in ("split", fused) else None
    if kernel is None:
        kernel = fused if gains_by_fusion(arch(), dtype.itemsize, sizes[-1]) else "split"
    logger.debug("%s %s %s on %s: %s", op, "x".join(map(str, sizes)), dtype, arch(), kernel)
    return kernel


def takes_twin() -> bool:
    """Whether the eager twin must run: disabled, under torch.func, or in forward-mode AD."""
    return DISABLED or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_recorded(x: Any) -> bool:
    """Whether the ops on x are written down, by torch.export, jit.trace, fx or make_fx.

    Not by torch.compile, which keeps our autograd Functions as they are; before torch 2.13, strict
    export cannot be told from it.
    """
    # torch.compiler.is_exporting() is true under any torch.compile of torch 2.11
    if isinstance(x, Proxy) or getattr(torch.compiler, "_is_exporting_flag", False):
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_tracing_state() is not None or get_proxy_mode() is not None


def recorded_as(
    twin: Callable[..., Result],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Have a function's calls recorded as those of its eager twin.

    The twin gets all arguments but those that say how ours computes. They are not checked: shapes
    may be symbols there.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if not is_recorded(args[0] if args else kwargs.get("x")):
                return function(*args, **kwargs)
            ours = ("save", "chunks", "kernel")
            return twin(*args, **{key: kwargs[key] for key in kwargs if key not in ours})

        return call

    return decorate


# torch's own classes that take any op: those of tracing, and what a collective still fills
_TRANSPARENT = ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")
_HOOKS = ("__torch_function__", "__torch_dispatch__")


def is_plain(kind: type[Tensor]) -> bool:
    """Whether tensors of a class are as any other: it says nothing about what ops do with them."""
    if kind is Tensor or kind is nn.Parameter or kind.__name__ in _TRANSPARENT:
        return True
    return all(getattr(kind, hook) is getattr(nn.Parameter, hook) for hook in _HOOKS)


def are_plain(*given: Any) -> bool:
    """Whether ours can take these tensors: dense ones, of no class with ops of its own.

    A module that meets another, such as a DTensor or a quantised weight, runs its children's own
    forward. What is no tensor passes: it is refused by name later.
    """
    for value in given:
        if isinstance(value, Tensor) and (
            not is_plain(type(value)) or value.layout != torch.strided or value.is_nested
        ):
            return False
    return True


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for this device."""
    # meta has none to ask; whether a device has, torch.compile of torch 2.11 cannot
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that nn.Linear multiplies an input of `dtype` in, under autocast or not."""
    if autocasts(device) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype


def autocasts_norm(device: torch.device, kind: str) -> bool:
    """Whether autocast runs a norm in float32: not on a CPU, and RMSNorm since torch 2.12."""
    return device.type != "cpu" and (kind == "layer" or _AUTOCASTS_RMS) and autocasts(device)


def paths(device: torch.device | str, dtype: torch.dtype) -> dict[str, str]:
    """Name the path that each function takes for tensors of this device and dtype.

    Returns:
        Function name -> "eager" (FUSEDCKPT_DISABLE is set), "triton", "interpreter" or "aten".

    Raises:
        TypeError, ValueError: no device, or no dtype that the functions take.
    """
    arguments.device("paths", device)
    arguments.dtype("paths", dtype)
    path = "eager" if DISABLED else path_of(torch.device(device), dtype)
    blocks = ("linear_act", "norm_linear", "mlp", "gated_mlp")
    norms = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
    return dict.fromkeys((*blocks, *norms), path)
