"""Kernels of cheap functions by the error rule: interpreted on a CPU, for real on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from fusedckpt.kernels.pointwise import is_channels_last, operand_places_of
from tests.ptx.judging import judge
from tests.ptx.pointwise_cases import pointwise_cases

CASES = {case.name: case for case in pointwise_cases()}


@pytest.mark.parametrize("name", CASES)
def test_a_chain_obeys_the_error_rule(name):
    _, problem = judge(CASES[name].compute())
    assert problem is None


@pytest.mark.parametrize(
    ("size", "gate"),
    [
        ((2, 5, 7), (2, 1, 7)),
        ((2, 5, 7), (7,)),
        ((2, 5, 7), (2, 1, 1)),
        ((2, 5, 7), ()),
        ((2, 5, 7), (5, 1)),
        ((2, 5, 7), (5, 7)),
        ((2, 5, 3, 7), (2, 5, 1, 1)),
        ((1, 5, 7), (1, 5, 7)),
        ((6,), (6,)),
    ],
)
def test_a_gate_lies_where_broadcasting_says(size, gate):
    like = torch.zeros(size)
    values = torch.arange(1.0, 1 + torch.Size(gate).numel()).view(gate)
    place = operand_places_of(values, like)
    assert place is not None
    i = torch.arange(like.numel())
    addressed = values.flatten()[i // place.span * place.stride + i // place.step % place.width]
    assert torch.equal(addressed, values.expand(size).flatten())


def test_other_gates_are_refused():
    like = torch.zeros(2, 5, 3, 7)
    for gate in (torch.zeros(5, 1, 7), torch.zeros(7, 3).t(), torch.zeros(4, 7)):
        assert operand_places_of(gate, like) is None
    assert operand_places_of(torch.zeros(7), like.transpose(1, 2)) is None
    assert operand_places_of(torch.zeros(7), like[:0]) is None
    assert is_channels_last(like.contiguous(memory_format=torch.channels_last))
    assert not is_channels_last(like)
    assert not is_channels_last(like.transpose(2, 3))
