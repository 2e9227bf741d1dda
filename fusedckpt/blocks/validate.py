"""Every error that a call of a layer can cause, raised before any work.

`autograd/arguments.py` has what one argument may be, `constructors.py` what modules are made from;
here is how what calls are given fits together. Of tensors, shapes, dtypes and devices are checked
here; classes and layouts were, by `dispatch.settled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from fusedckpt.autograd import arguments, dispatch
from fusedckpt.autograd.arguments import DTYPES, choice, flag, integer, number
from fusedckpt.autograd.dispatch import Around, Meta
from fusedckpt.autograd.lora import Parts
from fusedckpt.autograd.norm_spec import NormSpec, output_dtype
from fusedckpt.blocks.builder import bias_of
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL

CASTS = ("torch", "llama", "gemma")
HALF = (torch.bfloat16, torch.float16)


def activation(name: str, given: Any) -> str:
    """Return the table's name of an activation given by any of its names."""
    if given is None:
        return "identity"
    if not isinstance(given, str) or given not in CANONICAL:
        # the error names one spelling of each
        choice(name, "activation", given, ACTIVATIONS)
    return CANONICAL[given]


def tensors(name: str, keys: Sequence[str], metas: Sequence[Meta | None]) -> None:
    """Refuse all but floating-point tensors on one device; None where a key ends in "?" alone."""
    device, owner = None, ""
    for key, given in zip(keys, metas, strict=True):
        if given is None:
            if not key.endswith("?"):
                arguments.wrong_type(name, key, "a tensor", None)
            continue
        key = key.rstrip("?")
        if given.dtype not in DTYPES:
            raise TypeError(f"{name}: {key} must be floating point, got {given.dtype}")
        if device is None:
            device, owner = given.device, key
        elif given.device != device:
            raise ValueError(
                f"{name}: {key} must be on the device of {owner}, {device}, got {given.device}"
            )


def dense(name: str, given: Mapping[str, Any]) -> bool:
    """Refuse tensors that no call could take; return whether ours can take all."""
    found = {key: t for key, t in given.items() if dispatch.takes(name, key, t)}
    metas = [Meta(t.shape, t.dtype, t.device) for t in found.values()]
    tensors(name, list(found), metas)
    wanted = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    kept = list(found.values()) if wanted else []
    return len(found) == len(given) and not any(t.is_inference() for t in kept)


def tensor(name: str, key: str, given: Any) -> None:
    """Refuse what is no tensor, None among it."""
    if not isinstance(given, (Tensor, Proxy)):
        arguments.wrong_type(name, key, "a tensor", given)


