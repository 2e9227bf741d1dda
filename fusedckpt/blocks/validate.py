"""Every error that a call of a layer can cause, raised before any work.

`autograd/arguments.py` checks one argument, `constructors.py` the arguments of constructors;
here is how the arguments of calls fit together. Of tensors, shapes, dtypes and devices are checked
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
from fusedckpt.blocks.builder import bias_of
from fusedckpt.blocks.norm_spec import NormSpec, output_dtype, widens_norm
from fusedckpt.blocks.operands import Parts
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL
from fusedckpt.kernels.codes import APPROXIMATE

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
    """Refuse a value that is no tensor, such as None."""
    if not isinstance(given, (Tensor, Proxy)):
        arguments.wrong_type(name, key, "a tensor", given)


def linears(
    name: str, x: Meta, given: Mapping[str, Parts], last: str | None, halves: int, adds: bool
) -> None:
    """Refuse linears that F.linear would refuse, or that do not fit each other.

    given: by the names of their weights; last: the one that reads the hidden layer: x is added to
    its result; halves: in how many parts the first weight's rows are.
    """
    shape, read, weight = x.shape, "x", x.shape
    rows: dict[str, int] = {}
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


def norm_rule(name: str, spec: NormSpec, prefix: str = "") -> None:
    """Refuse a norm that means nothing."""
    choice(name, f"{prefix}kind", spec.kind, ("rms", "layer"))
    if spec.eps is not None:
        number(name, f"{prefix}eps", spec.eps, 0)
    number(name, f"{prefix}offset", spec.offset)
    choice(name, f"{prefix}cast", spec.cast, CASTS)
    if spec.kind == "rms" and spec.bias is not None:
        raise ValueError(f"{name}: {prefix}bias must be None, as an RMSNorm has none")
    if spec.offset and spec.weight is None:
        raise ValueError(f"{name}: {prefix}offset={spec.offset} needs {prefix}weight, got none")
    if spec.kind == "layer" and (spec.offset or spec.cast != "torch"):
        raise ValueError(f"{name}: norm.offset and norm.cast are RMSNorm's, norm.kind is 'layer'")


def norm(
    name: str, x: Meta, spec: NormSpec, shape: tuple[int, ...], around: Around, prefix: str = ""
) -> torch.dtype:
    """Return the dtype of norm(x); refuse arguments that F.rms_norm or F.layer_norm would.

    spec: with the metas of weight and bias in their places; shape: normalized_shape.
    """
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{name}: x must end in normalized_shape {list(shape)}, got {list(x.shape)}"
        )
    given = {f"{prefix}weight": spec.weight, f"{prefix}bias": spec.bias}
    found = {key: value for key, value in given.items() if value is not None}
    for key, value in found.items():
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{name}: {key} must be normalized_shape {list(shape)}, got {list(value.shape)}"
            )
    dtypes = {key: value.dtype for key, value in found.items()}
    if not (spec.kind == "rms" or _fit(x, set(dtypes.values()), around)):
        key = next(key for key, dtype in dtypes.items() if dtype != x.dtype)
        raise TypeError(f"{name}: x and {key} must share a dtype, got {x.dtype} and {dtypes[key]}")
    return output_dtype(spec, x, spec.weight, around.autocast)


def _fit(x: Meta, dtypes: set[torch.dtype], around: Around) -> bool:
    """Whether F.layer_norm takes parameters of these dtypes beside x."""
    if x.device.type == "meta" or dtypes <= {x.dtype}:
        return True
    widens = widens_norm(around.autocast, x.device, "layer")
    if widens and torch.float64 not in (x.dtype, *dtypes):
        return True
    # a CPU's reads parameters of float32 beside half precision
    return x.device.type == "cpu" and x.dtype in HALF and dtypes == {torch.float32}


def block(name: str, residual: Any, chunks: Any) -> None:
    """Refuse options of an MLP block."""
    flag(name, "residual", residual)
    if chunks is not None:
        integer(name, "chunks", chunks, 1)


def approximate(name: str, given: Any, activation: str, level: str) -> None:
    """Refuse an approximate derivative that does not exist, or that nothing would be saved for."""
    if not flag(name, "approximate", given):
        return
    choice(name, "activation", activation, APPROXIMATE)
    if level == "inputs":
        raise ValueError(
            f"{name}: approximate=True needs save='preact', as codes replace a saved "
            f"pre-activation, got {level!r}"
        )


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
