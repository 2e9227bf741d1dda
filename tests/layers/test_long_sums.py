"""Norms sum long rows, many rows, and numbers of one sign, as well as eager does."""

from functools import partial
from itertools import product

import pytest
import torch
from support import DEVICE, HALF, compare

from fusedckpt import functional, reference
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels.norm import MAX_BLOCK

NORMS = "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"


def outlier(x):
    """Begin every row with a number that outweighs the others."""
    return torch.cat([1000 * x[:, :1], x[:, 1:]], 1)


ROWS = {
    "equal": torch.ones_like,
    "around zero": lambda x: x,
    "around 3": lambda x: x + 3,
    "around 100": lambda x: x + 100,
    "outlier": outlier,
    "of equal size": lambda x: x[:, :1].abs().add(0.1) * x.sign(),
}
# large, so that the rule's floor, absolute below one, is one of the gradient's digits
GRADIENTS = {
    "equal": lambda y: torch.full_like(y, 300.3),
    "around 1000": lambda y: 100 * torch.randn_like(y) + 1000,
    "around zero": lambda y: 300 * torch.randn_like(y),
    # of which float16 can hold the weight's gradient
    "ones": torch.ones_like,
}


def compare_norms(name, shape, rows, gradients, weighted, dtype=torch.float32, num_rows=16):
    numel = torch.Size(shape).numel()

    def make():
        x = ROWS[rows](torch.randn(num_rows, numel, dtype=torch.float64))
        x = x.view(num_rows, *shape).to(DEVICE, dtype).requires_grad_()
        # of one sign: no sum is near zero by chance
        weight = (torch.rand(shape) + 0.5).to(DEVICE, dtype).requires_grad_() if weighted else None
        return (x, torch.zeros_like(x), weight) if name.startswith("add") else (x, weight)

    def call(module, *tensors):
        *inputs, weight = tensors
        found = getattr(module, name)(*inputs, shape, weight)
        return found[0] if name.startswith("add") else found

    compare(partial(call, functional), partial(call, reference), make, GRADIENTS[gradients])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NORMS)
def test_norms_keep_eagers_digits(name, rows):
    with forced_path("aten"):
        for n, (index, gradients) in product((45, 1023, 16384), enumerate(GRADIENTS)):
            compare_norms(name, (n,), rows, gradients, (n + index) % 2 == 0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NORMS[:2])
def test_kernels_keep_eagers_digits(name, rows):
    """Short rows with an incoming gradient, rows of several blocks with another."""
    for index, n in enumerate((1023, MAX_BLOCK + 7)):
        gradients = [*GRADIENTS][(2 * list(ROWS).index(rows) + index) % len(GRADIENTS)]
        compare_norms(name, (n,), rows, gradients, True, num_rows=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("rows", ["around zero", "outlier"])
@pytest.mark.parametrize("shape", [(64, 56, 56), (3, 66_821)], ids=str)
@pytest.mark.parametrize("name", NORMS[:2])
def test_norms_over_images_keep_eagers_digits(name, shape, rows, dtype):
    with forced_path("aten"):
        compare_norms(name, shape, rows, "ones", True, dtype, num_rows=2)


@pytest.mark.parametrize("name", NORMS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_weights_sum_many_rows(name, dtype):
    with forced_path("aten"):
        compare_norms(name, (260,), "around 3", "equal", True, dtype, num_rows=1 << 13)
