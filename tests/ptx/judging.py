"""Results of kernels beside eager's, and the error rule of the project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fusedckpt.fusing.accuracy import Errors

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "tf32": torch.float32}
Maybe = Tensor | None


class Results(NamedTuple):
    """Results in one order: ours, eager's in the same dtype, eager's in float64."""

    ours: Sequence[Maybe]
    eager: Sequence[Maybe]
    truth: Sequence[Maybe]


class KernelCase(NamedTuple):
    """A name, and a function that launches kernels: it returns results, or its ratio of errors."""

    name: str
    compute: Callable[[], Results | float]


def named(function: Callable[..., Results], *args: object, **options: object) -> KernelCase:
    """Return a case that is named after its function and arguments."""
    flags = (key if value is True else value for key, value in options.items() if value)
    name = "-".join(map(str, (*args, *flags)))
    return KernelCase(f"{function.__name__}/{name}", partial(function, *args, **options))


def beside(
    ours: Sequence[Maybe], eager: Callable[..., Sequence[Maybe]], *tensors: Maybe
) -> Results:
    """Return our results beside eager's, in the dtypes of its tensors and in float64."""
    wide = [None if t is None else t.double() for t in tensors]
    return Results(ours, eager(*tensors), eager(*wide))


def judge(results: Results | float) -> tuple[float, str | None]:
    """Return the worst error relative to eager's, and what breaks the error rule."""
    if not isinstance(results, Results):
        return results, None
    worst, problems = 0.0, []
    for index, (ours, eager, truth) in enumerate(zip(*results, strict=True)):
        if ours is None or eager is None or truth is None:
            assert ours is eager is truth, f"result {index} is missing"
            continue
        errors = Errors(ours.dtype)
        errors.add(ours, eager.to(ours.dtype), truth)
        problem = errors.problem()
        problems += [f"result {index}: {problem}"] if problem else []
        worst = max(worst, errors.sizes().ratio)
    return worst, "; ".join(problems) or None


def summed(x: Tensor) -> Tensor:
    """Sum rows in at least float32."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def leaf(x: Tensor) -> Tensor:
    """Return a copy that requires grad."""
    return x.detach().clone().requires_grad_()
