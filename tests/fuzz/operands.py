"""The tensors of a configuration: their shapes by function, their values, and how they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .config import Config

Shapes = dict[str, tuple[int, ...]]
Operands = dict[str, Tensor]

NORMS = {
    **dict.fromkeys(("rms_norm", "add_rms_norm"), "rms"),
    **dict.fromkeys(("layer_norm", "add_layer_norm"), "layer"),
}
TIED = (("residual", "x"), ("up_weight", "gate_weight"), ("weight1", "weight0"))


def kind_of(c: Config) -> str | None:
    """Return the norm of a configuration: "rms", "layer" or None."""
    needs = c.function in ("norm_linear", "Sequential", "shared")
    return NORMS.get(c.function, c.norm or ("rms" if needs else None))


def normalized_shape(c: Config) -> tuple[int, ...]:
    """Return the dimensions that a norm takes together."""
    return (c.d,) if c.group is None or c.function not in NORMS else (c.group, c.d)


def shapes_of(c: Config) -> Shapes:
    """Return the shape of every operand, x's first; optional ones only where they are there."""
    return {"x": (*c.rows, *normalized_shape(c))} | _SHAPES[c.function](c)


def out_features(c: Config) -> int:
    """Return the width of an MLP's result."""
    return c.d if c.residual else c.out


def layers_of(c: Config) -> Iterator[tuple[str, str, int, int]]:
    """Yield a Sequential's layers: their operands' prefix, letter, and features in and out."""
    width = c.d
    for index, letter in enumerate(c.stack):
        before = width
        if letter == "l":
            width = c.f if width == c.d else c.d
        yield f"{index}_", letter, before, width


def readers_of(c: Config) -> Iterator[tuple[str, Config]]:
    """Yield the layers that read a norm: their operands' prefix, and what each is by itself."""
    for index, reader in enumerate(c.readers):
        yield f"{index}_", c.but(function=reader, norm=None, residual=False)


def part_of(t: Operands, prefix: str) -> Operands:
    """Return the operands of a prefix, without it."""
    return {key.removeprefix(prefix): v for key, v in t.items() if key.startswith(prefix)}


def _norm(c: Config, prefix: str = "norm_", shape: tuple[int, ...] | None = None) -> Shapes:
    kind, shape = kind_of(c), normalized_shape(c) if shape is None else shape
    names = [name for name in ("weight", "bias") if kind is not None and c.has(f"norm_{name}")]
    # nn.LayerNorm has no bias without a weight, and an RMSNorm never
    in_module = c.function in ("Sequential", "shared")
    if kind == "rms" or (in_module and "weight" not in names):
        names = names[:1] if "weight" in names else []
    return {f"{prefix}{name}": shape for name in names}


def _pair(c: Config, name: str, out: int, d: int, bias: str | None = None) -> Shapes:
    """Return a weight, and its bias where `bias` is among the operands that are there."""
    weight = {f"{name}weight": (out, d)}
    return weight | ({f"{name}bias": (out,)} if c.has(bias or f"{name}bias") else {})


def _add(c: Config) -> Shapes:
    return {"residual": (*c.rows, *normalized_shape(c))} | _norm(c)


def _projections(c: Config) -> Shapes:
    found = _norm(c)
    for index, width in enumerate((c.out, c.f, c.out)[: 1 + c.f % 3]):
        has = c.has(f"bias{index}")
        found |= {f"weight{index}": (width, c.d)} | ({f"bias{index}": (width,)} if has else {})
    return found


def _mlp(c: Config) -> Shapes:
    return _norm(c) | _pair(c, "fc1_", c.f, c.d) | _pair(c, "fc2_", out_features(c), c.f)


def _gated(c: Config) -> Shapes:
    gate, up = _pair(c, "gate_", c.f, c.d), _pair(c, "up_", c.f, c.d)
    return _norm(c) | gate | up | _pair(c, "down_", out_features(c), c.f)


def _packed(c: Config) -> Shapes:
    gate = _pair(c, "gate_", 2 * c.f, c.d)
    return _norm(c) | gate | _pair(c, "down_", out_features(c), c.f)


def _sequential(c: Config) -> Shapes:
    found: Shapes = {}
    for prefix, letter, d, width in layers_of(c):
        if letter == "n":
            found |= _norm(c, prefix, (width,))
        elif letter == "l":
            found |= _pair(c, prefix, width, d, "bias")
    return found


def _shared(c: Config) -> Shapes:
    found = _norm(c)
    for prefix, reader in readers_of(c):
        found |= {
            f"{prefix}{name}": size for name, size in _SHAPES[reader.function](reader).items()
        }
    return found


def _experts(c: Config) -> Shapes:
    found: Shapes = {"scores": (*c.rows, c.top_k)}
    pairs = ("gate_", c.gate_rank, 2 * c.f, c.d), ("down_", c.down_rank, c.out, c.f)
    for name, rank, n, k in pairs:
        sizes = {"weight": (n, k)} | ({"A": (rank, k), "B": (n, rank)} if rank else {})
        for part, size in sizes.items():
            found[f"{name}{part}"] = (c.experts, *(size[::-1] if c.is_transposed else size))
        if c.has(f"{name}bias"):
            found[f"{name}bias"] = (c.experts, n)
    return found


