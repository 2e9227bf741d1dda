"""Other libraries' implementations of our cases, each an adapter of a few lines.

A library that is not installed is a line that says so. An error of an adapter or the library, also
while it is imported, costs its own row: libraries are imported inside the first call. None of them
runs on a CPU; README says how far, and at which versions, the adapters were tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.cases import EPS, EXPERTS, TOP_K, Size, Tensors, routed
from bench.measure import Implementation


class Peer(NamedTuple):
    """A library's implementation of a case."""

    # as tables show it
    name: str
    # the module that it needs
    package: str
    # a key of CASES
    case: str
    # called with the size and the case's inputs
    fn: Callable[..., Any]
    # maps the case's inputs to those of `fn`, which may lay out weights in another way
    pack: Callable[[Tensors], Tensors] | None = None
    # maps the gradients of `fn` to those of the case's inputs
    unpack: Callable[[Tensors], Tensors] | None = None


@cache
def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _liger_rms(size: Size, *inputs: Tensor, path: str = "rms_norm.LigerRMSNormFunction") -> Any:
    # "gemma" rounds once, at the end, as torch does; in place it would overwrite our gradient
    return _load(f"liger_kernel.ops.{path}").apply(*inputs, EPS, 0.0, "gemma", False)


def _liger_layer(size: Size, *inputs: Tensor) -> Any:
    return _load("liger_kernel.ops.layer_norm.LigerLayerNormFunction").apply(*inputs, 1e-5)


