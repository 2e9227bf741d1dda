"""Every error that a call of a layer can cause, raised before any work.

`autograd/arguments.py` has what one argument may be, `constructors.py` what modules are made from;
here is what calls are given, and how it fits together. Checks of
tensors return the dtype that the layer computes in, or None where only the eager twin can run: with
tensors of a class that has ops of its own, which nothing but such an op is asked about, and with
those of inference mode where gradients are wanted, of which torch keeps some and refuses others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd import arguments, dispatch
from fusedckpt.autograd.arguments import DTYPES, choice, flag, integer, number
from fusedckpt.autograd.norm_spec import NormSpec, output_dtype
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL

CASTS = ("torch", "llama", "gemma")
HALF = (torch.bfloat16, torch.float16)
# classes of torch's whose parts a function could be called with
_PARTED = ("DTensor", "NestedTensor")

Linears = dict[str, tuple[Any, Any]]


def activation(name: str, given: Any) -> str:
    """Return the table's name of an activation given by any of its names."""
    if given is None:
        return "identity"
    if not isinstance(given, str) or given not in CANONICAL:
        # the error names one spelling of each
        choice(name, "activation", given, ACTIVATIONS)
    return CANONICAL[given]


def kernel(name: str, given: Any, fused: str) -> None:
    """Refuse a kernel plan that is neither "split" nor `fused`."""
    if given is not None:
        choice(name, "kernel", given, ("split", fused))


def tensors(name: str, required: Mapping[str, Any], optional: Mapping[str, Any]) -> bool:
    """Refuse all but dense floating-point tensors on one device; optional ones may be None.

    Returns whether our ops can take them.
    """
    given = {**required, **{key: value for key, value in optional.items() if value is not None}}
    device, owner, plain = None, "", True
    for key, value in given.items():
        if not isinstance(value, Tensor):
            arguments.wrong_type(name, key, "a tensor", value)
        if not dispatch.is_plain(type(value)):
            _refuse_parted(name, key, type(value))
            plain = False
            continue
        if value.layout != torch.strided or value.is_nested:
            layout = "a nested tensor" if value.is_nested else f"layout {value.layout}"
            raise TypeError(f"{name}: {key} must be a dense tensor, got {layout}")
        if value.dtype not in DTYPES:
            raise TypeError(f"{name}: {key} must be floating point, got {value.dtype}")
        if device is None:
            device, owner = value.device, key
        elif value.device != device:
            raise ValueError(
                f"{name}: {key} must be on the device of {owner}, {device}, got {value.device}"
            )
    if not plain or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return plain
    return not any(value.is_inference() for value in given.values())


def tensor(name: str, key: str, given: Any) -> None:
    """Refuse what is no tensor, None among it."""
    if not isinstance(given, Tensor):
        arguments.wrong_type(name, key, "a tensor", given)


def _refuse_parted(name: str, key: str, kind: type[Tensor]) -> None:
    if kind.__name__ in _PARTED:
        raise TypeError(
            f"{name}: {key} must be a dense tensor, got a {kind.__name__}: pass its local tensor, "
            "or call a module, which then runs as eager does"
        )


def _linear(
    name: str,
    shape: Sequence[int],
    keys: tuple[str, str],
    weight: Tensor,
    bias: Tensor | None,
    read: str = "x",
) -> None:
    """Refuse shapes that nn.Linear would refuse; `keys` name weight and bias, `read` the input."""
    if weight.dim() != 2 or not shape:
        problem = f"{read} must have at least one dimension and {keys[0]} two"
    elif shape[-1] != weight.shape[1]:
        problem = f"{keys[0]} expects {weight.shape[1]} input features, {read} has {shape[-1]}"
    elif bias is not None and bias.shape != weight.shape[:1]:
        problem = f"{keys[1]} must be [{weight.shape[0]}], got {list(bias.shape)}"
    else:
        return
    raise ValueError(f"{name}: {problem} ({read} {list(shape)}, weight {list(weight.shape)})")


