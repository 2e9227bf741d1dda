"""Every error that a call of a layer can cause, raised before any work.

`autograd/arguments.py` checks one argument; here is how arguments fit together. Classes and layouts
of tensors were checked by `dispatch.decide`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from fusedckpt.autograd import arguments, dispatch
from fusedckpt.autograd.arguments import DTYPES, choice, flag, integer
from fusedckpt.autograd.dispatch import Context, Meta, Operand
from fusedckpt.blocks.operands import LinearNames, LinearParts
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL


def activation(name: str, value: Any) -> str:
    """Return the table's name of an activation given by any of its names."""
    if value is None:
        return "identity"
    if not isinstance(value, str) or value not in CANONICAL:
        # the error names one spelling of each
        choice(name, "activation", value, ACTIVATIONS)
    return CANONICAL[value]


def check_tensors(name: str, operands: Sequence[Operand], metas: Sequence[Meta | None]) -> None:
    """Refuse all but floating-point tensors on one device, and None for one that must be there."""
    device = None
    owner = ""
    for (key, is_optional), meta in zip(operands, metas, strict=True):
        if meta is None:
            if not is_optional:
                arguments.wrong_type(name, key, "a tensor", None)
            continue
        if meta.dtype not in DTYPES:
            raise TypeError(f"{name}: {key} must be floating point, got {meta.dtype}")
        if device is None:
            device = meta.device
            owner = key
        elif meta.device != device:
            raise ValueError(
                f"{name}: {key} must be on the device of {owner}, {device}, got {meta.device}"
            )


def check_dense(name: str, by_name: dict[str, Any]) -> bool:
    """Refuse tensors that no call could take; return whether ours can take all."""
    is_taken = dispatch.takes_all(name, by_name)
    plain = {key: t for key, t in by_name.items() if dispatch.is_plain(type(t))}
    metas = [Meta(t.shape, t.dtype, t.device) for t in plain.values()]
    check_tensors(name, [Operand(key) for key in plain], metas)
    return is_taken


def check_shape(
    name: str, key: str, meta: Any, *shape: Any, must: str = "must be", beside: str = ""
) -> None:
    """Refuse a tensor of another shape; None is absent. beside: the shapes that it follows from."""
    if meta is not None and tuple(meta.shape) != shape:
        raise ValueError(
            f"{name}: {key} {must} {shape_text(shape)}, got {list(meta.shape)}{beside}"
        )


def shape_text(shape: Iterable[Any]) -> str:
    """Return a shape as text; a string in it is a free size."""
    return f"[{', '.join(map(str, shape))}]"


