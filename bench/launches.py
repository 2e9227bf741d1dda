"""Operations of which `bench predict` counts the launches: ours, and other libraries'.

Each is a function of rows and columns that makes random tensors on the device of the context and
returns the call that launches: on meta tensors it is compiled, on a GPU it is timed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cards import card_of_driver, played
from bench.inductor import launching
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
    # whether it launches each kernel in several configurations, of which it would take the fastest
    is_tuned: bool = False


class Operation(NamedTuple):
    """Launches of an operation, and bytes that it must move."""

    prepare: Prepare
    # for each element
    least: float
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
# the last has few tokens: its sums of dw are as large as the rows
NORMS = ((4096, 768), (4096, 2048), (4096, 4096), (4096, 12288), (4096, 16384), (512, 4096))
# Mamba 2's widths
GATED_ROWS = ((4096, 8192), (4096, 5120), (512, 5120))
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


def packed_rows(m: int, n: int) -> int8.PackedRows:
    """Return rows of bfloat16 in nine bits."""
    packed = ints(int8.packed_nbytes(m, n), dtype=torch.int8)
    return int8.PackedRows(packed, m, n, torch.bfloat16)


def rms_forward_packed(m: int, n: int) -> Callable[[], Any]:
    """Return the launch of RMSNorm of rows in nine bits."""
    return partial(norm.norm, packed_rows(m, n), None, drawn(n), None, LLAMA, torch.bfloat16)


def rms_backward_packed(m: int, n: int) -> Callable[[], Any]:
    """Return the launches of RMSNorm's gradient of rows in nine bits."""
    x, wanted = packed_rows(m, n), (True, True, False)
    return partial(norm.norm_grad, drawn(m, n), None, x, drawn(n), LLAMA, wanted, x.dtype)


def layer_backward_packed(m: int, n: int) -> Callable[[], Any]:
    """Return the launches of LayerNorm's gradient of rows in nine bits."""
    x, wanted = packed_rows(m, n), (True, True, True)
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


def _unsloth(name: str, make: Callable[[int, int, Any], Callable[[], Any]]) -> Peer:
    """Return Unsloth's launches of an operation, by a module of its kernels."""

    def prepare(m: int, n: int) -> Callable[[], Any]:
        # else it writes a folder here
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(gettempdir()) / "unsloth"))
        # it says that there is no GPU, and that it was not imported first
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = import_module(f"unsloth.kernels.{name}")
        call = make(m, n, module)

        def launch() -> None:
            with played(card_of_driver()):
                call()

        return launch if drawn(1).is_meta else call

    return Peer("Unsloth", "unsloth", prepare)


def _unsloth_rms(m: int, n: int, module: Any) -> Callable[[], Any]:
    return partial(module.Fast_RMS_Layernorm.apply, drawn(m, n), drawn(n), 1e-6, False)


def _unsloth_rms_backward(m: int, n: int, module: Any) -> Callable[[], Any]:
    inputs = drawn(m, n), drawn(m, n), drawn(m, n), drawn(n), drawn(m, dtype=torch.float32)
    options = 1e-6, False, module._eager_kernel
    return partial(module._rms_backward, *inputs, *options, train_w=True)


def _unsloth_swiglu(m: int, n: int, module: Any) -> Callable[[], Any]:
    return partial(module.swiglu_fg_kernel, drawn(1, m, n), drawn(1, m, n))


def _unsloth_swiglu_backward(m: int, n: int, module: Any) -> Callable[[], Any]:
    return partial(module.swiglu_DWf_DW_dfg_kernel, drawn(m, n), drawn(m, n), drawn(m, n))


def _unsloth_logits(m: int, n: int, module: Any) -> Callable[[], Any]:
    return partial(module.Fast_CrossEntropyLoss.apply, drawn(m, n), ints(m), 0, 0)


def _unsloth_logits_backward(m: int, n: int, module: Any) -> Callable[[], Any]:
    statistics = drawn(m, dtype=torch.float32), drawn(m, dtype=torch.float32)
    saved = SimpleNamespace(
        saved_tensors=(drawn(m, n), *statistics, ints(m)),
        DO_SOFTCAPPING=False,
        logit_softcapping=0,
        DO_LOGIT_SCALING=False,
        logit_scaling=0,
    )
    return partial(module.Fast_CrossEntropyLoss.backward, saved, drawn(m, dtype=torch.float32))


# torch code that inductor compiles; its backward has the statistics that autograd would save.
# An index of None asks torch for a device


def rms_of(x: Tensor, w: Tensor) -> Tensor:
    """Return Llama's RMSNorm."""
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_grad_of(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of Llama's RMSNorm."""
    normed = x.float() * rstd
    g = (dy * w).float()
    dx = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * normed.to(x.dtype)).sum(0)


def layer_grad_of(dy: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, rstd: Tensor) -> Any:
    """Return the gradients of LayerNorm."""
    wanted = [True, True, True]
    shape = [x.shape[-1]]
    return torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, w, b, wanted)


def swiglu_of(gate: Tensor, up: Tensor) -> Tensor:
    """Return a gated hidden layer."""
    return F.silu(gate) * up


