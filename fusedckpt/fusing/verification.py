"""Verify a proposal for a module: a rule that it may compute by, or its swap.

Of several rules `best_rule` returns the one that gives a module's results in most dtypes, by bits
where these tell rules apart. `difference` compares outputs and gradients of a swap with the
original's by the error rule, and `saved_per_token` counts the bytes that both save. Replicas run,
on random numbers; the module itself does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from fusedckpt.fusing.accuracy import FEWEST, FLOOR, Errors
from fusedckpt.fusing.match_reader import Guards, child_at
from fusedckpt.fusing.replica import Draw, Path, replica, undisturbed
from fusedckpt.fusing.swap import Swap
from fusedckpt.kernels.runtime import HALF
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.memory import saved_tensors

# of the inputs: limits that a module keeps to show where they are reached
SCALES = (1.0, 10.0, 100.0, 1000.0)
# draws of the rounding of parameters, where the original's error is measured by that
_ROUNDINGS = 4
# of a measurement of bytes: so many that the seeds of a call are less than a byte per token
_TOKENS = 64
# those in which a rule is tried
CHECKED_DTYPES = (*HALF, torch.float32, torch.float64)
# of elements that may differ by a rounding: a rule that rounds elsewhere differs in a tenth of them
_STRAYS = 1 / 50
# of each input, and of the weights
Dtypes = tuple[torch.dtype, ...]


class Rule(Protocol):
    """A record of how a module may compute."""

    @property
    def dtypes(self) -> tuple[Dtypes, ...]:
        """The dtypes in which it was proven."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether its bits tell it from other rules; else its results obey the error rule."""
        ...

    def result(self, module: nn.Module, inputs: Sequence[Tensor], weights: Any) -> Tensor | None:
        """Return its result, None where it takes no such dtypes; weights: by their names."""

    def _replace(self, **changes: Any) -> Any: ...


_Rule = TypeVar("_Rule", bound=Rule)


class RuleTrial:
    """One draw, on which a module and rules for it run in any dtypes.

    inputs: in float64; values: of parameters in float64, by their ids; dtypes: those to prove.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        values: Mapping[int, Tensor],
        dtypes: Sequence[Dtypes],
    ):
        self.module = module
        self.inputs = inputs
        self.dtypes = dtypes
        self._values = values

    def all_of(self, dtype: torch.dtype) -> Dtypes:
        """Return one dtype for all inputs and the weights."""
        return (dtype,) * (len(self.inputs) + 1)

    def result(self, dtypes: Dtypes) -> Tensor | None:
        """Return the module's result, None where it raises or returns no tensor."""
        *of_inputs, of_weights = dtypes
        clone = replica(self.module, lambda p, _: self._values[id(p)].to(of_weights))
        with undisturbed("cpu"), torch.no_grad():
            try:
                y = type(clone).forward(clone, *_cast(self.inputs, of_inputs))
            except Exception:  # arbitrary code of others, in dtypes that it may not take
                return None
        return y if isinstance(y, Tensor) else None

    def result_of(self, rule: Rule, dtypes: Dtypes) -> Tensor | None:
        """Return a rule's result, None where it takes no such dtypes."""
        *of_inputs, of_weights = dtypes
        parameters = self.module._parameters.items()
        weights = {
            n: None if p is None else self._values[id(p)].to(of_weights) for n, p in parameters
        }
        with undisturbed("cpu"), torch.no_grad():
            return rule.result(self.module, _cast(self.inputs, of_inputs), weights)

    @cached_property
    def _truth(self) -> Tensor | None:
        return self.result(self.all_of(torch.float64))

    def is_close(self, rule: Rule) -> bool:
        """Whether a rule gives the module's result in float32, up to rounding."""
        dtypes = self.all_of(torch.float32)
        return _are_same(self.result_of(rule, dtypes), self.result(dtypes))

    def holds(self, rule: Rule, dtypes: Dtypes, expected: Tensor | None) -> bool:
        """Whether a rule gives a module's result: its bits, or as close to the truth."""
        result = self.result_of(rule, dtypes)
        if rule.is_exact:
            return _are_same(result, expected)
        if result is None or expected is None or self._truth is None:
            return False
        errors = Errors(result.dtype)
        errors.add(result, expected, self._truth)
        return errors.problem() is None


def best_rule(trial: RuleTrial, rules: Iterable[_Rule]) -> _Rule | None:
    """Return the rule that holds in most dtypes, float32 among them, with these; None for none."""
    expected = {dtypes: trial.result(dtypes) for dtypes in trial.dtypes}
    best = None
    for rule in rules:
        proven = tuple(dtypes for dtypes, y in expected.items() if trial.holds(rule, dtypes, y))
        # half precision alone proves little: it rounds away how a rule differs
        is_proven = trial.all_of(torch.float32) in proven
        if is_proven and (best is None or len(proven) > len(best.dtypes)):
            best = rule._replace(dtypes=proven)
    return best


