"""A bias that no gradient reads is not in autograd's custody: it may be written before backward."""

from functools import partial

import pytest
import torch
from cases import CASES as TABLE
from support import DEVICE, as_tuple, randn
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fusedckpt
from fusedckpt import NormSpec
from fusedckpt.functional import gated_mlp, linear_act, mlp, norm_linear

T, D, F = 3, 4, 5


def weight(*shape):
    return randn(*shape, dtype=torch.float64)


def linear(save, activation="gelu"):
    w, b = weight(F, D), weight(F)
    return lambda x: linear_act(x, w, b, activation, save=save), {"bias": b}


def plain(save):
    w1, b1, w2, b2 = weight(F, D), weight(F), weight(D, F), weight(D)
    norm = NormSpec("layer", weight(D), weight(D))
    biases = {"norm": norm.bias, "first": b1, "last": b2}
    return lambda x: mlp(x, w1, b1, w2, b2, norm=norm, save=save), biases


def gated(save):
    weights = weight(F, D), weight(F, D), weight(D, F)
    names = ("gate_bias", "up_bias", "down_bias")
    biases = {name: weight(n) for name, n in zip(names, (F, F, D), strict=True)}
    return lambda x: gated_mlp(x, *weights, **biases, save=save), biases


def projections():
    norm, weights = NormSpec("layer", weight(D), weight(D)), [weight(F, D), weight(2, D)]
    biases = {"first": weight(F), "second": weight(2)}
    given = list(biases.values())
    return lambda x: torch.cat(norm_linear(x, norm, weights, given), -1), biases


def last_shape(case):
    return case.shapes((T,), D, F)[-1] or ()


# what may be written before backward, and before one that is differentiated again
CASES = {
    "linear": (lambda: linear("inputs"), [], []),
    "linear-preact": (lambda: linear("preact"), ["bias"], []),
    "linear-identity": (lambda: linear("inputs", "identity"), ["bias"], ["bias"]),
    "mlp": (lambda: plain("inputs"), ["last"], ["last"]),
    "mlp-preact": (lambda: plain("preact"), ["first", "last"], ["last"]),
    "gated": (lambda: gated("inputs"), ["down_bias"], ["down_bias"]),
    "gated-gate": (lambda: gated("gate"), ["gate_bias", "down_bias"], ["down_bias"]),
    "gated-preact": (
        lambda: gated("preact"),
        ["gate_bias", "up_bias", "down_bias"],
        ["down_bias"],
    ),
    "norm_linear": (projections, ["first", "second"], ["first", "second"]),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(("make", "free", "freer"), CASES.values(), ids=list(CASES))
def test_written_before_backward(make, free, freer, create_graph):
    call, biases = make()
    x = weight(T, D)
    wanted = [x, *biases.values()]
    expected = torch.autograd.grad(call(x).sum(), wanted)
    for name, bias in biases.items():
        y = call(x)
        with torch.no_grad():
            bias.add_(0.0)
        if name in (freer if create_graph else free):
            found = torch.autograd.grad(y.sum(), wanted, create_graph=create_graph)
            torch.testing.assert_close(found, expected)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(y.sum(), wanted, create_graph=create_graph)


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_an_unread_bias_has_second_derivatives(save):
    block = fusedckpt.Linear(D, F, activation="silu", save=save).to(DEVICE, torch.float64)
    eager = nn.Sequential(nn.Linear(D, F), nn.SiLU()).to(DEVICE, torch.float64)
    eager[0].load_state_dict(block.state_dict())
    x = weight(T, D)
    found = []
    for module, bias in ((block, block.bias), (eager, eager[0].bias)):
        (grad,) = torch.autograd.grad(module(x).sum(), bias, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), bias))
    torch.testing.assert_close(*found)


CHECKPOINTS = {
    "torch's": partial(torch_checkpoint, use_reentrant=False),
    "ours": fusedckpt.checkpoint,
}
BIASED = [case for case in TABLE if "preact" not in case.name and len(last_shape(case)) == 1]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=list(CHECKPOINTS))
@pytest.mark.parametrize("case", BIASED, ids=lambda case: case.name)
def test_the_last_vector_alone_is_trained_inside_a_checkpoint(case, checkpoint):
    """Nothing may be left to keep."""
    mask = [False] * (len(case.shapes((T,), D, F)) - 1) + [True]
    inputs = case.inputs((T,), D, F, torch.float64, tuple(mask))
    found = []
    for fn in (partial(checkpoint, case.fused), case.eager):
        total = sum(y.sin().sum() for y in as_tuple(fn(*inputs)) if y.requires_grad)
        found.append(torch.autograd.grad(total, inputs[-1]))
    torch.testing.assert_close(*found)
