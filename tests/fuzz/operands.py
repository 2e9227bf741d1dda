"""The tensors of a configuration: their shapes by function, their values, and how they lie."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import Config

Shapes = dict[str, tuple[int, ...]]
Operands = dict[str, Tensor]

TIED = (("residual", "x"), ("up_weight", "gate_weight"), ("weight1", "weight0"))


def shapes_of(c: Config) -> Shapes:
    """Return the shape of every operand, x's first; optional ones only where they are there."""
    return {"x": x_shape(c)} | _SHAPES[c.function](c)


def x_shape(c: Config) -> tuple[int, ...]:
    """Return [*rows, *normalized_shape] for norms, [*rows, d] for all else."""
    return (*c.rows, *normalized_shape(c))


def normalized_shape(c: Config) -> tuple[int, ...]:
    """Return the dimensions that a norm takes together."""
    norms = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "RMSNorm", "LayerNorm")
    return (c.d,) if c.group is None or c.function not in norms else (c.group, c.d)


def kind_of(c: Config) -> str | None:
    """Return the norm of a configuration: "rms", "layer" or None."""
    if c.function in ("rms_norm", "add_rms_norm", "RMSNorm"):
        return "rms"
    if c.function in ("layer_norm", "add_layer_norm", "LayerNorm"):
        return "layer"
    if c.function in ("norm_linear", "NormLinear", "Sequential", "shared"):
        return c.norm or "rms"
    return c.norm


def linears_of(c: Config) -> list[tuple[int, int, int]]:
    """Return position, in_features and out_features of every linear in a Sequential's stack."""
    found, width = [], c.d
    for index, letter in enumerate(c.stack):
        if letter == "l":
            found.append((index, width, c.f if width == c.d else c.d))
            width = found[-1][2]
    return found


def _norm(c: Config, prefix: str = "norm_", shape: tuple[int, ...] | None = None) -> Shapes:
    kind = kind_of(c)
    shape = normalized_shape(c) if shape is None else shape
    names = [name for name in ("weight", "bias") if kind is not None and c.has(f"norm_{name}")]
    # nn.LayerNorm has no bias without a weight, and an RMSNorm never
    if kind == "rms" or (c.function in _MODULES and "weight" not in names):
        names = names[:1] if "weight" in names else []
    return {f"{prefix}{name}": shape for name in names}


def _pair(c: Config, name: str, out: int, d: int, bias: str | None = None) -> Shapes:
    """Return a weight, and its bias where `bias` is among the operands that are there."""
    weight = {f"{name}weight": (out, d)}
    return weight | ({f"{name}bias": (out,)} if c.has(bias or f"{name}bias") else {})


def out_features(c: Config) -> int:
    """Return the width of an MLP's result."""
    return c.d if c.residual else c.out


def _add(c: Config) -> Shapes:
    return {"residual": x_shape(c)} | _norm(c)


def _projections(c: Config) -> Shapes:
    widths = (c.out, c.f, c.out)[: 1 + c.f % 3]
    found = _norm(c)
    for index, width in enumerate(widths):
        has = c.has(f"bias{index}")
        found |= {f"weight{index}": (width, c.d)} | ({f"bias{index}": (width,)} if has else {})
    return found


def _mlp(c: Config) -> Shapes:
    first, last = _pair(c, "fc1_", c.f, c.d), _pair(c, "fc2_", out_features(c), c.f)
    return _block(c, _norm(c) | first | last)


def _gated(c: Config) -> Shapes:
    gate, up = _pair(c, "gate_", c.f, c.d), _pair(c, "up_", c.f, c.d)
    return _block(c, _norm(c) | gate | up | _pair(c, "down_", out_features(c), c.f))


def _packed(c: Config) -> Shapes:
    gate = _pair(c, "gate_", 2 * c.f, c.d)
    return _norm(c) | gate | _pair(c, "down_", out_features(c), c.f)


def _block(c: Config, found: Shapes) -> Shapes:
    """Give a module's linears all biases or none, as its constructor does."""
    if c.function not in ("MLP", "GatedMLP"):
        return found
    if c.has("down_bias"):
        biases = {
            name.replace("weight", "bias"): shape[:1]
            for name, shape in found.items()
            if name.endswith("weight") and name != "norm_weight"
        }
        return found | biases
    return {k: v for k, v in found.items() if not k.endswith("bias") or k == "norm_bias"}