def check_integers(name: str, key: str, meta: Any, x: Meta, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse all but a tensor of integers on the device of x."""
    if meta is None:
        arguments.wrong_type(name, key, "a tensor", None)
    if meta.dtype not in dtypes:
        known = " or ".join([str(dtype).removeprefix("torch.") for dtype in dtypes])
        raise TypeError(f"{name}: {key} must be {known}, got {meta.dtype}")
    if meta.device != x.device:
        raise ValueError(f"{name}: {key} must be on the device of x, {x.device}, got {meta.device}")


def check_tensor(name: str, key: str, value: Any) -> None:
    """Refuse a value that is no tensor, such as None."""
    if not isinstance(value, (Tensor, Proxy)):
        arguments.wrong_type(name, key, "a tensor", value)


def check_linears(
    name: str,
    x: Meta,
    by_names: Mapping[LinearNames, LinearParts],
    last: LinearNames | None,
    halves: int,
    adds: bool,
) -> None:
    """Refuse linears that F.linear would refuse, or that do not fit each other.

    last: the linear that reads the hidden layer; x is added to its result. halves: the number of
    parts of the first weight's rows.
    """
    shape = x.shape
    read = "x"
    weight = x.shape
    rows: dict[str, int] = {}
    for names, parts in by_names.items():
        key = names.weight
        weight = parts.weight.shape
        if names == last:
            features = next(iter(rows.values()))
            if len(set(rows.values())) > 1:
                raise ValueError(
                    f"{name}: {' and '.join(rows)} must have the same number of rows, got "
                    f"{' and '.join(map(str, rows.values()))}"
                )
            if features % halves:
                raise ValueError(
                    f"{name}: a packed gate_weight must have an even number of rows, 2 F, got "
                    f"{features}"
                )
            shape = (*shape[:-1], features // halves)
            read = "h"
        if len(weight) != 2 or not shape:
            problem = f"{read} must have at least one dimension and {key} two"
        elif shape[-1] != weight[1]:
            problem = f"{key} expects {weight[1]} input features, {read} has {shape[-1]}"
        else:
            check_shape(name, names.bias, parts.bias, *weight[:1])
            rows[key] = weight[0]
            continue
        raise ValueError(f"{name}: {problem} ({read} {list(shape)}, weight {list(weight)})")
    if adds and last is not None and weight[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: residual needs {x.shape[-1]} output features, {last.weight} has {weight[0]}"
        )


def check_dtypes(
    name: str, context: Context, dtype: torch.dtype, by_name: Mapping[str, Any]
) -> None:
    """Refuse tensors that GEMMs in a dtype do not take; autocast casts all but float64."""
    for key, value in by_name.items():
        if value is None or value.dtype == dtype:
            continue
        if context.autocast is None or torch.float64 in (value.dtype, dtype):
            raise TypeError(
                f"{name}: x and {key} must share a dtype, got {dtype} and {value.dtype}"
            )


def check_multiplied(
    name: str, context: Context, dtype: torch.dtype, by_names: Mapping[LinearNames, LinearParts]
) -> None:
    """Refuse weights that linears which multiply in a dtype do not take, and adapters."""
    for names, parts in by_names.items():
        weight = None if parts.is_quantized else parts.weight
        check_dtypes(name, context, dtype, {names.weight: weight, names.bias: parts.bias})
    for (key, _), parts in by_names.items():
        n, k = parts.weight.shape
        for a, b in parts.adapters:
            is_pair = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
            if not is_pair or (b.shape[0], a.shape[1]) != (n, k):
                raise ValueError(
                    f"{name}: {key} is {[n, k]}, so A must be [r, {k}] and B [{n}, r], got "
                    f"{list(a.shape)} and {list(b.shape)}"
                )
            if a.dtype != b.dtype and context.autocast is None:
                raise TypeError(
                    f"{name}: {key}.A and {key}.B must share a dtype, got {a.dtype} and {b.dtype}"
                )


def check_kernel(name: str, kernel: str | None, x: Meta, dtype: torch.dtype) -> None:
    """Refuse a kernel that cannot run where x is."""
    if kernel not in (None, "split") and dispatch.is_aten(x.device, dtype):
        raise ValueError(
            f"{name}: kernel={kernel!r} needs Triton: a GPU, or a CPU under TRITON_INTERPRET=1, and"
            f" float32, bfloat16 or float16 tensors, got {dtype} on {x.device}"
        )


def normalized_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Return a size, or several, as a tuple."""
    sizes = shape
    if isinstance(shape, (int, torch.SymInt)):
        sizes = (shape,)
    elif not isinstance(shape, (tuple, list)):
        sizes = (shape,) if getattr(shape, "shape", None) == () else _listed(shape)
        if sizes is None:
            arguments.wrong_type(name, "normalized_shape", "an integer or several", shape)
    if not sizes:
        arguments.wrong_value(name, "normalized_shape", "an integer or several", shape)
    return tuple([integer(name, "normalized_shape", size) for size in sizes])


def _listed(value: Any) -> list[Any] | None:
    return list(value) if isinstance(value, Iterable) else None


def check_layer_options(name: str, residual: Any, chunks: Any) -> None:
    """Refuse options of an MLP."""
    flag(name, "residual", residual)
    if chunks is not None:
        integer(name, "chunks", chunks, 1)


def as_list(name: str, key: str, value: Any) -> list[Any]:
    """Return a sequence of tensors as a list."""
    # a tensor's rows are not meant
    items = None if isinstance(value, (Tensor, str, Mapping)) else _listed(value)
    if items is None:
        arguments.wrong_type(name, key, "a list of tensors", value)
    return items