def swiglu_grad_of(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a gated hidden layer and the gradients of gate and up."""
    z = gate.float()
    share = torch.sigmoid(z)
    value = (z * share).to(gate.dtype)
    dgate = (dh * up).float() * share * (1 + z * (1 - share))
    return value * up, dgate.to(gate.dtype), dh * value


def gated_of(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    """Return a norm of gated rows."""
    h = x.float() * F.silu(gate.float())
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def gated_grad_of(dy: Tensor, x: Tensor, gate: Tensor, w: Tensor, rstd: Tensor) -> Any:
    """Return the gradients of a norm of gated rows."""
    z, rows = gate.float(), x.float()
    share = torch.sigmoid(z)
    normed = rows * z * share * rstd
    g = (dy * w).float()
    dh = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
    dgate = dh * rows * share * (1 + z * (1 - share))
    dw = (dy * normed.to(x.dtype)).sum(0)
    return (dh * z * share).to(x.dtype), dgate.to(x.dtype), dw


def loss_of(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss and the logarithm of its sum."""
    z = logits.float()
    total = z.logsumexp(-1)
    return total - z.gather(1, ids.unsqueeze(1)).squeeze(1), total


def loss_grad_of(logits: Tensor, ids: Tensor, total: Tensor, dloss: Tensor) -> Tensor:
    """Return the gradient of logits."""
    share = torch.exp(logits.float() - total.unsqueeze(1))
    is_target = torch.arange(logits.shape[1], device=logits.device) == ids.unsqueeze(1)
    return ((share - is_target.float()) * dloss.unsqueeze(1)).to(logits.dtype)


def _inductor(fn: Callable[..., Any], make: Callable[[int, int], Sequence[Tensor]]) -> Peer:
    """Return the launches of torch.compile(fn) of the tensors that `make` makes."""
    return Peer("inductor", "torch", lambda m, n: launching(fn, make(m, n)), is_tuned=True)


def _row(m: int) -> Tensor:
    return drawn(m, 1, dtype=torch.float32)


RMS_ROWS = ("rms_norm", "megatron_rms_norm")
LIGER = "Liger", "liger_kernel"
OPERATIONS: dict[str, Operation] = {
    "rms_norm": Operation(
        rms_forward,
        4,
        # the last on an A100 as Liger has measured it
        (*NORMS, (2048, 4096)),
        (
            Peer(*LIGER, _liger_rms),
            _unsloth("rms_layernorm", _unsloth_rms),
            _inductor(rms_of, lambda m, n: (drawn(m, n), drawn(n))),
        ),
        published=RMS_ROWS,
    ),
    "rms_norm backward": Operation(
        rms_backward,
        6,
        NORMS,
        (
            Peer(*LIGER, _liger_rms_backward, is_persistent=True),
            _unsloth("rms_layernorm", _unsloth_rms_backward),
            _inductor(rms_grad_of, lambda m, n: (drawn(m, n), drawn(m, n), drawn(n), _row(m))),
        ),
        published=RMS_ROWS,
        mode="backward",
    ),
    "layer_norm backward": Operation(
        layer_backward,
        6,
        NORMS,
        (
            Peer(*LIGER, _liger_layer_backward, is_persistent=True),
            _inductor(
                layer_grad_of,
                lambda m, n: (drawn(m, n), drawn(m, n), drawn(n), drawn(n), _row(m), _row(m)),
            ),
        ),
        published=("layer_norm",),
        mode="backward",
    ),
    "swiglu": Operation(
        swiglu_forward,
        6,
        # the last as Liger has measured it
        ((4096, 14336), (8192, 8192)),
        (
            Peer(*LIGER, _liger_swiglu),
            _unsloth("swiglu", _unsloth_swiglu),
            _inductor(swiglu_of, lambda m, n: (drawn(m, n), drawn(m, n))),
        ),
        published=("megatron_swiglu",),
    ),
    "swiglu backward": Operation(
        swiglu_backward,
        12,
        ((4096, 14336),),
        (
            _unsloth("swiglu", _unsloth_swiglu_backward),
            _inductor(swiglu_grad_of, lambda m, n: (drawn(m, n), drawn(m, n), drawn(m, n))),
        ),
    ),
    "gated_rms_norm": Operation(
        gated_forward,
        6,
        ((4096, 8192),),
        (_inductor(gated_of, lambda m, n: (drawn(m, n), drawn(m, n), drawn(n))),),
    ),
    "gated_rms_norm backward": Operation(
        gated_backward,
        10,
        GATED_ROWS,
        (
            _inductor(
                gated_grad_of,
                lambda m, n: (drawn(m, n), drawn(m, n), drawn(m, n), drawn(n), _row(m)),
            ),
        ),
    ),
    "cross_entropy": Operation(
        logits_forward,
        2,
        LOGITS,
        (
            _unsloth("cross_entropy_loss", _unsloth_logits),
            _inductor(loss_of, lambda m, n: (drawn(m, n), ints(m))),
        ),
    ),
    "cross_entropy backward": Operation(
        logits_backward,
        4,
        LOGITS,
        (
            _unsloth("cross_entropy_loss", _unsloth_logits_backward),
            _inductor(
                loss_grad_of,
                lambda m, n: (drawn(m, n), ints(m), _row(m)[:, 0], _row(m)[:, 0]),
            ),
        ),
    ),
    # nine bits of x, sixteen of each other matrix
    "int8 rms_norm": Operation(rms_forward_packed, 3.125, INPUTS),
    "int8 rms_norm backward": Operation(rms_backward_packed, 5.125, INPUTS),
    "int8 layer_norm backward": Operation(layer_backward_packed, 5.125, INPUTS),
    "int8 pack": Operation(pack, 3, INPUTS),
    "int8 unpack": Operation(unpack, 3, INPUTS),
}
