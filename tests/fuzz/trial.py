"""One run of one configuration: ours, eager in the same dtype, and eager in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint as stock

import fusedckpt

from . import ours
from .config import Config
from .eager import EAGER, Outputs
from .operands import (
    Operands,
    gradients_for,
    kind_of,
    lay_out,
    leaves_of,
    normalized_shape,
    shapes_of,
    tie,
)


@dataclass
class Results:
    """What one implementation returned: outputs, then gradients by what they belong to."""

    outputs: Outputs = ()
    found: dict[str, Tensor | None] = field(default_factory=dict)
    requires: tuple[bool, ...] = ()
    error: Exception | None = None


class Trial(NamedTuple):
    """Ours beside eager and the truth, and whether ours wrote to tensors that are not its own.

    written: eager once more, in float32 and with norms written out, where asked for.
    """

    ours: Results
    eager: Results
    truth: Results
    written: Results | None
    changes: bool


def settle(c: Config) -> Config:
    """Take back what does not go together, in torch either."""
    names = set(shapes_of(c))
    around, backward = _settle_backward(c)
    layouts = tuple(pair for pair in c.layouts if pair[0] in names)
    if kind_of(c) == "layer" and c.activation in ("relu", "leaky_relu"):
        # equal weights sum what a norm made to zero, and the slope goes by the sum's sign
        layouts = tuple(pair for pair in layouts if pair[1] not in ("scalar", "expanded_last"))
    values = c.values
    if c.function == "experts":
        # backward multiplies by a score after the GEMM, eager before: float16 overflows elsewhere
        values = tuple(pair for pair in values if pair[1] != "huge")
    frozen = tuple(name for name in c.frozen if name in names)
    given = {"layouts": layouts, "values": values, "frozen": frozen}
    return c.but(eps=_settle_eps(c), around=around, backward=backward, **given)


def _settle_eps(c: Config) -> float | None:
    """Return an eps at which errors do not all hang on the one element nearest to zero."""
    kind = kind_of(c)
    if kind is None:
        return c.eps
    sizes = (math.prod(normalized_shape(c)), *((c.f,) if c.function == "Sequential" else ()))
    # what a mean leaves of one element is the rounding of zero
    least = {0: 1.0, 1: 1e-2}.get(min(sizes) - (kind == "layer"))
    return c.eps if least is None else max(least, c.eps or 0.0)


def _settle_backward(c: Config) -> tuple[str | None, str]:
    """Return the checkpoint and the backward of a configuration, as far as they go together."""
    around, backward = c.around, c.backward
    if backward == "backward_twice" and c.views:
        # torch's own x.view_as(x) + r.view_as(r) gives two leaves one .grad, and adds to it twice
        backward = "grad_twice"
    if around == "reentrant":
        # it refuses autograd.grad, and gives zeros for what nobody used
        fits = "x" not in c.frozen and "none" not in c.douts and backward.startswith("backward")
        around = "reentrant" if fits else "torch"
    if backward == "double" and (around is not None or c.values):
        backward = "grad"
    return around, backward


def attempt(c: Config, number: int = 0, writes: bool = False) -> Trial:
    """Run draw `number` of a configuration by all that are compared."""
    leaves = leaves_of(c, number)
    theirs = {key: t.detach().requires_grad_(t.requires_grad) for key, t in leaves.items()}
    eager = _eagerly(c, theirs)
    works = eager.error is None
    douts = gradients_for(c, eager.outputs, number)
    if works:
        _finish(c, eager, theirs, douts)
    given = [*leaves.values(), *(dout for dout in douts if dout is not None)]
    before = [(bytes_of(tensor).clone(), tensor._version) for tensor in given]
    mine = _ours(c, leaves)
    if mine.error is None and works:
        _finish(c, mine, leaves, douts)
    changes = any(
        tensor._version != version or not torch.equal(bytes_of(tensor), memory)
        for tensor, (memory, version) in zip(given, before, strict=True)
    )
    truth, written = Results(), None
    if eager.error is None:
        truth = _exactly(c, leaves, douts, torch.float64)
        # float64 is the truth itself: its error is float32's, on another scale
        if writes or c.dtype == "float64":
            written = _exactly(c.but(cast="written"), leaves, douts, torch.float32)
    return Trial(mine, eager, truth, written, changes)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return all memory behind a tensor as bytes, what lies between its elements too."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _eagerly(c: Config, leaves: Operands) -> Results:
    with _mode(c):
        return _forward(lambda: EAGER[c.function](c, _viewed(c, tie(c, leaves))))


def _exactly(
    c: Config, leaves: Operands, douts: list[Tensor | None], dtype: torch.dtype
) -> Results:
    """Run eager in one dtype throughout, with the eps that c's own dtype would give."""
    exact = c.but(autocast=None)
    if c.eps is None and kind_of(c) == "rms":
        own = torch.promote_types(getattr(torch, c.dtype), torch.float32)
        exact = exact.but(eps=torch.finfo(own).eps)
    wide = {
        name: leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)
        for name, leaf in leaves.items()
    }
    results = _eagerly(exact, wide)
    _finish(exact, results, wide, [None if dout is None else dout.to(dtype) for dout in douts])
    return results