def _sequential(c: Config) -> Shapes:
    found, width = {}, c.d
    linears = {index: rest for index, *rest in linears_of(c)}
    for index, letter in enumerate(c.stack):
        if letter == "n":
            found |= _norm(c, f"{index}_", (width,))
        elif letter == "l":
            d, width = linears[index]
            found |= _pair(c, f"{index}_", width, d, "bias")
    return found


def _shared(c: Config) -> Shapes:
    found = _norm(c)
    for index, reader in enumerate(c.readers):
        if reader in ("linear", "linear_act"):
            found |= _pair(c, f"{index}_", c.f, c.d, "bias")
        elif reader == "mlp":
            found |= _pair(c, f"{index}_fc1_", c.f, c.d, "fc1_bias")
            found |= _pair(c, f"{index}_fc2_", c.out, c.f, "fc2_bias")
        elif reader == "gated_mlp":
            found |= _pair(c, f"{index}_gate_", c.f, c.d, "gate_bias")
            found |= _pair(c, f"{index}_up_", c.f, c.d, "up_bias")
            found |= _pair(c, f"{index}_down_", c.out, c.f, "down_bias")
        elif reader == "norm_linear":
            found |= {f"{index}_norm_weight": (c.d,)} | _pair(c, f"{index}_", c.out, c.d, "bias")
    return found


def _experts(c: Config) -> Shapes:
    found: Shapes = {"scores": (*c.rows, c.top_k)}
    for name, n, k in (("gate_", 2 * c.f, c.d), ("down_", c.out, c.f)):
        sizes = (k, n) if c.is_transposed else (n, k)
        found[f"{name}weight"] = (c.experts, *sizes)
        if c.has(f"{name}bias"):
            found[f"{name}bias"] = (c.experts, n)
    return found


def index_of(c: Config) -> Tensor:
    """Draw the experts of each token; the number after the last stands for none."""
    generator = torch.Generator().manual_seed(c.seed)
    return torch.randint(c.experts + 1, (*c.rows, c.top_k), generator=generator)


def _linear(c: Config) -> Shapes:
    return _pair(c, "", c.f, c.d)


_SHAPES: dict[str, Callable[[Config], Shapes]] = {
    **dict.fromkeys(("linear_act", "Linear"), _linear),
    **dict.fromkeys(("rms_norm", "layer_norm", "RMSNorm", "LayerNorm"), _norm),
    **dict.fromkeys(("add_rms_norm", "add_layer_norm"), _add),
    **dict.fromkeys(("norm_linear", "NormLinear"), _projections),
    **dict.fromkeys(("mlp", "MLP"), _mlp),
    **dict.fromkeys(("gated_mlp", "GatedMLP"), _gated),
    "packed_mlp": _packed,
    "experts": _experts,
    "Sequential": _sequential,
    "shared": _shared,
}
_MODULES = (
    "Linear",
    "RMSNorm",
    "LayerNorm",
    "NormLinear",
    "MLP",
    "GatedMLP",
    "Sequential",
    "shared",
)


def leaves_of(c: Config, number: int = 0) -> Operands:
    """Draw the operands of draw `number`: leaves, parameters but for x and a residual."""
    generator = torch.Generator().manual_seed(2 * (c.seed + number))
    layouts, values, dtypes = dict(c.layouts), dict(c.values), dict(c.dtypes)
    found: Operands = {}
    for name, shape in shapes_of(c).items():
        value = torch.randn(shape, dtype=torch.float64, generator=generator)
        if name.endswith("weight") and len(shape) > 1:
            value /= max(1, shape[1 if c.is_transposed else -1]) ** 0.5
        value = special(value, values.get(name), c.dtype, generator)
        if name == "scores" and c.dtype == "float16":
            # a larger one may overflow h, which it multiplies
            value = value.clamp(-1, 1)
        dtype = getattr(torch, dtypes.get(name, c.dtype))
        tensor = lay_out(value.to(dtype), layouts.get(name))
        trains = name not in c.frozen
        if name in ("x", "residual"):
            found[name] = tensor.requires_grad_(trains)
        else:
            found[name] = nn.Parameter(tensor, requires_grad=trains)
    return found