def _cast(inputs: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]


def _are_same(result: Tensor | None, expected: Tensor | None) -> bool:
    """Whether two results are equal: in half precision but for stray roundings, else nearly."""
    if result is None or expected is None:
        return False
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.dtype in HALF:
        return (result != expected).double().mean().item() <= _STRAYS
    tolerance = 8 * torch.finfo(result.dtype).eps
    return torch.allclose(result, expected, rtol=tolerance, atol=tolerance)


def difference(module: nn.Module, swap: Swap) -> NotFused | None:
    """Return how a swap changes outputs or gradients, None if it does not.

    Compared in the module's dtype, in eval and training mode, on inputs of several scales, over 256
    elements or 16 draws, by the error rule of `fusing.accuracy`; at scales other than 1 the floor
    is 64 epsilons of max(scale, rms(truth)), and the original's error is at least that of an
    epsilon of its parameters.
    """
    sizes = small_sizes(module) if swap.can_shrink else {}
    counts = [math.prod([sizes.get(n, n) for n in p.shape]) for p in module.parameters()]
    num_draws = min(16, math.ceil(256 / max(1, min(counts, default=256))))
    with undisturbed(_device_of(module)):
        for scale, training in product(SCALES, (False, True)):
            least = num_draws if scale == 1 else min(num_draws, 4)
            draw = partial(_Run, module, swap, sizes, training, scale)
            results = _errors_over_draws(module, swap, draw, least)
            if isinstance(results, NotFused):
                return results
            problem = _problem(results, _dtype_of(module), scale)
            if problem is not None and scale > 1:
                # at large inputs nearly all gates saturate: the error is that of a few gates
                # that do not, and depends on how their sum happens to be rounded
                truth_dtype = _truth_dtype(swap, draw(0), _device_of(module))
                _raise_to_roundings(results, module, draw, truth_dtype)
                problem = _problem(results, _dtype_of(module), scale)
            if problem is not None:
                return problem
    return None


def _errors_over_draws(
    module: nn.Module, swap: Swap, draw: Callable[[int], _Run], least: int
) -> list[Errors] | NotFused:
    """Return the errors of the output and of each gradient, or why the module does not run.

    draw: makes the run of a seed; least: how many draws are compared. More follow while a result
    has few elements, such as a parameter of one number.
    """
    dtype = _dtype_of(module)
    device = _device_of(module)
    unguarded = _without_guards(swap)
    truth_dtype = _truth_dtype(swap, draw(0), device)
    results: list[Errors] = []
    for seed in range(max(least, FEWEST)):
        if seed >= least and not any(errors.is_few for errors in results):
            break
        run = draw(seed)
        references = []
        for dtype_of_reference in (truth_dtype, dtype):
            try:
                references.append(run.results(dtype_of_reference, device))
            except Exception:  # arbitrary user code, in a dtype that it may not support
                return NotFused("check dtype", str(dtype_of_reference).removeprefix("torch."))
        try:
            ours = run.results(dtype, device, unguarded)
        except CheckpointError:
            # samples of its recompute differ
            return NotFused("other values")
        results = results or [Errors(dtype) for _ in ours]
        for errors, mine, truth, theirs in zip(results, ours, *references, strict=True):
            errors.add(mine, theirs, truth)
    return results


def _truth_dtype(swap: Swap, run: _Run, device: torch.device) -> torch.dtype:
    """Return the dtype of the reference: float64, float32 for a norm that casts to it itself.

    Such a norm gives a float32 x to float64 weights in float64. Its rule was found by its bits.
    """
    if swap.kind == "norm":
        try:
            run.results(torch.float64, device)
        except Exception:  # arbitrary user code, in a dtype that it may not support
            return torch.float32
    return torch.float64


def _raise_to_roundings(
    results: list[Errors], module: nn.Module, draw: Callable[[int], _Run], truth_dtype: torch.dtype
) -> None:
    """Raise the original's errors to those that rounding its parameters alone would make.

    They are measured in the dtype of the reference, of values that are finite in the module's.
    """
    device = _device_of(module)
    noises = [Errors(torch.float64) for _ in results]
    for seed in range(results[0].draws):
        run = draw(seed)
        truths = run.results(truth_dtype, device)
        theirs = run.results(_dtype_of(module), device)
        for number in range(_ROUNDINGS):
            rounded = run.results(truth_dtype, device, rounding=number)
            for noise, moved, eager, truth in zip(noises, rounded, theirs, truths, strict=True):
                noise.add(moved.where(eager.isfinite(), truth), truth, truth)
    for errors, noise in zip(results, noises, strict=True):
        errors.eager = max(errors.eager, noise.ours / _ROUNDINGS)


