"""Nodes tell the functions of their calls, and options that tell these from others."""

from __future__ import annotations

from operator import methodcaller

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn

from fusedckpt.autograd import private_nodes
from fusedckpt.autograd.private_nodes import (
    ATTENTION_INPUTS,
    is_attention,
    is_view,
    operation_of,
    option_reader,
    saved_by,
    view_of_node,
)

VECTOR = torch.linspace(1, 2, 6)
MATRIX = torch.linspace(-1, 1, 36).view(6, 6)


def linear(alpha=1):
    def call(x):
        bias = VECTOR.to(x).requires_grad_()
        return torch.addmm(bias, x[0], MATRIX.to(x).requires_grad_(), beta=alpha)

    return call


# pairs of calls on [4, 6, 6] whose nodes have one class and other options; None: no other options
CALLS = {
    "view": (lambda x: x.view(8, 18), lambda x: x.view(18, 8)),
    "reshape of others": (lambda x: x.mT.reshape(8, 18), lambda x: x.mT.reshape(18, 8)),
    "unsqueeze": (lambda x: x.unsqueeze(1), lambda x: x.unsqueeze(-1)),
    "squeeze": (lambda x: x[:1].squeeze(0), lambda x: x[:, :1].squeeze(1)),
    "expand": (lambda x: x[:, :1].expand(-1, 3, -1), lambda x: x[:, :1].expand(-1, 5, -1)),
    "transpose": (lambda x: x.transpose(0, 1), lambda x: x.transpose(-1, -2)),
    "t": (lambda x: x[0].t(), None),
    "permute": (lambda x: x.permute(2, 0, 1), lambda x: x.permute(1, 2, 0)),
    "slice": (lambda x: x[..., 1:], lambda x: x[..., :-1]),
    "slice of rows": (lambda x: x[1:3], lambda x: x[0:2]),
    "slice with steps": (lambda x: x[:, ::2], lambda x: x[:, ::3]),
    "slice from behind": (lambda x: x[:, -2:], lambda x: x[:, -3:]),
    "narrow": (lambda x: x.narrow(-1, 1, 2), lambda x: x.narrow(-1, 2, 2)),
    "select": (lambda x: x[:, 1], lambda x: x[:, -1]),
    "split": (lambda x: x.split(2, 1)[1], lambda x: x.split(3, 1)[1]),
    "split, the last": (lambda x: x.split(4, 2)[1], lambda x: x.split(5, 2)[1]),
    "split by sizes": (lambda x: x.split([1, 2, 3], -1)[2], lambda x: x.split([3, 2, 1], -1)[2]),
    "chunk": (lambda x: x.chunk(2, -1)[0], lambda x: x.chunk(3, -1)[0]),
    "unbind": (lambda x: x.unbind(0)[2], lambda x: x.unbind(1)[2]),
    "view_as_real": (lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 18, 2))), None),
    "clone": (lambda x: x.mT.clone(), None),
    "contiguous": (lambda x: x.mT.contiguous(), None),
    "cast": (lambda x: x.to(torch.bfloat16), lambda x: x.to(torch.float16)),
    "cat": (lambda x: torch.cat((x, -x), 0), lambda x: torch.cat((x, -x), 1)),
    "stack": (lambda x: torch.stack((x, -x), 0), lambda x: torch.stack((x, -x), 1)),
    "neg": (torch.neg, None),
    "mul": (lambda x: x * VECTOR.to(x), None),
    "mul by a number": (lambda x: x * 1.5, None),
    "mul by itself": (lambda x: x * x, None),
    "div": (lambda x: x / VECTOR.to(x), None),
    "number divided": (lambda x: (x + VECTOR.to(x).requires_grad_()) / 3, None),
    "add": (lambda x: x + x.flip(0) * 0 + VECTOR.to(x).requires_grad_(), None),
    "sub": (lambda x: x - VECTOR.to(x).requires_grad_(), None),
    "mm": (lambda x: x[0] @ MATRIX.to(x).requires_grad_(), None),
    "addmm": (linear(), None),
}
# calls that nodes do not tell, or that are others than their classes say
UNTOLD = {
    "add with a factor": lambda x: torch.add(x, x, alpha=2),
    "sub with a factor": lambda x: torch.sub(x, x, alpha=2),
    "addmm with a factor": linear(2),
    "div with rounding": lambda x: torch.div(x, VECTOR.to(x), rounding_mode="floor"),
    "tanh": torch.tanh,
}