def _liger_swiglu(size: Size, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    swiglu = _load("liger_kernel.ops.swiglu.LigerSiLUMulFunction")
    return F.linear(swiglu.apply(F.linear(x, gate), F.linear(x, up)), down)


@cache
def _experts_of(size: Size, implementation: str) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    widths: Any = {"hidden_size": size.dim, "moe_intermediate_size": size.expert}
    config: Any = Qwen3MoeConfig(**widths, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    config._experts_implementation = implementation
    with torch.device("meta"):
        return Qwen3MoeExperts(config)


def _transformers(
    size: Size, x: Tensor, router: Tensor, *weights: Tensor, implementation: str = "eager"
) -> Any:
    names = "gate_up_proj", "down_proj"
    parameters: dict[str, Tensor] = dict(zip(names, weights, strict=True))
    module = _experts_of(size, implementation)
    return torch.func.functional_call(module, parameters, (x, *routed(x, router)))


def _targets(x: Tensor, weight: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) % weight.shape[0]


def _liger_head(size: Size, x: Tensor, weight: Tensor) -> Any:
    loss = "liger_kernel.transformers.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyLoss"
    return _load(loss)()(weight, x, _targets(x, weight))


def _torch_head(size: Size, x: Tensor, weight: Tensor) -> Any:
    # since torch 2.13
    chunked = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, _targets(x, weight), options=chunked)


def _cut_head(size: Size, x: Tensor, weight: Tensor) -> Any:
    # releases differ under autocast; gradients are written by strides
    is_cast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
    rows, classes = (t.to(dtype).contiguous() for t in (x, weight))
    loss = _load("cut_cross_entropy.linear_cross_entropy")
    return loss(rows, classes, _targets(x, weight))


_grouped = partial(_transformers, implementation="grouped_mm")


def _liger_mlp(size: Size, x: Tensor, *weights: Tensor) -> Tensor:
    # it wants a batch
    mlp = _load("liger_kernel.ops.mlp.LigerMLPFunction")
    return mlp.apply(x.unsqueeze(0), *weights).squeeze(0)


def _liger_block(size: Size, x: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
    return x + _liger_swiglu(size, _liger_rms(size, x, norm), *weights)


def _quack_rms(size: Size, x: Tensor, weight: Tensor) -> Any:
    return _load("quack.rmsnorm.rmsnorm")(x, weight, eps=EPS)


def _quack_add(size: Size, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    norm = _load("quack.rmsnorm.rmsnorm")
    return norm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _quack_mlp(size: Size, *inputs: Tensor, recompute: bool = False) -> Any:
    mlp = _load("quack.mlp.mlp_func")
    return mlp(*inputs, activation="swiglu", concat_layout=True, recompute=recompute)


def _flash_rms(size: Size, x: Tensor, weight: Tensor, **options: Any) -> Any:
    norm = _load("flash_attn.ops.triton.layer_norm.rms_norm_fn")
    return norm(x, weight, None, eps=EPS, **options)


def _flash_layer(size: Size, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return _load("flash_attn.ops.triton.layer_norm.layer_norm_fn")(x, weight, bias, eps=1e-5)


def _flash_add(size: Size, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return _flash_rms(size, x, weight, residual=residual, prenorm=True)


@cache
def _te_module(kind: str, widths: tuple[int, ...], dtype: torch.dtype, **options: Any) -> nn.Module:
    return _load(f"transformer_engine.pytorch.{kind}")(*widths, params_dtype=dtype, **options)


def _te(
    size: Size, x: Tensor, *parameters: Tensor, kind: str, widths: Any = (), **options: Any
) -> Any:
    """Call a Transformer Engine module on parameters of ours, in the order of its parameters.

    They become the module's: the backward of its norms reads the module's weight, not a saved one.
    """
    module = _te_module(kind, (size.dim, *widths), x.dtype, **options)
    named = list(module.named_parameters())
    for (name, before), parameter in zip(named, parameters, strict=True):
        if before is not parameter:
            setattr(module, name, parameter)
    return module(x)


RMS = {"eps": EPS, "bias": False, "normalization": "RMSNorm"}


def _te_qkv(size: Size, *inputs: Tensor) -> Any:
    sizes = (size.dim, size.kv, size.kv)
    return _te(size, *inputs, kind="LayerNormLinear", widths=(sum(sizes),), **RMS).split(sizes, -1)


def _te_block(size: Size, x: Tensor, *parameters: Tensor, **options: Any) -> Tensor:
    options |= {"kind": "LayerNormMLP", "widths": (size.hidden,), "activation": "swiglu"}
    return x + _te(size, x, *parameters, **options, **RMS)


def _join(inputs: Tensors, first: int, count: int) -> Tensors:
    joined = nn.Parameter(torch.cat([x.detach() for x in inputs[first : first + count]]))
    return [*inputs[:first], joined, *inputs[first + count :]]


def _split(grads: Tensors, first: int, sizes: Sequence[int] | None = None) -> Tensors:
    sizes = [grads[first].shape[0] // 2] * 2 if sizes is None else list(sizes)
    return [*grads[:first], *grads[first].split(sizes), *grads[first + 1 :]]


def _split_qkv(grads: Tensors) -> Tensors:
    dim = grads[2].shape[1]
    kv = (grads[2].shape[0] - dim) // 2
    return _split(grads, 2, [dim, kv, kv])


# gate and up, or q, k and v, in one tensor
GATED = {"pack": partial(_join, first=1, count=2), "unpack": partial(_split, first=1)}
BLOCK = {"pack": partial(_join, first=2, count=2), "unpack": partial(_split, first=2)}
QKV = {"pack": partial(_join, first=2, count=3), "unpack": _split_qkv}

LIGER = "liger_kernel"
QUACK = "quack"
TE = "transformer_engine"
FLASH = "flash_attn"
BLOCK_CASE = "norm_gated_mlp_residual"
LIGER_ADD = "fused_add_rms_norm.LigerFusedAddRMSNormFunction"
PEERS: tuple[Peer, ...] = (
    Peer("Liger", LIGER, "rms_norm", _liger_rms),
    Peer("Liger", LIGER, "layer_norm", _liger_layer),
    Peer("Liger", LIGER, "add_rms_norm", partial(_liger_rms, path=LIGER_ADD)),
    Peer("torch's", "torch", "head", _torch_head),
    Peer("CCE", "cut_cross_entropy", "head", _cut_head),
    Peer("Liger", LIGER, "head", _liger_head),
    Peer("transformers", "transformers", "experts", _transformers),
    Peer("transformers grouped_mm", "transformers", "experts", _grouped),
    Peer("Liger SwiGLU", LIGER, "gated_mlp", _liger_swiglu),
    Peer("LigerMLP", LIGER, "gated_mlp", _liger_mlp),
    Peer("Liger norm, SwiGLU", LIGER, BLOCK_CASE, _liger_block),
    Peer("quack", QUACK, "rms_norm", _quack_rms),
    Peer("quack", QUACK, "add_rms_norm", _quack_add),
    Peer("quack", QUACK, "gated_mlp", _quack_mlp, **GATED),
    Peer("quack recompute", QUACK, "gated_mlp", partial(_quack_mlp, recompute=True), **GATED),
    Peer("TE", TE, "rms_norm", partial(_te, kind="RMSNorm", eps=EPS)),
    Peer("TE", TE, "layer_norm", partial(_te, kind="LayerNorm", eps=1e-5)),
    Peer("TE", TE, "norm_linear", _te_qkv, **QKV),
    Peer("TE", TE, BLOCK_CASE, _te_block, **BLOCK),
    Peer("TE checkpoint", TE, BLOCK_CASE, partial(_te_block, checkpoint=True), **BLOCK),
    Peer("flash-attn", FLASH, "rms_norm", _flash_rms),
    Peer("flash-attn", FLASH, "layer_norm", _flash_layer),
    Peer("flash-attn", FLASH, "add_rms_norm", _flash_add),
)


def peers_of(case: str, size: Size) -> Iterator[Implementation]:
    """Yield the other libraries' implementations of a case, there or not."""
    for peer in PEERS:
        if peer.case == case:
            missing = None if find_spec(peer.package) is not None else "not installed"
            fn = partial(peer.fn, size)
            yield Implementation(peer.name, fn, missing, peer.pack, unpack=peer.unpack)
