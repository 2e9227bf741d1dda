"""Operations whose launches `bench predict` counts: ours, and Liger's where it is installed.

Each is a function of rows and columns that makes random tensors on the device of the context and
returns the call that launches: on meta tensors it is compiled, on a GPU it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.kernels import cross_entropy, gated_norm, int8, linear, norm

Prepare = Callable[[int, int], Callable[[], Any]]


class Peer(NamedTuple):
    """Another library's launches of an operation."""

    # as tables show it
    name: str
    # the module that it needs
    package: str
    prepare: Prepare
    # whether it launches a program for each multiprocessor, each with its share of the rows
    is_persistent: bool = False


class Operation(NamedTuple):
    """Launches of an operation, and bytes that it must move."""

    prepare: Prepare
    # for each element
    least: int
    sizes: Sequence[tuple[int, int]]
    peers: Sequence[Peer] = ()
    # names of its published rows, and their mode
    published: tuple[str, ...] = ()
    mode: str = "forward"


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a random tensor, of integers zeros."""
    return torch.randn(*shape, dtype=dtype) if dtype.is_floating_point else ints(*shape)


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return zeros."""
    return torch.zeros(*shape, dtype=dtype)


LLAMA = norm.NormRule("rms", 1e-6, 0.0, "llama")
LAYER = norm.NormRule("layer", 1e-6)
GATED = gated_norm.GatedNormRule(1e-5, gates_first=True, cast="llama")
# the last of few tokens, whose sums of dw are as large as the rows
NORMS = ((4096, 2048), (4096, 4096), (4096, 12288), (4096, 16384), (512, 4096))
# few tokens, and GPT-2's rows, which begin within a vector
LOGITS = ((1024, 128256), (512, 128256), (4096, 50257))
# 8192 tokens of models: GPT-2 small, Llama 3.2 1B, Llama 3 8B, Llama 3 70B
INPUTS = ((8192, 768), (8192, 2048), (8192, 4096), (8192, 8192))


def rms_forward(m: int, n: int) -> Callable[[], Any]:
    """Return the launches of RMSNorm."""
    return partial(norm.norm, drawn(m, n), None, drawn(n), None, LLAMA, torch.bfloat16)


def rms_backward(m: int, n: int) -> Callable[[], Any]:
    """Return the launches of RMSNorm's gradient."""
    x = drawn(m, n)
    wanted = (True, True, False)
    return partial(norm.norm_grad, drawn(m, n), None, x, drawn(n), LLAMA, wanted, x.dtype)


def layer_backward(m: int, n: int) -> Callable[[], Any]:
    """Return the launches of LayerNorm's gradient."""
    x = drawn(m, n)
    wanted = (True, True, True)
    return partial(norm.norm_grad, drawn(m, n), None, x, drawn(n), LAYER, wanted, x.dtype)


def swiglu_forward(m: int, n: int) -> Callable[[], Any]:
    """Return the launch of a gated hidden layer."""
    return partial(linear.hidden, drawn(m, n), drawn(m, n), "silu", "split")


def swiglu_backward(m: int, n: int) -> Callable[[], Any]:
    """Return the launch of a gated hidden layer's gradients, which makes the layer again."""
    dh, gate, up = drawn(m, n), drawn(m, n), drawn(m, n)
    grads = linear.HiddenGrad(gate, up, dh, gate, up)
    return partial(linear.hidden_grad, dh, grads, "silu", (False, False), "split")


def gated_forward(m: int, n: int) -> Callable[[], Any]:
    """Return the launch of a norm with a gate."""
    inputs = drawn(m, n), drawn(m, n), drawn(n)
    return partial(gated_norm.gated_norm, *inputs, GATED, torch.bfloat16)


def gated_backward(m: int, n: int) -> Callable[[], Any]:
    """Return the launches of the gradients of a norm with a gate."""
    dy, x, gate = drawn(m, n), drawn(m, n), drawn(m, n)
    wanted = (True, True, True)
    return partial(gated_norm.gated_norm_grad, dy, x, gate, drawn(n), GATED, wanted, x.dtype)