def index_of(c: Config) -> Tensor:
    """Draw the experts of each token; the number after the last stands for none."""
    generator = torch.Generator().manual_seed(c.seed)
    return torch.randint(c.experts + 1, (*c.rows, c.top_k), generator=generator)


_SHAPES: dict[str, Callable[[Config], Shapes]] = {
    **dict.fromkeys(("linear_act", "Linear"), lambda c: _pair(c, "", c.f, c.d)),
    **dict.fromkeys(("rms_norm", "layer_norm"), _norm),
    **dict.fromkeys(("add_rms_norm", "add_layer_norm"), _add),
    "norm_linear": _projections,
    "mlp": _mlp,
    "gated_mlp": _gated,
    "packed_mlp": _packed,
    "experts": _experts,
    # the norm's result itself, among its readers
    "n": lambda c: {},
    "Sequential": _sequential,
    "shared": _shared,
}


def leaves_of(c: Config, number: int = 0) -> Operands:
    """Draw the operands of draw `number`: leaves, parameters but for x and a residual."""
    generator = torch.Generator().manual_seed(2 * (c.seed + number))
    layouts, values = dict(c.layouts), dict(c.values)
    found: Operands = {}
    for name, shape in shapes_of(c).items():
        value = torch.randn(shape, dtype=torch.float64, generator=generator)
        if name.endswith(("weight", "A", "B")) and len(shape) > 1:
            value /= max(1, shape[1 if c.is_transposed else -1]) ** 0.5
        value = special(value, values.get(name), c.dtype, generator)
        if name == "scores" and c.dtype == "float16":
            # a larger one may overflow h, which it multiplies
            value = value.clamp(-1, 1)
        tensor = lay_out(value.to(getattr(torch, c.dtype)), layouts.get(name))
        is_parameter = name not in ("x", "residual")
        tensor = nn.Parameter(tensor) if is_parameter else tensor
        found[name] = tensor.requires_grad_(name not in c.frozen)
    return found


def tie(c: Config, leaves: Operands) -> Operands:
    """Give one leaf two roles where a configuration says so."""
    tied = dict(leaves)
    for name, other in TIED if c.tied else ():
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
        if kind == "sparse":
            value *= torch.rand(y.shape, dtype=torch.float64, generator=generator) < 0.2
        value = special(value, dict(c.values).get("dout"), c.dtype, generator)
        found.append(None if kind == "none" else lay_out(value.to(y.dtype), kind))
    return found


def special(value: Tensor, kind: str | None, dtype: str, generator: torch.Generator) -> Tensor:
    """Return values of a special kind."""
    if kind is None or not value.numel():
        return value
    scales = {"zeros": 0.0, "tiny": 1e-6, "large": 30.0, "huge": 1e15}
    if dtype == "float16":
        scales |= {"tiny": 1e-3, "huge": 3e4}
    if kind in scales:
        return value * scales[kind]
    if kind == "some_zeros":
        return value * (torch.rand(value.shape, dtype=value.dtype, generator=generator) < 0.5)
    where = torch.randint(value.numel(), (), generator=generator)
    value.view(-1)[where] = float(kind)
    return value


def lay_out(value: Tensor, kind: str | None) -> Tensor:
    """Return a tensor of value's shape with other strides; "expanded" and such repeat values."""
    layout = LAYOUTS.get(kind or "")
    return value.detach() if layout is None or not value.dim() else layout(value.detach())


def _inside(value: Tensor, shape: tuple[int, ...], *where: slice | int) -> Tensor:
    """Copy value into a part of a larger tensor."""
    # not NaN: torch.mm of bfloat16 rows of odd length reads an element past each, and multiplies it
    # by zero, where oneDNN has AMX
    return value.new_full(shape, 2.0**14)[where].copy_(value)


def _overlapping(value: Tensor) -> Tensor:
    """Return rows that are windows of one another's memory."""
    if value.dim() < 2 or 0 in value.shape:
        return value
    *leading, m, n = value.shape
    memory = value.new_empty(*leading, m + n - 1)
    memory[..., :n] = value[..., 0, :]
    memory[..., n:] = value[..., 1:, -1]
    return memory.unfold(-1, n, 1)


def _permuted(value: Tensor) -> Tensor:
    axes = tuple(reversed(range(value.dim())))
    return value.permute(axes).contiguous().permute(axes)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": lambda v: _inside(v.flatten(), (v.numel() + 3,), slice(3, None)).view(v.shape),
    "step": lambda v: _inside(v, (*v.shape[:-1], 2 * v.shape[-1]), ..., slice(None, None, 2)),
    "column": lambda v: _inside(v, (*v.shape, 3), ..., 1),
    "wider": lambda v: _inside(v, (*v.shape[:-1], v.shape[-1] + 3), ..., slice(1, -2)),
    "alternate": lambda v: _inside(v, (2 * len(v), *v.shape[1:]), slice(None, None, 2)),
    "transposed": lambda v: v.mT.contiguous().mT if v.dim() > 1 else v,
    "permuted": _permuted,
    "expanded": lambda v: v[:1].expand(v.shape),
    "expanded_last": lambda v: v[..., :1].expand(v.shape),
    "scalar": lambda v: v.reshape(-1)[:1].expand(v.shape) if v.numel() else v,
    "overlapping": _overlapping,
}