def again(x, y):
    """Return the result of a node's function for the tensors that it read."""
    return result_of(operation_of(y.grad_fn, y.output_nr), y.grad_fn, x)


def result_of(operation, node, x):
    """Return the result of an operation that a node tells."""
    tensors = []
    for place, packed in enumerate(operation.sources):
        if packed is not None and packed.of(node).data is not None:
            tensors.append(packed.tensor(node))
        else:
            tensors.append(value_of(*node.next_functions[place], x))
    return operation.function(*tensors)


def value_of(node, number, x):
    """Return a result of a node that functions made of x, or of a leaf."""
    if node is x.grad_fn:
        return x
    if hasattr(node, "variable"):
        return node.variable
    operation = operation_of(node, number)
    return x.flip(0) if operation is None else result_of(operation, node, x)


@pytest.mark.parametrize("name", CALLS)
def test_functions_and_options(name):
    call, other = CALLS[name]
    x = randn(4, 6, 6).requires_grad_() * 1
    y = call(x)
    torch.testing.assert_close(again(x, y), y, rtol=0, atol=0)
    kind = type(y.grad_fn)
    read = option_reader(kind)
    if other is None:
        return
    z = other(x)
    assert type(z.grad_fn) is kind
    torch.testing.assert_close(again(x, z), z, rtol=0, atol=0)
    # by these a pattern knows that another function was called
    assert read(y.grad_fn) != read(z.grad_fn)
    assert read(y.grad_fn) == read(call(x).grad_fn)


@pytest.mark.parametrize("name", UNTOLD)
def test_functions_that_are_not_told(name):
    y = UNTOLD[name](randn(4, 6, 6).requires_grad_() * 1)
    assert operation_of(y.grad_fn, 0) is None


@pytest.mark.parametrize("function", [torch.add, torch.sub])
def test_options_of_functions_that_are_not_told(function):
    """A pattern of calls with another factor is no pattern of these."""
    x = randn(4, 6).requires_grad_() * 1
    once, twice = (function(x, x, alpha=alpha).grad_fn for alpha in (1, 2))
    read = option_reader(type(once))
    assert read(once) != read(twice)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


@pytest.mark.parametrize("function", [torch.sin, Squares.apply])
def test_saved_tensors_of_a_node_that_has_run(function):
    y = function(randn(3).requires_grad_() * 1)
    assert [x.shape for x in saved_by(y.grad_fn)] == [(3,)]
    y.sum().backward()
    assert not any(isinstance(x, torch.Tensor) for x in saved_by(y.grad_fn))


def test_views_and_attention():
    x = randn(2, 3, 8, 4).requires_grad_() * 1
    base = randn(2, 3, 8, 4)
    for view in (methodcaller("transpose", 1, 2), methodcaller("split", 3, 2), torch.neg):
        y = view(x)
        y = y[1] if isinstance(y, tuple) else y
        found = view_of_node(y.grad_fn, y.output_nr)
        assert is_view(type(y.grad_fn)) == (found is not None) == (view is not torch.neg)
        if found is not None:
            expected = view(base)
            expected = expected[1] if isinstance(expected, tuple) else expected
            assert torch.equal(found(base), expected)
    y = F.scaled_dot_product_attention(x.float(), x.float() * 2, x.float() * 3)
    node = y.grad_fn
    while not is_attention(type(node)):
        ((node, _),) = node.next_functions
    query, key, value = (packed.tensor(node) for packed in ATTENTION_INPUTS)
    torch.testing.assert_close(key, query * 2)
    torch.testing.assert_close(value, query * 3)
    assert DEVICE.type == "cuda" or torch.equal(operation_of(node, 0).function(y), y)


def test_eps_of_a_group_norm_whose_node_lacks_it(monkeypatch):
    """Its layer tells the node; a node of another function is told nothing."""
    monkeypatch.setattr(private_nodes, "LACKS_EPS", True)
    x = randn(2, 6, 4).requires_grad_()
    norm, silu = F.group_norm(x, 2).grad_fn, F.silu(x).grad_fn
    assert private_nodes.options_of_norm(norm) == (2, None, True, None)
    layer = torch.nn.GroupNorm(2, 6, eps=0.25)
    for node in (norm, silu):
        private_nodes.tell_eps(node, layer)
    assert private_nodes.options_of_norm(norm) == (2, 0.25, True, None)
    assert not silu.metadata
