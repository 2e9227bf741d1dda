"""Many gradients in one backward: batched, and as Jacobians and Hessians, vectorised."""

from dataclasses import replace

import adapted_cases
import cases
import lora_cases
import pytest
import torch
from support import as_tuple
from torch.autograd.functional import hessian, jacobian

LORA = [replace(case, name=f"lora-{case.name}") for case in lora_cases.CASES]
CASES = [*cases.CASES, *LORA, *adapted_cases.CASES]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def leaves_of(inputs):
    return tuple(x for x in inputs if x is not None)


def of_leaves(fn, inputs):
    """Return fn as a function of those inputs that are tensors."""

    def call(*leaves):
        remaining = iter(leaves)
        return fn(*(None if x is None else next(remaining) for x in inputs))

    return call


@each
def test_batched(case, path):
    inputs = case.inputs((3,), 4, 5)
    ys = as_tuple(case.eager(*inputs))
    dys = [torch.randn(6, *y.shape, dtype=y.dtype, device=y.device) for y in ys]
    # quantised weights get none
    options = {"is_grads_batched": True, "allow_unused": True}
    found = [
        torch.autograd.grad(as_tuple(fn(*inputs)), leaves_of(inputs), dys, **options)
        for fn in (case.fused, case.eager)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@each
def test_jacobian(case):
    inputs = case.inputs((3,), 4, 5, torch.float64)
    found = [
        jacobian(of_leaves(fn, inputs), leaves_of(inputs), vectorize=True)
        for fn in (case.fused, case.eager)
    ]
    torch.testing.assert_close(*found)


@each
def test_hessian(case):
    inputs = case.inputs((2,), 3, 4, torch.float64)

    def total(fn):
        return lambda *leaves: sum(y.sin().sum() for y in as_tuple(of_leaves(fn, inputs)(*leaves)))

    found = [
        hessian(total(fn), leaves_of(inputs), vectorize=True) for fn in (case.fused, case.eager)
    ]
    torch.testing.assert_close(*found)
