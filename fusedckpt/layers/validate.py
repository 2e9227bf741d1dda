"""Every error that a caller can cause, raised before any work: function, expectation, what came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL
from fusedckpt.layers.norm_spec import NormSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASTS = ("torch", "llama", "gemma")


def activation(name: str, given: Any) -> str:
    """Return the table's name of an activation given by any of its names."""
    if given is None:
        return "identity"
    if not isinstance(given, str):
        raise TypeError(f"{name}: activation must be a name, got {type(given).__name__}")
    if given not in CANONICAL:
        raise ValueError(
            f"{name}: unknown activation {given!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    return CANONICAL[given]


def kernel(name: str, given: Any, path: str, fused: str = "fused") -> None:
    """Refuse a kernel plan that is neither "split" nor `fused`, or cannot run on this path."""
    if given not in (None, "split", fused):
        raise ValueError(f"{name}: kernel must be 'split' or {fused!r}, got {given!r}")
    if given == fused and path == "aten":
        raise ValueError(
            f"{name}: kernel={fused!r} needs Triton: a GPU, or a CPU under TRITON_INTERPRET=1, and "
            "float32, bfloat16 or float16 tensors"
        )


def tensors(name: str, required: dict[str, Any], **optional: Any) -> None:
    """Refuse all but dense floating-point tensors on one device; optional ones may be None."""
    given = required | {key: value for key, value in optional.items() if value is not None}
    device, owner = None, ""
    for key, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {key} must be a tensor, got {type(value).__name__}")
        if type(value).__name__ == "DTensor":
            raise TypeError(f"{name}: {key} is a DTensor: pass its local tensor")
        if value.layout != torch.strided or value.is_nested:
            raise TypeError(f"{name}: {key} must be a dense tensor, got layout {value.layout}")
        if value.dtype not in DTYPES:
            raise TypeError(f"{name}: {key} must be floating point, got {value.dtype}")
        if device is None:
            device, owner = value.device, key
        elif value.device != device:
            raise ValueError(
                f"{name}: all tensors must be on one device, {owner} is on {device}, "
                f"{key} on {value.device}"
            )


def linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Refuse shapes that nn.Linear would refuse; `prefix` goes before "weight" and "bias"."""
    tensors(name, {"x": x, f"{prefix}weight": weight}, **{f"{prefix}bias": bias})
    if weight.dim() != 2 or x.dim() == 0:
        problem = f"x must have at least one dimension and {prefix}weight two"
    elif x.shape[-1] != weight.shape[1]:
        problem = f"{prefix}weight expects {weight.shape[1]} input features, x has {x.shape[-1]}"
    elif bias is not None and bias.shape != weight.shape[:1]:
        problem = f"{prefix}bias must be [{weight.shape[0]}], got {list(bias.shape)}"
    else:
        return
    raise ValueError(f"{name}: {problem} (x {list(x.shape)}, weight {list(weight.shape)})")


def same_dtype(name: str, dtype: torch.dtype, autocast: bool, **given: Tensor | None) -> None:
    """Refuse weights of another dtype than the one x is multiplied in."""
    for key, value in given.items():
        if value is None or value.dtype == dtype:
            continue
        # autocast casts every floating dtype but float64
        if not autocast or torch.float64 in (value.dtype, dtype):
            raise TypeError(
                f"{name}: x and {key} must share a dtype, got {dtype} and {value.dtype}"
            )


def normalized_shape(name: str, given: Any) -> tuple[int, ...]:
    """Return `given` as a tuple of sizes."""
    shape = (given,) if isinstance(given, int) else tuple(given)
    if not shape:
        raise ValueError(f"{name}: normalized_shape must name at least one dimension")
    return shape


def norm(
    name: str,
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """Refuse shapes that F.rms_norm or F.layer_norm would refuse."""
    required = {"x": x} if residual is None else {"x": x, "residual": residual}
    tensors(name, required, weight=weight, bias=bias)
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{name}: x must end in normalized_shape {list(shape)}, got {list(x.shape)}"
        )
    for key, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"{name}: {key} must be normalized_shape {list(shape)}, got {list(value.shape)}"
            )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{name}: residual must have the shape of x {list(x.shape)}, got {list(residual.shape)}"
        )


def norm_spec(name: str, x: Tensor, given: Any) -> None:
    """Refuse what is no record of a norm over x's last dimension."""
    if not isinstance(given, NormSpec):
        raise TypeError(f"{name}: norm must be a NormSpec, got {type(given).__name__}")
    if given.kind not in ("rms", "layer"):
        raise ValueError(f"{name}: norm must be 'rms' or 'layer', got {given.kind!r}")
    if given.kind == "rms" and given.bias is not None:
        raise ValueError(f"{name}: an RMSNorm has no bias")
    if given.kind == "layer" and (given.offset or given.cast != "torch"):
        raise ValueError(f"{name}: offset and cast are RMSNorm's, the norm is 'layer'")
    rms_options(name, given.eps, given.offset, given.cast, has_weight=given.weight is not None)
    norm(name, x, tuple(x.shape[-1:]), given.weight, given.bias)


Linears = dict[str, tuple[Any, Any]]


def mlp(
    name: str, x: Tensor, linears: Linears, norm: Any, residual: bool, chunks: Any, packed: bool
) -> None:
    """Refuse an MLP block whose linears, (weight, bias) by name, the last one last, do not fit.

    `packed`: the first weight holds the gate's rows, then up's.
    """
    *first, (last, (down, down_bias)) = linears.items()
    for key, (weight, bias) in first:
        linear(name, x, weight, bias, f"{key}_")
    rows = {key: weight.shape[0] for key, (weight, _) in first}
    features = next(iter(rows.values()))
    if len(set(rows.values())) > 1:
        raise ValueError(f"{name}: weights before the last must have as many rows, got {rows}")
    if packed and features % 2:
        raise ValueError(f"{name}: a packed weight must have 2 F rows, got {features}")
    features //= 2 if packed else 1
    tensors(name, {"x": x, f"{last}_weight": down}, **{f"{last}_bias": down_bias})
    if down.dim() != 2 or down.shape[1] != features:
        raise ValueError(
            f"{name}: {last}_weight must be [out_features, {features}], got {list(down.shape)}"
        )
    if down_bias is not None and down_bias.shape != down.shape[:1]:
        raise ValueError(
            f"{name}: {last}_bias must be [{down.shape[0]}], got {list(down_bias.shape)}"
        )
    if residual and down.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: residual needs {x.shape[-1]} output features, {last}_weight has "
            f"{down.shape[0]}"
        )
    if norm is not None:
        norm_spec(name, x, norm)
    num_chunks(name, chunks)


