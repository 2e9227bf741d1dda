"""Run modules on random numbers, without touching them: what do they compute, is ours the same.

Everything runs on replicas: new module objects of the same classes and attributes, with random
parameters of the same or smaller shapes. Nothing of the user's is written, hooked or drawn from.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd.accuracy import largest_error
from fusedckpt.fusing.held import Path
from fusedckpt.fusing.swapped import Swap
from fusedckpt.memory import saved_tensors

# rows of the random input: enough to tell rules of rounding apart, and few
ROWS = 6
# of the inputs: limits that a module keeps to show where they are reached
SCALES = (1.0, 10.0, 100.0, 1000.0)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


class Draw:
    """Random float64 values for a module's parameters and its input, always the same for a seed.

    Matrices are scaled so that products are of order one.
    """

    def __init__(
        self,
        module: nn.Module,
        features: tuple[int, ...],
        sizes: dict[int, tuple[int, ...]] | None = None,
        rows: int = ROWS,
        seed: int = 0,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.values: dict[int, Tensor] = {}
        for parameter in module.parameters():
            shape = (sizes or {}).get(id(parameter), tuple(parameter.shape))
            value = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            self.values[id(parameter)] = value * shape[-1] ** -0.5 if len(shape) == 2 else value
        # three dimensions: a module that picks one of the first two shows
        shape = (2, rows // 2, *features)
        self.x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        self.generator = generator

    def like(self, y: Tensor) -> Tensor:
        """Draw what has the shape of y."""
        return torch.randn(y.shape, generator=self.generator, dtype=torch.float64, device="cpu")


def replica(
    module: nn.Module,
    values: dict[int, Tensor],
    training: bool = False,
    attributes: dict[tuple[Path, str], Any] | None = None,
    path: Path = (),
) -> Any:
    """Return a copy of the module tree over other parameter tensors, given by their ids.

    attributes: what some attributes are instead, by the path of their module. All others and the
    buffers are shared, hooks left out.
    """
    clone: Any = type(module).__new__(type(module))
    clone.__dict__.update(module.__dict__)
    clone.__dict__.update({name: type(module.__dict__[name])() for name in _HOOKS})
    clone.__dict__["training"] = training
    clone.__dict__["_parameters"] = {
        name: None if one is None else values[id(one)] for name, one in module._parameters.items()
    }
    clone.__dict__["_modules"] = {
        name: None if child is None else replica(child, values, training, attributes, (*path, name))
        for name, child in module._modules.items()
    }
    found = {name: value for (at, name), value in (attributes or {}).items() if at == path}
    clone.__dict__.update(found)
    return clone


def is_transposed(child: nn.Module) -> bool:
    """Whether a layer is a linear whose weight lies as [in, out], as transformers' Conv1D is."""
    weight, bias = child._parameters.get("weight"), child._parameters.get("bias")
    return (
        not isinstance(child, nn.Linear)
        and len(child._parameters) == 2
        and not (child._modules or child._buffers)
        and weight is not None
        and bias is not None
        and weight.dim() == 2
        and getattr(child, "nf", None) == weight.shape[1] == bias.shape[0]
    )


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep the random state, and run as plain training code does, whatever the caller is inside."""
    devices = [device] if device.type == "cuda" else []
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type if device.type != "meta" else "cpu", enabled=False),
    ):
        # of dtypes that no user asked for
        warnings.simplefilter("ignore")
        yield


def like(tensors: dict[int, Tensor], make: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """Make a leaf that requires grad from every floating tensor."""
    return {key: make(value).detach().requires_grad_(True) for key, value in tensors.items()}


def call(module: Any, x: Tensor) -> Any:
    """Run the module's forward, without the hooks around it."""
    return type(module).forward(module, x)