def small_sizes(module: nn.Module) -> dict[int, int]:
    """Return small sizes in place of a module's, enough for a comparison; doubles stay doubles."""
    small: dict[int, int] = {}
    for size in sorted({n for parameter in module.parameters() for n in parameter.shape}):
        half = small.get(size // 2) if size % 2 == 0 else None
        small[size] = min(size, 24 + 16 * len(small)) if half is None else 2 * half
    return small


def _without_guards(swap: Swap) -> Swap:
    """Return the swap of a replica, for which only sizes have changed."""
    match = swap.notes.get("match")
    if match is None:
        return swap
    unguarded = match._replace(guards=Guards())
    return replace(swap, notes={**swap.notes, "match": unguarded})


def _problem(results: list[Errors], dtype: torch.dtype, scale: float) -> NotFused | None:
    """Return the first result that breaks the error rule, None if none does."""
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
        self._draw = Draw(module, swap.features, sizes, seed=seed)
        self._scale = scale
        self._dtype = _dtype_of(module)
        self._run = swap.run
        rate = (lambda path: 0.0) if training else None
        self._replica = partial(replica, module, training=training, rate=rate, sizes=sizes)
        # the gradient of the output, drawn once its shape is known
        self._dout: Tensor | None = None

    def results(
        self,
        dtype: torch.dtype,
        device: torch.device,
        swap: Swap | None = None,
        rounding: int | None = None,
    ) -> list[Tensor]:
        """Return the output and the gradients of x and of every parameter, fused for a swap.

        rounding: the seed by which parameters are moved by about an epsilon of the module's dtype.
        x stays: experts are chosen by its digits.
        """

        def leaf(value: Tensor) -> Tensor:
            # rounded to the module's dtype first, as inputs are exact for both
            return value.to(device, self._dtype).to(dtype).detach().requires_grad_(True)

        leaves = {key: leaf(value) for key, value in self._draw.values.items()}
        if rounding is not None:
            eps = torch.finfo(self._dtype).eps
            generator = torch.Generator().manual_seed(rounding)
            with torch.no_grad():
                for parameter in leaves.values():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.mul_(1 + eps * noise.to(device))
        x = leaf(self._draw.x * self._scale)
        clone = self._replica(lambda parameter, path: leaves[id(parameter)])
        if swap is not None:
            swap.apply(clone)
        y = self._run(clone, x)
        if self._dout is None:
            self._dout = self._draw.randn(y.shape).to(self._dtype)
        inputs = [x, *leaves.values()]
        grads = torch.autograd.grad(y, inputs, self._dout.to(y), allow_unused=True)
        pairs = zip(grads, inputs, strict=True)
        return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in pairs)]


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


def _device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module is verified: a CPU for a module without parameters."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


class _MasksOfBytes(TorchFunctionMode):
    """Runs dropouts on meta as a GPU does: a mask has a byte for each element, if not in place."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.dropout:
            return _native_dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _native_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return F.dropout(input, p, training, inplace)


def saved_per_token(
    module: nn.Module, swap: Swap, dtype: torch.dtype | None = None
) -> tuple[float, float] | None:
    """Return the bytes saved per token before and after a swap; None if the module cannot run.

    Measured on meta tensors with the module's shapes and dropout, in its dtype if none is given,
    but for the dropouts with which it does not run fused; the module's input counts as an
    activation.
    """
    is_on_gpu = any(p.is_cuda for p in module.parameters())
    with undisturbed("meta"), _MasksOfBytes() if is_on_gpu else nullcontext():
        before = _saved_bytes(module, swap, dtype, is_swapped=False)
        after = None if before is None else _saved_bytes(module, swap, dtype, is_swapped=True)
    return None if before is None or after is None else (before, after)


def _saved_bytes(
    module: nn.Module, swap: Swap, dtype: torch.dtype | None, is_swapped: bool
) -> float | None:
    """Return the bytes per token that a replica on meta tensors saves; None if it cannot run."""
    leaves: dict[int, Tensor] = {
        id(p): torch.empty(p.shape, dtype=dtype or p.dtype, device="meta").requires_grad_()
        for p in module.parameters()
    }

    def enter(part: nn.Module, _: Path) -> tuple[type, dict[str, Any]]:
        # torch mixes a buffer with tensors on meta only if it is one number, on a CPU
        buffers = {n: None if b is None else b.to("meta") for n, b in part._buffers.items()}
        return type(part), {"_buffers": buffers}

    clone = replica(module, lambda p, _: leaves[id(p)], training=True, enter=enter)
    if is_swapped:
        swap.apply(clone)
        match = swap.notes.get("match")
        for path, attribute in getattr(match, "zero_rates", ()):
            vars(child_at(clone, path))[attribute] = 0.0
    shape = 1, _TOKENS, *swap.features
    x = torch.empty(shape, dtype=dtype or _dtype_of(module), device="meta", requires_grad=True)
    with saved_tensors() as saved:
        try:
            y = swap.run(clone, x * 1)
        except Exception:  # arbitrary code of others, on a device that it may not know
            return None
    nbytes = saved.nbytes // _TOKENS
    del y
    return nbytes