def tie(c: Config, leaves: Operands) -> Operands:
    """Give one leaf two roles where a configuration says so."""
    if not c.tied:
        return leaves
    tied = dict(leaves)
    for name, other in TIED:
        if name in tied and other in tied and tied[name].shape == tied[other].shape:
            tied[name] = tied[other]
    return tied


def gradients_for(c: Config, outputs: tuple[Tensor, ...], number: int = 0) -> list[Tensor | None]:
    """Draw an incoming gradient for every output, None for one that nobody uses."""
    generator = torch.Generator().manual_seed(2 * (c.seed + number) + 1)
    found: list[Tensor | None] = []
    for index, y in enumerate(outputs):
        kind = c.douts[index % len(c.douts)]
        value = torch.randn(y.shape, dtype=torch.float64, generator=generator)
        if kind == "none":
            found.append(None)
            continue
        if kind == "zeros":
            value.zero_()
        elif kind == "sparse":
            value *= torch.rand(y.shape, dtype=torch.float64, generator=generator) < 0.2
        value = special(value, dict(c.values).get("dout"), c.dtype, generator)
        found.append(lay_out(value.to(y.dtype), kind))
    return found


def special(value: Tensor, kind: str | None, dtype: str, generator: torch.Generator) -> Tensor:
    """Return values of a special kind."""
    if kind is None:
        return value
    scales = {"zeros": 0.0, "tiny": 1e-6, "large": 30.0, "huge": 1e15, "ones": 1.0}
    if dtype == "float16":
        scales |= {"tiny": 1e-3, "huge": 3e4}
    if kind == "ones":
        return torch.ones_like(value)
    if kind in scales:
        return value * scales[kind]
    if kind == "some_zeros":
        return value * (torch.rand(value.shape, dtype=value.dtype, generator=generator) < 0.5)
    value = value.clone()
    if value.numel():
        where = torch.randint(value.numel(), (), generator=generator)
        value.view(-1)[where] = float(kind)
    return value


def lay_out(value: Tensor, kind: str | None) -> Tensor:
    """Return a tensor of value's shape with other strides; "expanded" and such repeat values."""
    layout = _LAYOUTS.get(kind or "")
    if layout is None or value.dim() == 0:
        return value.detach()
    return layout(value.detach())


def _inside(value: Tensor, shape: tuple[int, ...], *where: slice | int) -> Tensor:
    """Copy value into a part of a larger tensor."""
    part = value.new_full(shape, float("nan"))[(..., *where)]
    return part.copy_(value)


def _offset(value: Tensor) -> Tensor:
    return value.new_full((value.numel() + 3,), float("nan"))[3:].view(value.shape).copy_(value)


def _overlapping(value: Tensor) -> Tensor:
    """Return rows that are windows of one another's memory."""
    if value.dim() < 2 or 0 in value.shape:
        return value
    *leading, m, n = value.shape
    memory = value.new_empty(*leading, m + n - 1)
    memory[..., :n] = value[..., 0, :]
    memory[..., n:] = value[..., 1:, -1]
    return memory.unfold(-1, n, 1)


def _alternate(value: Tensor) -> Tensor:
    first, *rest = value.shape
    return value.new_full((2 * first, *rest), float("nan"))[::2].copy_(value)


def _permuted(value: Tensor) -> Tensor:
    axes = tuple(reversed(range(value.dim())))
    return value.permute(axes).contiguous().permute(axes)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": _offset,
    "step": lambda v: _inside(v, (*v.shape[:-1], 2 * v.shape[-1]), slice(None, None, 2)),
    "column": lambda v: _inside(v, (*v.shape, 3), 1),
    "wider": lambda v: _inside(v, (*v.shape[:-1], v.shape[-1] + 3), slice(1, v.shape[-1] + 1)),
    "alternate": _alternate,
    "transposed": lambda v: v.mT.contiguous().mT if v.dim() > 1 else v,
    "permuted": _permuted,
    "expanded": lambda v: v[:1].expand(v.shape),
    "expanded_last": lambda v: v[..., :1].expand(v.shape),
    "scalar": lambda v: v.reshape(-1)[:1].expand(v.shape) if v.numel() else v,
    "overlapping": _overlapping,
}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return all memory behind a tensor as bytes, what lies between its elements too."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
