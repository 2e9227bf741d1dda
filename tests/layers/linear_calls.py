"""Calls of each block by its public function, and the leaves of a call with their roles.

Roles are x; norm.weight and norm.bias; first.weight and first.bias, of the linears that read x or
norm(x); last.weight and last.bias, of the linear that reads the hidden layer. A and B of an adapter
have the role of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from support import DEVICE
from torch import Tensor, nn

from fusedckpt import LoRA, NormSpec, QuantizedWeight
from fusedckpt.functional import gated_mlp, linear_act, mlp, norm_linear


class Sizes(NamedTuple):
    """Tokens, features of x, of the hidden layer and of the result, and the rank of adapters."""

    T: int
    D: int
    F: int
    OUT: int
    R: int


class Dtypes(NamedTuple):
    """The dtypes of a call, and the bytes of an element of x as saved, and of the hidden layer."""

    x: torch.dtype = torch.float32
    norm: torch.dtype = torch.float32
    linears: torch.dtype = torch.float32
    adapters: torch.dtype = torch.float32
    x_bytes: int = 4
    hidden_bytes: int = 4
    autocast: torch.dtype | None = None
    cast: str = "torch"


HALF = torch.bfloat16
FLOAT = Dtypes()
SAME = {"float32": FLOAT, "bfloat16": Dtypes(HALF, HALF, HALF, HALF, 2, 2)}

# the role of every linear, and its features after and before, which Sizes names
LINEARS = {
    "linear": [("first", "F", "D")],
    "linear_act": [("first", "F", "D")],
    "norm_linear": [("first", "F", "D"), ("first", "OUT", "D"), ("first", "R", "D")],
    "mlp": [("first", "F", "D"), ("last", "OUT", "F")],
    "gated_mlp": [("first", "F", "D"), ("first", "F", "D"), ("last", "OUT", "F")],
    "packed": [("first", "2F", "D"), ("last", "OUT", "F")],
}
MLPS = ("mlp", "gated_mlp", "packed")
NORMS = ("rms", "rms without weight", "layer", "layer without bias")
BLOCKS = [
    *((block, None) for block in LINEARS if block != "norm_linear"),
    *((block, norm) for block in ("norm_linear", *MLPS) for norm in NORMS),
]
# so that no two formulas give one number
PRIMES = Sizes(T=5, D=7, F=11, OUT=13, R=3)


class Operands:
    """Leaves, each with its role."""

    def __init__(self, sizes: Sizes, dtypes: Dtypes = FLOAT):
        self.sizes, self.dtypes = sizes, dtypes
        self.leaves: list[Tensor] = []
        self.roles: list[str] = []

    def add(self, role: str, leaf: Any) -> Any:
        self.leaves.append(leaf)
        self.roles.append(role)
        return leaf

    def parameter(self, role: str, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        return self.add(role, nn.Parameter(random(*shape, dtype=dtype)))

    def x(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.add("x", random(self.sizes.T, self.sizes.D, dtype=dtype or self.dtypes.x))

    def norm(self, name: str | None) -> NormSpec | None:
        if name is None:
            return None
        d, dtype, weight, bias = self.sizes.D, self.dtypes.norm, None, None
        if "without weight" not in name:
            weight = self.parameter("norm.weight", d, dtype=dtype)
        if name == "layer":
            bias = self.parameter("norm.bias", d, dtype=dtype)
        return NormSpec(name.split()[0], weight, bias, cast=self.dtypes.cast)

    def linear(self, role: str, n: int, k: int, kind: str, bias: bool) -> tuple[Any, Any]:
        """Return weight and bias.

        kind: dense, frozen or quantized, then a plus sign and a letter per adapter, d for one with
        dropout and a for one without. A frozen linear without adapters has no bias.
        """
        base, _, adapters = kind.partition("+")
        dtype = self.dtypes.linears
        if base == "dense":
            weight: Any = self.parameter(f"{role}.weight", n, k, dtype=dtype)
        else:
            weight = nn.Parameter(random(n, k, dtype=dtype), False)
        if base == "quantized":
            dense = weight.detach()
            weight = QuantizedWeight(dense.shape, dtype, dense.device, lambda _: dense)
        for letter in adapters:
            a, b = (
                self.parameter(f"{role}.weight", *shape, dtype=self.dtypes.adapters)
                for shape in ((self.sizes.R, k), (n, self.sizes.R))
            )
            weight = LoRA(weight, a, b, 0.5, 0.1 if letter == "d" else 0.0)
        has_bias = bias and kind != "frozen"
        return weight, self.parameter(f"{role}.bias", n, dtype=dtype) if has_bias else None

    def linears(
        self, block: str, kinds: Sequence[str] = (), bias: bool = True, residual: bool = False
    ) -> list[tuple[Any, Any]]:
        """Return weight and bias of a block's first len(kinds) linears, of all where none is given.

        With a residual the result is as wide as x.
        """
        widths = self.sizes._asdict() | {"2F": 2 * self.sizes.F}
        if residual:
            widths["OUT"] = self.sizes.D
        kinds = kinds or ["dense"] * len(LINEARS[block])
        pairs = zip(LINEARS[block], kinds, strict=False)
        return [self.linear(role, widths[n], widths[k], kind, bias) for (role, n, k), kind in pairs]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE) / 4


def function_of(block: str, norm: NormSpec | None, linears: Sequence[Any]) -> Callable[..., Any]:
    """Return a public function of x and options, with the other operands filled in."""
    (weight, bias), (last, last_bias) = linears[0], linears[-1]
    if block in ("linear", "linear_act"):
        activation = "gelu" if block == "linear_act" else None
        return partial(linear_act, weight=weight, bias=bias, activation=activation)
    if block == "norm_linear":
        weights, biases = zip(*linears, strict=True)
        # norm_linear has no levels
        return lambda x, save: norm_linear(x, norm, weights, biases)  # type: ignore[arg-type]
    if block == "mlp":
        return lambda x, **options: mlp(x, weight, bias, last, last_bias, norm=norm, **options)
    up, up_bias = linears[1] if block == "gated_mlp" else (None, None)
    given = {"gate_bias": bias, "up_bias": up_bias, "down_bias": last_bias, "norm": norm}
    return lambda x, **options: gated_mlp(x, weight, up, last, **given, **options)


def masks_of(roles: Sequence[str], is_few: bool = False) -> list[tuple[bool, ...]]:
    """Return masks over leaves of these roles: none, all, and each leaf alone.

    Unless few are asked for, all but each leaf, and each pair of roles, too.
    """
    count = len(roles)
    alone = [tuple(index == leaf for index in range(count)) for leaf in range(count)]
    found = {(False,) * count, (True,) * count, *alone}
    if not is_few:
        found |= {tuple(not flag for flag in mask) for mask in alone}
        pairs = combinations(sorted(set(roles)), 2)
        found |= {tuple(role in pair for role in roles) for pair in pairs}
    return sorted(found)
