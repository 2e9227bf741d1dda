"""Other libraries' ways of computing our cases, each an adapter of a few lines.

A library that is not installed is a line that says so. What an adapter or the library raises, also
while it is imported, costs its own row: adapters run inside the first call. None of the libraries
runs on a CPU; README says how far, and at which versions, the adapters were tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.cases import Tensors, Way
from bench.layers import EPS
from bench.sizes import Size

__all__ = ["PEERS", "Peer", "peers_of"]


class Peer(NamedTuple):
    """A library's way of computing a case.

    package: what must be importable; build: size -> a function of the case's inputs, those that
    `pack` returns where weights lie otherwise.
    """

    name: str
    package: str
    case: str
    build: Callable[[Size], Callable[..., Any]]
    pack: Callable[[Tensors], Tensors] | None = None
    unpack: Callable[[Tensors], Tensors] | None = None


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _liger_rms(size: Size) -> Callable[..., Any]:
    norm = _load("liger_kernel.ops.rms_norm.LigerRMSNormFunction")
    # "gemma" rounds once, at the end, as torch does; in place it would overwrite our gradient
    return lambda x, w: norm.apply(x, w, EPS, 0.0, "gemma", False)


def _liger_layer(size: Size) -> Callable[..., Any]:
    norm = _load("liger_kernel.ops.layer_norm.LigerLayerNormFunction")
    return lambda x, w, b: norm.apply(x, w, b, 1e-5)


def _liger_add(size: Size) -> Callable[..., Any]:
    norm = _load("liger_kernel.ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction")
    return lambda x, residual, w: norm.apply(x, residual, w, EPS, 0.0, "gemma", False)


def _liger_swiglu(size: Size) -> Callable[..., Any]:
    swiglu = _load("liger_kernel.ops.swiglu.LigerSiLUMulFunction")
    return lambda x, gate, up, down: F.linear(
        swiglu.apply(F.linear(x, gate), F.linear(x, up)), down
    )


def _liger_mlp(size: Size) -> Callable[..., Any]:
    mlp = _load("liger_kernel.ops.mlp.LigerMLPFunction")
    # it wants a batch
    return lambda x, *weights: mlp.apply(x.unsqueeze(0), *weights).squeeze(0)


def _liger_block(size: Size) -> Callable[..., Any]:
    norm, mlp = _liger_rms(size), _liger_swiglu(size)
    return lambda x, w, *weights: x + mlp(norm(x, w), *weights)


def _quack_rms(size: Size) -> Callable[..., Any]:
    norm = _load("quack.rmsnorm.rmsnorm")
    return lambda x, w: norm(x, w, eps=EPS)


def _quack_add(size: Size) -> Callable[..., Any]:
    norm = _load("quack.rmsnorm.rmsnorm")
    return lambda x, residual, w: norm(x, w, residual=residual, eps=EPS, prenorm=True)


def _quack_mlp(size: Size, recompute: bool) -> Callable[..., Any]:
    mlp = _load("quack.mlp.mlp_func")
    return partial(mlp, activation="swiglu", concat_layout=True, recompute=recompute)


def _flash_norm(size: Size, name: str) -> Callable[..., Any]:
    norm = _load(f"flash_attn.ops.triton.layer_norm.{name}")
    eps = EPS if name == "rms_norm_fn" else 1e-5
    return lambda x, w, b=None: norm(x, w, b, eps=eps)


def _flash_add(size: Size) -> Callable[..., Any]:
    norm = _load("flash_attn.ops.triton.layer_norm.rms_norm_fn")
    return lambda x, residual, w: norm(x, w, None, residual=residual, eps=EPS, prenorm=True)


def _te(size: Size, kind: str, residual: bool = False, **options: Any) -> Callable[..., Any]:
    """Call a Transformer Engine module on parameters of ours, given in the order of its own.

    They become the module's: the backward of its norms reads the module's weight, not a saved one.
    """
    widths = (size.dim, size.hidden) if kind == "LayerNormMLP" else (size.dim,)
    if kind == "LayerNormLinear":
        widths = (size.dim, size.dim + 2 * size.kv)
    modules: dict[torch.dtype, nn.Module] = {}

    def call(x: Tensor, *parameters: Tensor) -> Any:
        if x.dtype not in modules:
            make = _load(f"transformer_engine.pytorch.{kind}")
            modules[x.dtype] = make(*widths, params_dtype=x.dtype, **options)
        module = modules[x.dtype]
        own = dict(module.named_parameters())
        for (name, before), parameter in zip(own.items(), parameters, strict=True):
            if before is not parameter:
                setattr(module, name, parameter)
        y = module(x)
        return x + y if residual else y

    return call


def _te_qkv(size: Size) -> Callable[..., Any]:
    linear = _te(size, "LayerNormLinear", eps=EPS, bias=False, normalization="RMSNorm")
    return lambda *inputs: linear(*inputs).split((size.dim, size.kv, size.kv), dim=-1)


def _te_block(size: Size, checkpoint: bool) -> Callable[..., Any]:
    options = {"eps": EPS, "bias": False, "normalization": "RMSNorm", "activation": "swiglu"}
    options |= {"checkpoint": True} if checkpoint else {}
    return _te(size, "LayerNormMLP", residual=True, **options)


def _join(inputs: Tensors, first: int, count: int) -> Tensors:
    joined = nn.Parameter(torch.cat([x.detach() for x in inputs[first : first + count]]))
    return [*inputs[:first], joined, *inputs[first + count :]]


def _split(grads: Tensors, first: int, sizes: Sequence[int]) -> Tensors:
    return [*grads[:first], *grads[first].split(list(sizes)), *grads[first + 1 :]]


def _split_half(grads: Tensors, first: int) -> Tensors:
    return _split(grads, first, [grads[first].shape[0] // 2] * 2)


def _split_qkv(grads: Tensors) -> Tensors:
    dim = grads[2].shape[1]
    kv = (grads[2].shape[0] - dim) // 2
    return _split(grads, 2, [dim, kv, kv])


# gate and up, or q, k and v, in one tensor
GATED = {"pack": partial(_join, first=1, count=2), "unpack": partial(_split_half, first=1)}
BLOCK = {"pack": partial(_join, first=2, count=2), "unpack": partial(_split_half, first=2)}
QKV = {"pack": partial(_join, first=2, count=3), "unpack": _split_qkv}

LIGER, QUACK, TE, FLASH = "liger_kernel", "quack", "transformer_engine", "flash_attn"
BLOCK_CASE = "norm_gated_mlp_residual"
PEERS: tuple[Peer, ...] = (
    Peer("Liger", LIGER, "rms_norm", _liger_rms),
    Peer("Liger", LIGER, "layer_norm", _liger_layer),
    Peer("Liger", LIGER, "add_rms_norm", _liger_add),
    Peer("Liger SwiGLU", LIGER, "gated_mlp", _liger_swiglu),
    Peer("LigerMLP", LIGER, "gated_mlp", _liger_mlp),
    Peer("Liger norm, SwiGLU", LIGER, BLOCK_CASE, _liger_block),
    Peer("quack", QUACK, "rms_norm", _quack_rms),
    Peer("quack", QUACK, "add_rms_norm", _quack_add),
    Peer("quack", QUACK, "gated_mlp", partial(_quack_mlp, recompute=False), **GATED),
    Peer("quack recompute", QUACK, "gated_mlp", partial(_quack_mlp, recompute=True), **GATED),
    Peer("TE", TE, "rms_norm", partial(_te, kind="RMSNorm", eps=EPS)),
    Peer("TE", TE, "layer_norm", partial(_te, kind="LayerNorm", eps=1e-5)),
    Peer("TE", TE, "norm_linear", _te_qkv, **QKV),
    Peer("TE", TE, BLOCK_CASE, partial(_te_block, checkpoint=False), **BLOCK),
    Peer("TE checkpoint", TE, BLOCK_CASE, partial(_te_block, checkpoint=True), **BLOCK),
    Peer("flash-attn", FLASH, "rms_norm", partial(_flash_norm, name="rms_norm_fn")),
    Peer("flash-attn", FLASH, "layer_norm", partial(_flash_norm, name="layer_norm_fn")),
    Peer("flash-attn", FLASH, "add_rms_norm", _flash_add),
)


class _Built:
    """A function that is built when it is first called, on the measured side of every guard."""

    def __init__(self, build: Callable[[Size], Callable[..., Any]], size: Size):
        self.build, self.size, self.fn = build, size, None

    def __call__(self, *inputs: Tensor) -> Any:
        if self.fn is None:
            self.fn = self.build(self.size)
        return self.fn(*inputs)


def peers_of(case: str, size: Size) -> dict[str, Way]:
    """Name the other libraries' ways of running a case, there or not."""
    ways = {}
    for peer in PEERS:
        if peer.case != case:
            continue
        missing = None if find_spec(peer.package) is not None else "not installed"
        fn = None if missing else _Built(peer.build, size)
        ways[peer.name] = Way(fn, missing, peer.pack, peer.unpack)
    return ways