def linear(
    name: str, x: Any, weight: Any, bias: Any, chosen: Any, fused: str = "fused"
) -> torch.dtype | None:
    """Refuse what F.linear would refuse, and a kernel that cannot run."""
    kernel(name, chosen, fused)
    if not tensors(name, {"x": x, "weight": weight}, {"bias": bias}):
        return None
    _linear(name, x.shape, ("weight", "bias"), weight, bias)
    return _multiplied(name, x.device, x.dtype, {"weight": weight, "bias": bias}, chosen, fused)


def _multiplied(
    name: str,
    device: torch.device,
    read: torch.dtype,
    weights: Mapping[str, Tensor | None],
    chosen: str | None = None,
    fused: str = "fused",
) -> torch.dtype:
    """Return the dtype that linears reading `read` multiply in; refuse weights of another."""
    dtype, autocast = dispatch.compute_dtype(device, read), dispatch.autocasts(device)
    for key, value in weights.items():
        if value is None or value.dtype == dtype:
            continue
        # autocast casts every floating dtype but float64
        if not autocast or torch.float64 in (value.dtype, dtype):
            raise TypeError(
                f"{name}: x and {key} must share a dtype, got {dtype} and {value.dtype}"
            )
    if chosen == fused and dispatch.path_of(device, dtype) == "aten":
        raise ValueError(
            f"{name}: kernel={fused!r} needs Triton: a GPU, or a CPU under TRITON_INTERPRET=1, and "
            f"float32, bfloat16 or float16 tensors, got {dtype} on {device}"
        )
    return dtype


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