AROUND: dict[str | None, Callable[..., Any]] = {
    None: lambda fn, x: fn(x),
    "ours": fusedckpt.checkpoint,
    "twice": lambda fn, x: fusedckpt.checkpoint(partial(fusedckpt.checkpoint, fn), x),
    "torch": partial(stock.checkpoint, use_reentrant=False),
    "reentrant": partial(stock.checkpoint, use_reentrant=True),
}


def _ours(c: Config, leaves: Operands) -> Results:
    """Run ours under its contexts, and in a checkpoint where one is drawn."""
    t = _viewed(c, tie(c, leaves))

    def fn(x: Tensor) -> Outputs:
        return ours.call(c, t | {"x": x})

    with ExitStack() as stack:
        stack.enter_context(_mode(c))
        if c.saving is not None:
            stack.enter_context(fusedckpt.saving(c.saving))
        if c.hooks is not None:
            pack = partial(_packed, c.hooks)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
        return _forward(lambda: AROUND[c.around](fn, t["x"]))


def _packed(kind: str, x: Tensor) -> Tensor:
    """Return a saved tensor in other memory, and mostly in another layout."""
    return lay_out(x.clone(), kind if x.is_floating_point() else None)


@contextmanager
def _mode(c: Config) -> Iterator[None]:
    """Set grad mode and autocast."""
    mode = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    dtype = None if c.autocast is None else getattr(torch, c.autocast)
    with mode[c.mode](), torch.autocast("cpu", dtype, enabled=dtype is not None):
        yield


def _forward(call: Callable[[], Outputs]) -> Results:
    try:
        outputs = call()
    except Exception as error:
        return Results(error=error)
    found = {f"y{index}": y.detach() for index, y in enumerate(outputs)}
    return Results(outputs, found, tuple(y.requires_grad for y in outputs))


def _viewed(c: Config, t: Operands) -> Operands:
    """Return operands that are views of leaves; of parameters only where functions get them."""
    if not c.views:
        return t
    found: dict[int, Tensor] = {}
    return {
        name: leaf
        if name != "x" and c.function in ours.MODULES
        else found.setdefault(id(leaf), leaf.view_as(leaf))
        for name, leaf in t.items()
    }


def _finish(c: Config, results: Results, leaves: Operands, douts: list[Tensor | None]) -> None:
    """Run backward as configured and add what it found."""
    pairs = [
        (y, dout)
        for y, dout in zip(results.outputs, douts, strict=True)
        if y.requires_grad and dout is not None
    ]
    wanted = {name: leaf for name, leaf in tie(c, leaves).items() if leaf.requires_grad}
    if not pairs or not wanted:
        return
    try:
        results.found |= _BACKWARD[c.backward](wanted, *map(list, zip(*pairs, strict=True)))
    except Exception as error:
        results.error = error


def _grad(wanted: Operands, ys: list[Tensor], dys: list[Tensor], times: int = 1) -> dict:
    found: dict[str, Tensor | None] = {}
    for time in range(times):
        options = {"retain_graph": time < times - 1, "allow_unused": True}
        grads = torch.autograd.grad(ys, list(wanted.values()), dys, **options)
        found |= {f"d{time or ''} {name}": g for name, g in zip(wanted, grads, strict=True)}
    return found


def _accumulate(wanted: Operands, ys: list[Tensor], dys: list[Tensor], times: int = 1) -> dict:
    for time in range(times):
        torch.autograd.backward(ys, dys, retain_graph=time < times - 1)  # type: ignore[arg-type]
    return {f"d {name}": leaf.grad for name, leaf in wanted.items()}


def _double(wanted: Operands, ys: list[Tensor], dys: list[Tensor]) -> dict:
    """Return first derivatives, and second ones with respect to the same leaves."""
    inputs = list(wanted.values())
    dys = [dy.detach().requires_grad_() for dy in dys]
    grads = torch.autograd.grad(ys, inputs, dys, create_graph=True, allow_unused=True)
    found = {f"d {name}": g for name, g in zip(wanted, grads, strict=True)}
    deep = [g for g in grads if g is not None and g.requires_grad]
    if deep:
        again, weights = [*inputs, *dys], [_ramp(g) for g in deep]
        # whether a second derivative is zero or None depends on how a formula is written
        second = torch.autograd.grad(deep, again, weights, materialize_grads=True)
        names = [*wanted, *(f"dout{i}" for i in range(len(dys)))]
        found |= {f"dd {name}": grad for name, grad in zip(names, second, strict=True)}
    return found


def _ramp(like: Tensor) -> Tensor:
    ramp = torch.linspace(-1, 1, like.numel(), dtype=torch.float64)
    return ramp.view(like.shape).to(like.dtype)


_BACKWARD: dict[str, Callable[..., dict]] = {
    "grad": _grad,
    "grad_twice": partial(_grad, times=2),
    "backward": _accumulate,
    "backward_twice": partial(_accumulate, times=2),
    "double": _double,
}