def linears(
    name: str, x: Meta, given: Mapping[str, Parts], last: str | None, halves: int, adds: bool
) -> None:
    """Refuse linears that F.linear would refuse, or that do not fit each other.

    given: by the names of their weights; last: the one that reads the hidden layer, whose result x
    is added to; halves: in how many parts the first weight's rows are.
    """
    shape, read, rows, weight = x.shape, "x", dict[str, int](), x.shape
    for key, parts in given.items():
        weight, bias = (parts.weight or parts.base).shape, parts.bias
        if key == last:
            features = _features(name, rows, halves)
            shape, read = (*shape[:-1], features // halves), "h"
        if len(weight) != 2 or not shape:
            problem = f"{read} must have at least one dimension and {key} two"
        elif shape[-1] != weight[1]:
            problem = f"{key} expects {weight[1]} input features, {read} has {shape[-1]}"
        elif bias is not None and bias.shape != weight[:1]:
            problem = f"{bias_of(key)} must be [{weight[0]}], got {list(bias.shape)}"
        else:
            rows[key.removesuffix("_weight")] = weight[0]
            continue
        raise ValueError(f"{name}: {problem} ({read} {list(shape)}, weight {list(weight)})")
    if adds and last is not None and weight[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: residual needs {x.shape[-1]} output features, {last} has {weight[0]}"
        )


def _features(name: str, rows: Mapping[str, int], halves: int) -> int:
    """Return the number of rows of the weights before a hidden layer."""
    features = next(iter(rows.values()))
    if len(set(rows.values())) > 1:
        raise ValueError(f"{name}: weights but the last must have one number of rows, got {rows}")
    if features % halves:
        raise ValueError(
            f"{name}: a packed gate_weight must have an even number of rows, 2 F, got {features}"
        )
    return features


def multiplied(name: str, around: Around, dtype: torch.dtype, given: Mapping[str, Parts]) -> None:
    """Refuse weights that linears which multiply in a dtype do not take, and adapters."""
    for key, parts in given.items():
        for own, value in ((key, parts.weight), (bias_of(key), parts.bias)):
            if value is None or value.dtype == dtype:
                continue
            # autocast casts every floating dtype but float64
            if around.autocast is None or torch.float64 in (value.dtype, dtype):
                raise TypeError(
                    f"{name}: x and {own} must share a dtype, got {dtype} and {value.dtype}"
                )
    for key, parts in given.items():
        n, k = (parts.weight or parts.base).shape
        for a, b in parts.adapters:
            fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
            if not fits or (b.shape[0], a.shape[1]) != (n, k):
                raise ValueError(
                    f"{name}: {key} is {[n, k]}, so A must be [r, {k}] and B [{n}, r], got "
                    f"{list(a.shape)} and {list(b.shape)}"
                )
            if a.dtype != b.dtype and around.autocast is None:
                raise TypeError(
                    f"{name}: {key}.A and {key}.B must share a dtype, got {a.dtype} and {b.dtype}"
                )


def runs(name: str, kernel: str | None, x: Meta, dtype: torch.dtype) -> None:
    """Refuse a kernel that cannot run where x is."""
    if kernel not in (None, "split") and dispatch.path_of(x.device, dtype) == "aten":
        raise ValueError(
            f"{name}: kernel={kernel!r} needs Triton: a GPU, or a CPU under TRITON_INTERPRET=1, and"
            f" float32, bfloat16 or float16 tensors, got {dtype} on {x.device}"
        )


def normalized_shape(name: str, given: Any) -> tuple[int, ...]:
    """Return a size, or several, as a tuple."""
    sizes = given
    if isinstance(given, (int, torch.SymInt)):
        sizes = (given,)
    elif not isinstance(given, (tuple, list)):
        sizes = (given,) if getattr(given, "shape", None) == () else _listed(given)
        if sizes is None:
            arguments.wrong_type(name, "normalized_shape", "an integer or several", given)
    if not sizes:
        arguments.wrong_value(name, "normalized_shape", "an integer or several", given)
    return tuple([integer(name, "normalized_shape", size) for size in sizes])


def _listed(given: Any) -> list[Any] | None:
    return list(given) if isinstance(given, Iterable) else None


def norm(
    name: str, x: Meta, shape: tuple[int, ...], weight: Any, bias: Any, prefix: str = ""
) -> None:
    """Refuse shapes that F.rms_norm or F.layer_norm would refuse."""
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{name}: x must end in normalized_shape {list(shape)}, got {list(x.shape)}"
        )
    for key, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"{name}: {prefix}{key} must be normalized_shape {list(shape)}, got "
                f"{list(value.shape)}"
            )


def layer_norm_dtypes(
    name: str, x: Meta, parameters: Sequence[Meta | None], around: Around, prefix: str = ""
) -> None:
    """Refuse dtypes that F.layer_norm would refuse: F.rms_norm takes any."""
    pairs = zip(("weight", "bias"), parameters, strict=True)
    found = {key: value.dtype for key, value in pairs if value is not None}
    if x.device.type == "meta" or all(other == x.dtype for other in found.values()):
        return
    widens = dispatch.widens_norm(around.autocast, x.device, "layer")
    if widens and torch.float64 not in (x.dtype, *found.values()):
        return
    # a CPU's reads parameters of float32 beside half precision
    if x.device.type == "cpu" and x.dtype in HALF and set(found.values()) == {torch.float32}:
        return
    key = next(key for key, other in found.items() if other != x.dtype)
    raise TypeError(
        f"{name}: x and {prefix}{key} must share a dtype, got {x.dtype} and {found[key]}"
    )