def logits_forward(m: int, n: int) -> Callable[[], Any]:
    """Return the launch of the statistics of logits."""
    rule = cross_entropy.LogitRule()
    return partial(cross_entropy.statistics, drawn(m, n), ints(m, 1), rule, "triton")


def logits_backward(m: int, n: int) -> Callable[[], Any]:
    """Return the launch of the gradient of logits, over them."""
    u, y = drawn(m, n), drawn(m, 4, dtype=torch.float32)
    rule = cross_entropy.LogitRule()
    grad = cross_entropy.statistics_grad
    return partial(grad, torch.empty_like(y), u, ints(m, 1), y, rule, "triton", dz=u)


def pack(m: int, n: int) -> Callable[[], Any]:
    """Return the launch that makes nine bits of a value."""
    return partial(int8.pack_int8, drawn(m, n), "triton")


def unpack(m: int, n: int) -> Callable[[], Any]:
    """Return the launch that makes 16 bits a value of nine."""
    packed = ints(int8.packed_nbytes(m, n), dtype=torch.int8)
    return partial(int8.unpack_int8, packed, drawn(m, n), "triton")


def _liger(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(f"liger_kernel.ops.{module}"), function)


def _liger_rms(m: int, n: int) -> Callable[[], Any]:
    forward = _liger("rms_norm:rms_norm_forward")
    return partial(forward, drawn(m, n), drawn(n), 1e-6, 0.0, "llama", None)


def _liger_rms_backward(m: int, n: int) -> Callable[[], Any]:
    block, warps = _liger("utils:calculate_settings")(n)
    inputs = drawn(m, n), drawn(m, n), drawn(n), drawn(m, dtype=torch.float32)
    # 0: Llama's cast; in place, as Liger's default
    options = 0.0, 0, block, warps, True, None
    return partial(_liger("rms_norm:rms_norm_backward"), *inputs, *options)


def _liger_layer_backward(m: int, n: int) -> Callable[[], Any]:
    inputs = drawn(m, n), drawn(m, n), drawn(n), drawn(n)
    statistics = drawn(m, dtype=torch.float32), drawn(m, dtype=torch.float32)
    return partial(_liger("layer_norm:layer_norm_backward"), *inputs, *statistics)


def _liger_swiglu(m: int, n: int) -> Callable[[], Any]:
    return partial(_liger("swiglu:swiglu_forward"), drawn(m, n), drawn(m, n))


RMS_ROWS = ("rms_norm", "megatron_rms_norm")
LIGER = "Liger", "liger_kernel"
OPERATIONS: dict[str, Operation] = {
    "rms_norm": Operation(
        rms_forward,
        4,
        # the last on an A100 as Liger has measured it
        (*NORMS, (2048, 4096)),
        (Peer(*LIGER, _liger_rms),),
        published=RMS_ROWS,
    ),
    "rms_norm backward": Operation(
        rms_backward,
        6,
        NORMS,
        (Peer(*LIGER, _liger_rms_backward, is_persistent=True),),
        published=RMS_ROWS,
        mode="backward",
    ),
    "layer_norm backward": Operation(
        layer_backward,
        6,
        NORMS,
        (Peer(*LIGER, _liger_layer_backward, is_persistent=True),),
        published=("layer_norm",),
        mode="backward",
    ),
    "swiglu": Operation(
        swiglu_forward,
        6,
        # the last as Liger has measured it
        ((4096, 14336), (8192, 8192)),
        (Peer(*LIGER, _liger_swiglu),),
        published=("megatron_swiglu",),
    ),
    "swiglu backward": Operation(swiglu_backward, 12, ((4096, 14336),)),
    "gated_rms_norm": Operation(gated_forward, 6, ((4096, 8192),)),
    "gated_rms_norm backward": Operation(gated_backward, 10, ((4096, 8192),)),
    "cross_entropy": Operation(logits_forward, 2, LOGITS),
    "cross_entropy backward": Operation(logits_backward, 4, LOGITS),
    "int8 pack": Operation(pack, 3, INPUTS),
    "int8 unpack": Operation(unpack, 3, INPUTS),
}