def num_chunks(name: str, given: Any) -> None:
    """Refuse a number of chunks that is neither None nor a positive integer."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{name}: chunks must be an integer, got {type(given).__name__}")
    if given < 1:
        raise ValueError(f"{name}: chunks must be at least 1, got {given}")


def block(
    name: str, norm: Any, residual: bool, in_features: int, out_features: int, chunks: Any
) -> None:
    """Refuse a block's options that do not fit each other."""
    if norm is not None:
        modules(name, norm)
    if residual and in_features != out_features:
        raise ValueError(
            f"{name}: residual needs as many output as input features, got {in_features} and "
            f"{out_features}"
        )
    num_chunks(name, chunks)


def modules(name: str, *given: Any) -> None:
    """Refuse children that are no modules."""
    for module in given:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name}: expects modules, got {type(module).__name__}")


def projections(name: str, x: Tensor, norm: Any, weights: list[Any], biases: list[Any]) -> None:
    """Refuse linears that cannot all read norm(x)."""
    if not weights:
        raise ValueError(f"{name}: weights must name at least one linear")
    if len(weights) != len(biases):
        raise ValueError(f"{name}: {len(weights)} weights, but {len(biases)} biases")
    for weight, bias in zip(weights, biases, strict=True):
        linear(name, x, weight, bias)
    norm_spec(name, x, norm)


def no_bias(name: str, up_bias: Any) -> None:
    """Refuse a bias of an up projection that is packed with the gate."""
    if up_bias is not None:
        raise ValueError(
            f"{name}: without up_weight, gate_bias is packed too: up_bias must be None"
        )


def rms_options(name: str, eps: Any, offset: Any, cast: Any, has_weight: bool) -> None:
    """Refuse options of RMSNorm that mean nothing."""
    if eps is not None:
        number(name, "eps", eps)
    number(name, "offset", offset)
    if cast not in CASTS:
        raise ValueError(f"{name}: cast must be one of {', '.join(CASTS)}, got {cast!r}")
    if offset and not has_weight:
        raise ValueError(f"{name}: offset={offset} is added to the weight, and there is none")


def number(name: str, key: str, given: Any) -> None:
    """Refuse what is not a real number."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}: {key} must be a number, got {type(given).__name__}")