def swapped_replica(swap: Swap, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return a replica that has been swapped."""
    clone = replica(module, *args, **kwargs)
    swap.apply(clone)
    return clone


def results(module: Any, leaves: dict[int, Tensor], x: Tensor, dout: Tensor) -> list[Tensor]:
    """Return the output and the gradients of x and of every parameter."""
    y = call(module, x)
    wanted = [x, *leaves.values()]
    if not y.requires_grad:
        return [y, *map(torch.zeros_like, wanted)]
    grads = torch.autograd.grad(y, wanted, dout.to(y), allow_unused=True)
    found = zip(grads, wanted, strict=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in found)]


def difference(module: nn.Module, swap: Swap) -> str | None:
    """Return how swapping would change outputs or gradients, None if it does not.

    Root mean square errors against float64, over draws of 256 elements or 16 draws, in the
    module's own dtype, in eval and in training, at inputs of several scales: err(swapped) <= 2
    err(as it is) + 8 eps max(1, rms(truth)), 64 eps max(scale, rms(truth)) where scale is not 1.
    """
    first = next(module.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
    device = torch.device("cpu") if first.is_meta else first.device
    smallest = min(
        [math.prod(swap.sizes.get(id(p), tuple(p.shape))) for p in module.parameters()],
        default=256,
    )
    draws = min(16, math.ceil(256 / max(1, smallest)))
    with undisturbed(device):
        if not _runs_widely(module, swap, device):
            return "it does not run in float64, in which it would be checked"
        for scale, training in product(SCALES, (False, True)):
            seeds = range(draws if scale == 1 else min(draws, 4))
            run = partial(_errors, module, swap, first.dtype, device, training, scale)
            errors = [run(seed) for seed in seeds]
            found = _verdict(torch.stack(errors).sum(0), first.dtype, scale)
            if found is not None:
                return found
    return None


def _runs_widely(module: nn.Module, swap: Swap, device: torch.device) -> bool:
    draw = Draw(module, swap.small or swap.features, swap.sizes)
    wide = {key: value.to(device) for key, value in draw.values.items()}
    try:
        call(replica(module, wide, attributes=swap.numbers), draw.x.to(device))
    except Exception:  # arbitrary code of others, in a dtype that it may not take
        return False
    return True


def _verdict(sums: Tensor, dtype: torch.dtype, scale: float) -> str | None:
    """Judge sums of errors: column 3 counts elements, column 4 what is finite on one side only."""
    at = f" at inputs of {scale:g}" if scale > 1 else ""
    # large inputs overflow half precision where eager keeps what we do not
    # and what is small there may be the difference of large numbers
    floor = 8 if scale == 1 else 64
    is_judged = scale == 1 or dtype not in (torch.float16, torch.bfloat16)
    for index, (mine, eagers, truth, count, strays) in enumerate(sums.tolist()):
        ours, theirs, size = (math.sqrt(value / max(1, count)) for value in (mine, eagers, truth))
        limit = largest_error(theirs, max(scale, size), dtype, floor=floor)
        if (strays and is_judged) or ours > limit:
            what = ("output", "gradient of x")[index] if index < 2 else "gradient of a parameter"
            what += at
            return f"{what}: error {ours:.3g} where the original's is {theirs:.3g}"
    return None


def _errors(
    module: nn.Module,
    swap: Swap,
    dtype: torch.dtype,
    device: torch.device,
    training: bool,
    scale: float,
    seed: int,
) -> Tensor:
    """Return squared errors of ours and eager's, squares, counts and strays, per result."""
    draw = Draw(module, swap.small or swap.features, swap.sizes, seed=seed)

    def run(make: Callable[..., Any], to: torch.dtype) -> list[Tensor]:
        # rounded to the module's dtype first: that is no error of either
        values = like(draw.values, lambda t: t.to(device, dtype).to(to))
        x = (draw.x * scale).to(device, dtype).to(to).requires_grad_(True)
        return results(make(values), values, x, dout.to(device))

    def eager(values: dict[int, Tensor]) -> Any:
        return replica(module, values, training, swap.numbers)

    def ours(values: dict[int, Tensor]) -> Any:
        return swapped_replica(swap, module, values, training, swap.numbers)

    with torch.no_grad():
        wide = {key: value.to(device) for key, value in draw.values.items()}
        dout = draw.like(call(eager(wide), draw.x.to(device))).to(dtype)
    rows = zip(run(ours, dtype), run(eager, dtype), run(eager, torch.float64), strict=True)
    return torch.stack([_row(a, b, t) for a, b, t in rows])


def _row(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    if a.shape != b.shape or a.dtype != b.dtype:
        return _cells(0, 0, 0, 1, 1)
    strays = (a.isfinite() != b.isfinite()).sum().item()
    finite = a.isfinite() & b.isfinite()
    squares = (
        x.double().where(finite, 0).nan_to_num(0, 0, 0).square().sum().item()
        for x in (a - t, b - t, t)
    )
    return _cells(*squares, t.numel(), strays)


def _cells(*values: float) -> Tensor:
    # whatever the default dtype and device are
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def saved_per_token(module: nn.Module, swap: Swap) -> tuple[float, float] | None:
    """Return the bytes that one token of training keeps, before and after; None if it cannot run.

    Measured at the module's own shapes, dtype and dropout on meta tensors, which takes neither
    memory nor time; the module's input counts as an activation.
    """
    values: dict[int, Tensor] = {id(p): p for p in module.parameters()}
    dtype = next((p.dtype for p in values.values()), torch.float32)
    tokens = 4
    found = []
    with undisturbed(torch.device("meta")):
        for make in (replica, lambda *args, **kw: swapped_replica(swap, *args, **kw)):
            leaves = like(values, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
            x = torch.empty(1, tokens, *swap.features, dtype=dtype, device="meta")
            x.requires_grad_(True)
            with saved_tensors() as saved:
                try:
                    y = call(make(module, leaves, training=True), x * 1)
                except Exception:  # arbitrary code of others, on a device that it may not know
                    return None
            found.append(saved.nbytes / tokens)
            del y
    return found[0], found[1]


def takes_one(module: nn.Module) -> bool:
    """Whether the module's forward can be called with one argument."""
    try:
        inspect.signature(type(module).forward).bind(module, None)
    except (TypeError, ValueError):
        return False
    return True