def residual(name: str, x: Meta, given: Meta) -> None:
    """Refuse a residual of another shape."""
    if given.shape != x.shape:
        raise ValueError(
            f"{name}: residual must have the shape of x {list(x.shape)}, got {list(given.shape)}"
        )


def norm_spec(name: str, given: Any, weight: Meta | None, bias: Meta | None) -> NormSpec:
    """Return a record of a norm with its weight and bias; refuse one that means nothing."""
    if not isinstance(given, NormSpec):
        arguments.wrong_type(name, "norm", "a NormSpec", given)
    given = given._replace(weight=weight, bias=bias)  # type: ignore[arg-type]  # known of tensors
    choice(name, "norm.kind", given.kind, ("rms", "layer"))
    if given.kind == "rms" and given.bias is not None:
        raise ValueError(f"{name}: norm.bias must be None, as an RMSNorm has none")
    rms_options(
        name,
        given.eps,
        given.offset,
        given.cast,
        has_weight=given.weight is not None,
        prefix="norm.",
    )
    if given.kind == "layer" and (given.offset or given.cast != "torch"):
        raise ValueError(f"{name}: norm.offset and norm.cast are RMSNorm's, norm.kind is 'layer'")
    return given


def normed(name: str, x: Meta, spec: NormSpec | None, around: Around) -> torch.dtype:
    """Return the dtype of norm(x) for a block, or x's; refuse a norm over anything but its rows.

    The record holds what is known of the norm's weight and bias in their places.
    """
    if spec is None:
        return x.dtype
    weight: Any = spec.weight
    bias: Any = spec.bias
    norm(name, x, tuple(x.shape[-1:]), weight, bias=bias, prefix="norm.")
    if spec.kind == "layer":
        layer_norm_dtypes(name, x, (weight, bias), around, prefix="norm.")
    return output_dtype(spec, x, weight, around.autocast)


def block(name: str, residual: Any, chunks: Any) -> None:
    """Refuse options of an MLP block."""
    flag(name, "residual", residual)
    if chunks is not None:
        integer(name, "chunks", chunks, 1)


def projections(name: str, weights: Any, biases: Any) -> tuple[list[Any], list[Any]]:
    """Return linears' weights and biases as lists; refuse none, and not as many of both."""
    weights = several(name, "weights", weights)
    biases = [None] * len(weights) if biases is None else several(name, "biases", biases)
    if not weights:
        raise ValueError(f"{name}: weights must not be empty, got none")
    if len(weights) != len(biases):
        raise ValueError(
            f"{name}: biases must be one per weight, got {len(biases)} for {len(weights)}"
        )
    return weights, biases


def several(name: str, key: str, given: Any) -> list[Any]:
    """Return a sequence of tensors as a list."""
    # a tensor's rows are not meant
    found = None if isinstance(given, (Tensor, str, Mapping)) else _listed(given)
    if found is None:
        arguments.wrong_type(name, key, "a list of tensors", given)
    return found


def no_bias(name: str, up_bias: Any) -> None:
    """Refuse a bias of an up projection that is packed with the gate."""
    if up_bias is not None:
        raise ValueError(
            f"{name}: up_bias must be None if up_weight is, as gate_bias is packed too, got "
            f"{type(up_bias).__name__}"
        )


def rms_options(
    name: str, eps: Any, offset: Any, cast: Any, has_weight: bool, prefix: str = ""
) -> None:
    """Refuse options of RMSNorm that mean nothing."""
    if eps is not None:
        number(name, f"{prefix}eps", eps, 0)
    number(name, f"{prefix}offset", offset)
    choice(name, f"{prefix}cast", cast, CASTS)
    if offset and not has_weight:
        raise ValueError(f"{name}: {prefix}offset={offset} needs {prefix}weight, got none")
