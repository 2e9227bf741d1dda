"""Compare a swapped module with the original on random numbers, and count bytes saved by both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fusedckpt.fusing.accuracy import FEWEST, FLOOR, Errors
from fusedckpt.fusing.guards import child_at
from fusedckpt.fusing.replica import Draw, replica, undisturbed
from fusedckpt.fusing.swap import Swap
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.memory import saved_tensors

# of the inputs: limits that a module keeps to show where they are reached
SCALES = (1.0, 10.0, 100.0, 1000.0)


def difference(module: nn.Module, swap: Swap) -> NotFused | None:
    """Return how a swap changes outputs or gradients, None if it does not.

    Compared in the module's dtype, in eval and training mode, on inputs of several scales, over 256
    elements or 16 draws, by the error rule of `fusing.accuracy`; at scales other than 1 the floor
    is 64 epsilons of max(scale, rms(truth)).
    """
    first = next(module.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
    device = torch.device("cpu") if first.is_meta else first.device
    sizes = small_sizes(module) if swap.can_shrink else {}
    unguarded = _without_guards(swap)
    counts = [math.prod([sizes.get(n, n) for n in p.shape]) for p in module.parameters()]
    draws = min(16, math.ceil(256 / max(1, min(counts, default=256))))
    with undisturbed(device):
        for scale, training in product(SCALES, (False, True)):
            results: list[Errors] = []
            least = draws if scale == 1 else min(draws, 4)
            for seed in range(max(least, FEWEST)):
                # more draws where a result has few elements, such as a parameter of one number
                if seed >= least and not any(errors.is_few for errors in results):
                    break
                run = _Run(module, swap, sizes, training, scale=scale, seed=seed)
                eager = []
                for dtype in (torch.float64, first.dtype):
                    try:
                        eager.append(run.results(dtype, device))
                    except Exception:  # arbitrary user code, in a dtype that it may not support
                        name = str(dtype).removeprefix("torch.")
                        return NotFused("check dtype", name)
                ours = run.results(first.dtype, device, unguarded)
                results = results or [Errors(first.dtype) for _ in ours]
                for errors, mine, truth, theirs in zip(results, ours, *eager, strict=True):
                    errors.add(mine, theirs, truth)
            problem = _problem(results, first.dtype, scale)
            if problem is not None:
                return problem
    return None


def small_sizes(module: nn.Module) -> dict[int, int]:
    """Return small sizes in place of a module's, enough for a comparison; doubles stay doubles."""
    small: dict[int, int] = {}
    for size in sorted({n for parameter in module.parameters() for n in parameter.shape}):
        half = small.get(size // 2) if size % 2 == 0 else None
        small[size] = min(size, 24 + 16 * len(small)) if half is None else 2 * half
    return small


def _without_guards(swap: Swap) -> Swap:
    """Return the swap of a replica, for which only sizes have changed."""
    match = swap.attributes.get("_fusedckpt_match")
    unguarded = {} if match is None else {"_fusedckpt_match": match._replace(guards=())}
    return replace(swap, attributes={**swap.attributes, **unguarded})


def _problem(results: list[Errors], dtype: torch.dtype, scale: float) -> NotFused | None:
    # large inputs overflow half precision where eager keeps values that we do not, and a small
    # value there may be the difference of large numbers
    floor = FLOOR if scale == 1 else 8 * FLOOR
    names = ["output", "gradient of x", *["gradient of a parameter"] * (len(results) - 2)]
    for name, errors in zip(names, results, strict=True):
        if scale > 1 and dtype in (torch.float16, torch.bfloat16):
            errors.strays = 0
        problem = errors.problem(floor=floor, least=scale)
        if problem is not None:
            where = f" at inputs of {scale:g}" if scale > 1 else ""
            return NotFused("differs", f"{name}{where}: {problem}")
    return None


class _Run:
    """One random draw, on which a module and its swap are run."""

    def __init__(
        self,
        module: nn.Module,
        swap: Swap,
        sizes: Mapping[int, int],
        training: bool,
        scale: float,
        seed: int,
    ):
        self.draw, self.scale = Draw(module, swap.features, sizes, seed=seed), scale
        self.own, self.run = _dtype(module), swap.run
        rate = (lambda path: 0.0) if training else None
        self.replica = partial(replica, module, training=training, rate=rate, sizes=sizes)
        self.dout: Tensor | None = None

    def results(
        self, dtype: torch.dtype, device: torch.device, swap: Swap | None = None
    ) -> list[Tensor]:
        """Return the output and the gradients of x and of every parameter, fused for a swap."""

        def leaf(value: Tensor) -> Tensor:
            # rounded to the module's dtype first, as inputs are exact for both
            return value.to(device, self.own).to(dtype).detach().requires_grad_(True)

        leaves = {key: leaf(value) for key, value in self.draw.values.items()}
        x = leaf(self.draw.x * self.scale)
        clone = self.replica(lambda parameter, path: leaves[id(parameter)])
        if swap is not None:
            swap.apply(clone)
        y = self.run(clone, x)
        self.dout = self.draw.randn(y.shape).to(self.own) if self.dout is None else self.dout
        wanted = [x, *leaves.values()]
        grads = torch.autograd.grad(y, wanted, self.dout.to(y), allow_unused=True)
        pairs = zip(grads, wanted, strict=True)
        return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in pairs)]


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


class _MasksOfBytes(TorchFunctionMode):
    """Runs dropouts on meta as a GPU does: a mask has a byte for each element, as it has there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.dropout:
            return _native_dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _native_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    runs = training and 0 < p < 1
    return torch.native_dropout(input, p, True)[0] if runs else F.dropout(input, p, training)


def saved_per_token(
    module: nn.Module, swap: Swap, dtype: torch.dtype | None = None
) -> tuple[float, float] | None:
    """Return the bytes saved per token before and after a swap; None if the module cannot run.

    Measured on meta tensors with the module's shapes and dropout, in its dtype if none is given,
    but for the dropouts with which it does not run fused; the module's input counts as an
    activation.
    """
    # so many that the seeds of a call are less than a byte per token
    tokens, counts = 64, []
    is_on_gpu = any(p.is_cuda for p in module.parameters())
    with undisturbed("meta"), _MasksOfBytes() if is_on_gpu else nullcontext():
        for change in (None, swap):
            leaves: dict[int, Tensor] = {
                id(p): torch.empty(p.shape, dtype=dtype or p.dtype, device="meta").requires_grad_()
                for p in module.parameters()
            }
            clone = replica(module, lambda p, _, made=leaves: made[id(p)], training=True)
            if change is not None:
                change.apply(clone)
                match = change.attributes.get("_fusedckpt_match")
                for path, name in getattr(match, "zero_rates", ()):
                    vars(child_at(clone, path))[name] = 0.0
            shape = 1, tokens, *swap.features
            x = torch.empty(shape, dtype=dtype or _dtype(module), device="meta", requires_grad=True)
            with saved_tensors() as saved:
                try:
                    y = swap.run(clone, x * 1)
                except Exception:  # arbitrary code of others, on a device that it may not know
                    return None
            counts.append(saved.nbytes // tokens)
            del y
    return counts[0], counts[1]
