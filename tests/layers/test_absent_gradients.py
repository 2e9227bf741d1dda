"""Gradients that eager does not have are None, and cost nothing."""

from itertools import product

import pytest
import torch
from cases import CASES
from support import DEVICE, as_tuple, flops, randn, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path

T, D = 5, 6
WIDTHS = (8, 4, 3)
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@pytest.fixture(params=NORMS)
def block(request):
    linears = [nn.Linear(D, n) for n in WIDTHS]
    made = fusedckpt.NormLinear(NORMS[request.param](D), *linears)
    return made.to(DEVICE, torch.float64)


def eager(block, x):
    n = block.norm(x)
    return [linear(n) for linear in block.linears]


USED = [used for used in product((False, True), repeat=3) if any(used)]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("used", USED, ids=str)
def test_of_a_linear_whose_result_nobody_used(block, used, create_graph):
    x = randn(T, D, dtype=torch.float64)
    wanted = [x, *block.parameters()]

    def gradients(ys):
        total = sum(y.sin().sum() for y, use in zip(ys, used, strict=True) if use)
        return torch.autograd.grad(total, wanted, create_graph=create_graph, allow_unused=True)

    ours, theirs = gradients(block(x)), gradients(eager(block, x))
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("used", USED, ids=str)
def test_no_gemm_for_what_nobody_used(block, used):
    x = randn(T, D, dtype=torch.float64)
    ys = block(x)
    total = sum(y.sum() for y, use in zip(ys, used, strict=True) if use)
    width = sum(n for n, use in zip(WIDTHS, used, strict=True) if use)
    assert flops(total.backward) == 2 * 2 * T * D * width


def test_an_optimizer_leaves_it_alone(block):
    before = block.linears[1].weight.detach().clone()
    optimizer = torch.optim.AdamW(block.parameters(), 0.1, weight_decay=0.5)
    first, _, last = block(randn(T, D, dtype=torch.float64))
    (first.sum() + last.sum()).backward()
    optimizer.step()
    assert torch.equal(block.linears[1].weight, before)


class Cut(torch.autograd.Function):
    """Its inputs, for which it has no gradients."""

    @staticmethod
    def forward(ctx, *xs):
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(ctx, *grads):
        return (None,) * len(grads)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_of_a_result_without_gradient(case, create_graph):
    inputs = case.inputs((3,), 4, 5)
    leaves = [x for x in inputs if x is not None]
    with forced_path("aten"):
        total = sum(y.sum() for y in Cut.apply(*as_tuple(case.fused(*inputs))))
        assert flops(lambda: total.backward(create_graph=create_graph)) == 0
    assert all(leaf.grad is None for leaf in leaves)


def test_a_frozen_linear_beside_a_trained_one(block):
    block.norm.requires_grad_(False)
    block.linears[1].requires_grad_(False)
    ys = block(randn(T, D, dtype=torch.float64, requires_grad=False))
    assert [y.requires_grad for y in ys] == [True, False, True]


def test_a_computed_weight_that_no_gradient_reads_is_not_kept():
    x, weights = randn(T, D, requires_grad=False), [randn(n, D) for n in WIDTHS]
    norm = fusedckpt.NormSpec("rms")
    found = saved_bytes(lambda x, *w: fusedckpt.functional.norm_linear(x, norm, w), [x, *weights])
    assert found == x.nbytes


def test_gradients_of_biases_alone_read_nothing():
    norm, weights = fusedckpt.NormSpec("rms"), [randn(n, D, requires_grad=False) for n in WIDTHS]
    inputs = [randn(T, D, requires_grad=False), *(randn(n) for n in WIDTHS)]
    call = fusedckpt.functional.norm_linear
    assert saved_bytes(lambda x, *b: call(x, norm, weights, b), inputs) == 0