def _norm(
    name: str, x: Tensor, shape: tuple[int, ...], weight: Any, bias: Any, prefix: str = ""
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


def _layer_norm_dtypes(
    name: str, device: torch.device, dtype: torch.dtype, weight: Any, bias: Any, prefix: str = ""
) -> None:
    """Refuse dtypes that F.layer_norm would refuse: F.rms_norm takes any."""
    given = {"weight": weight, "bias": bias}
    found = {key: value.dtype for key, value in given.items() if value is not None}
    if device.type == "meta" or all(other == dtype for other in found.values()):
        return
    if dispatch.autocasts_norm(device, "layer") and torch.float64 not in (dtype, *found.values()):
        return
    # a CPU's reads parameters of float32 beside half precision
    if device.type == "cpu" and dtype in HALF and set(found.values()) == {torch.float32}:
        return
    key = next(key for key, other in found.items() if other != dtype)
    raise TypeError(f"{name}: x and {prefix}{key} must share a dtype, got {dtype} and {found[key]}")


def norm(
    name: str, x: Any, shape: tuple[int, ...], spec: NormSpec, residual: Any = None
) -> torch.dtype | None:
    """Refuse what the norm's twin would refuse; return the dtype of what is normalised."""
    weight, bias = spec.weight, spec.bias
    if not tensors(name, {"x": x}, {"residual": residual, "weight": weight, "bias": bias}):
        return None
    _norm(name, x, shape, weight, bias)
    dtype: torch.dtype = x.dtype
    if residual is not None:
        if residual.shape != x.shape:
            raise ValueError(
                f"{name}: residual must have the shape of x {list(x.shape)}, got "
                f"{list(residual.shape)}"
            )
        dtype = torch.promote_types(dtype, residual.dtype)
    if spec.kind == "layer":
        _layer_norm_dtypes(name, x.device, dtype, weight, bias)
    return dtype


def norm_spec(name: str, given: Any) -> None:
    """Refuse what is no record of a norm; its tensors are checked beside the others."""
    if not isinstance(given, NormSpec):
        arguments.wrong_type(name, "norm", "a NormSpec", given)
    choice(name, "norm.kind", given.kind, ("rms", "layer"))
    if given.kind == "rms" and given.bias is not None:
        raise ValueError(f"{name}: norm.bias must be None, as an RMSNorm has none")
    rms_options(name, given.eps, given.offset, given.cast, given.weight is not None, "norm.")
    if given.kind == "layer" and (given.offset or given.cast != "torch"):
        raise ValueError(f"{name}: norm.offset and norm.cast are RMSNorm's, norm.kind is 'layer'")


def _normed(name: str, x: Tensor, spec: NormSpec | None) -> torch.dtype:
    """Return the dtype of norm(x) for a block, or x's; refuse a norm over anything but its rows."""
    if spec is None:
        return x.dtype
    _norm(name, x, tuple(x.shape[-1:]), spec.weight, spec.bias, "norm.")
    if spec.kind == "layer":
        _layer_norm_dtypes(name, x.device, x.dtype, spec.weight, spec.bias, "norm.")
    return output_dtype(spec, x.dtype, spec.weight, x.device)


def _norm_tensors(spec: NormSpec | None) -> dict[str, Any]:
    return {} if spec is None else {"norm.weight": spec.weight, "norm.bias": spec.bias}


def block(name: str, residual: Any, chunks: Any) -> None:
    """Refuse options of an MLP block."""
    flag(name, "residual", residual)
    if chunks is not None:
        integer(name, "chunks", chunks, 1)


def mlp(
    name: str,
    x: Any,
    linears: Linears,
    norm: Any,
    residual: Any,
    chunks: Any,
    chosen: Any,
    packed: bool = False,
) -> torch.dtype | None:
    """Refuse an MLP block whose linears, (weight, bias) by name, the last one last, do not fit.

    `packed`: the first weight holds the gate's rows, then up's.
    """
    block(name, residual, chunks)
    kernel(name, chosen, "hybrid")
    if norm is not None:
        norm_spec(name, norm)
    weights = {f"{key}_weight": weight for key, (weight, _) in linears.items()}
    biases = {f"{key}_bias": bias for key, (_, bias) in linears.items()}
    if not tensors(name, {"x": x, **weights}, {**biases, **_norm_tensors(norm)}):
        return None
    *first, (last, (down, down_bias)) = linears.items()
    for key, (weight, bias) in first:
        _linear(name, x.shape, (f"{key}_weight", f"{key}_bias"), weight, bias)
    rows = {key: weight.shape[0] for key, (weight, _) in first}
    features = next(iter(rows.values()))
    if len(set(rows.values())) > 1:
        raise ValueError(f"{name}: weights before the last must have as many rows, got {rows}")
    if packed and features % 2:
        raise ValueError(f"{name}: a packed gate_weight must have 2 F rows, got {features}")
    features //= 2 if packed else 1
    h = (*x.shape[:-1], features)
    _linear(name, h, (f"{last}_weight", f"{last}_bias"), down, down_bias, "h")
    if residual and down.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: residual needs {x.shape[-1]} output features, {last}_weight has "
            f"{down.shape[0]}"
        )
    read = _normed(name, x, norm)
    return _multiplied(name, x.device, read, weights | biases, chosen, "hybrid")


def projections(
    name: str, x: Any, norm: NormSpec, weights: list[Any], biases: list[Any]
) -> torch.dtype | None:
    """Refuse linears that cannot all read norm(x)."""
    norm_spec(name, norm)
    if not weights:
        raise ValueError(f"{name}: weights must name at least one linear, got none")
    if len(weights) != len(biases):
        raise ValueError(
            f"{name}: biases must be as many as weights, got {len(biases)} for {len(weights)}"
        )
    required = {f"weights[{i}]": weight for i, weight in enumerate(weights)}
    optional = {f"biases[{i}]": bias for i, bias in enumerate(biases)}
    if not tensors(name, {"x": x, **required}, {**optional, **_norm_tensors(norm)}):
        return None
    for keys, weight, bias in zip(
        zip(required, optional, strict=True), weights, biases, strict=True
    ):
        _linear(name, x.shape, keys, weight, bias)
    read = _normed(name, x, norm)
    return _multiplied(name, x.device, read, required | optional)


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
            f"{name}: up_bias must be None where up_weight is, as gate_bias is packed too, got "
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
        raise ValueError(
            f"{name}: {prefix}offset={offset} is added to {prefix}weight, and there is none"
        )
