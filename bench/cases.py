"""What `python -m bench run` measures: each case once, and the ways of running it.

A case names a function of `fusedckpt.functional`; its eager form is the function of that name in
`fusedckpt.reference`, called in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.options import CASE_NAMES
from bench.sizes import Size
from fusedckpt import functional, reference
from fusedckpt.spec import NormSpec

__all__ = ["BASELINES", "CASES", "Case", "Function", "draw", "implementations"]

Function = Callable[..., Tensor | tuple[Tensor, ...]]
Shapes = tuple[tuple[int, ...], ...]


class Case(NamedTuple):
    """A function, its parameters, how it is called on them, and the choices it offers.

    call: (function, x, *parameters, **options) -> its result; shapes: of the parameters.
    """

    function: str
    call: Callable[..., Any]
    shapes: Callable[[Size], Shapes]
    levels: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()

    @property
    def eager(self) -> Function:
        """The eager twin, of x and the parameters."""
        return partial(self.call, getattr(reference, self.function))

    @property
    def fused(self) -> Function:
        """Ours, of x and the parameters, with `save` and `kernel` where there are any."""
        return partial(self.call, getattr(functional, self.function))


def _plain(fn: Function, x: Tensor, *parameters: Tensor, **options: Any) -> Any:
    return fn(x, *parameters, **options)


def _norm(fn: Function, x: Tensor, *parameters: Tensor) -> Any:
    return fn(x, x.shape[-1:], *parameters)


def _norm_linear(fn: Function, x: Tensor, norm_weight: Tensor, *weights: Tensor) -> Any:
    return fn(x, NormSpec("rms", norm_weight), weights)


def _block(fn: Function, x: Tensor, norm_weight: Tensor, *weights: Tensor, **options: Any) -> Any:
    return fn(x, *weights, norm=NormSpec("rms", norm_weight), residual=True, **options)


def _gated(size: Size) -> Shapes:
    up = (size.hidden, size.dim)
    return up, up, up[::-1]


def _mlp(size: Size) -> Shapes:
    return (size.hidden, size.dim), (size.hidden,), (size.dim, size.hidden), (size.dim,)


def _qkv(size: Size) -> Shapes:
    kv = (size.kv, size.dim)
    return (size.dim,), (size.dim, size.dim), kv, kv


LEVELS, GATED_LEVELS = ("inputs", "preact"), ("inputs", "gate", "preact")
FUSED, HYBRID = ("split", "fused"), ("split", "hybrid")

_ROWS = (
    Case("rms_norm", _norm, lambda size: ((size.dim,),)),
    Case("layer_norm", _norm, lambda size: ((size.dim,), (size.dim,))),
    Case("linear_act", _plain, lambda size: _mlp(size)[:2], LEVELS, FUSED),
    Case("norm_linear", _norm_linear, _qkv),
    Case("mlp", _plain, _mlp, LEVELS, HYBRID),
    Case("gated_mlp", _plain, _gated, GATED_LEVELS, HYBRID),
    Case("gated_mlp", _block, lambda size: ((size.dim,), *_gated(size)), GATED_LEVELS, HYBRID),
)
CASES: dict[str, Case] = dict(zip(CASE_NAMES, _ROWS, strict=True))

# what everything is held against; the first is the one that ratios refer to
BASELINES: dict[str, Callable[[Function], Function]] = {
    "eager": lambda eager: eager,
    "torch.compile": lambda eager: torch.compile(eager, dynamic=False),
    "checkpoint": lambda eager: partial(checkpoint, eager, use_reentrant=False),
}


def _fused(case: Case, has_plans: bool) -> Iterator[tuple[str, Function]]:
    if not case.levels:
        yield "fusedckpt", case.fused
    for level in case.levels:
        yield f"fusedckpt {level}", partial(case.fused, save=level)
        for plan in case.plans if has_plans else ():
            yield f"fusedckpt {level} {plan}", partial(case.fused, save=level, kernel=plan)


def implementations(case: Case, has_plans: bool) -> dict[str, Function]:
    """Name every way of running a case; with each kernel plan where kernels are compiled."""
    baselines = {name: wrap(case.eager) for name, wrap in BASELINES.items()}
    return baselines | dict(_fused(case, has_plans))


def draw(
    case: Case, size: Size, tokens: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Draw x [tokens, D], which requires grad, and the case's parameters; results are of order one.

    The same numbers on every device and in every dtype, up to rounding.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, size.dim, generator=generator)
    inputs: list[Tensor] = [x.to(device, dtype).requires_grad_()]
    for shape in case.shapes(size):
        value = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            value /= shape[1] ** 0.5
        inputs.append(nn.Parameter(value.to(device, dtype)))
    return inputs
