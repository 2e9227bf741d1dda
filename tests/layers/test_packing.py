"""Gate and up in one tensor: every order of rows, there and back, and gated_mlp on it."""

from itertools import product

import pytest
import torch
from support import randn

from fusedckpt.functional import gated_mlp
from fusedckpt.layers.packing import LAYOUTS, pack_gate_up, repack_gate_up, unpack_gate_up

F, D = 6, 5


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def test_what_the_layouts_mean():
    gate, up = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    packed = {layout: pack_gate_up(gate, up, layout).tolist() for layout in LAYOUTS}
    assert packed == {
        "gate_up": [1, 2, 3, 4, 5, 6],
        "up_gate": [4, 5, 6, 1, 2, 3],
        "interleaved": [1, 4, 2, 5, 3, 6],
    }


@pytest.mark.parametrize("shape", [(2 * F, D), (2 * F,), (0, D)])
@pytest.mark.parametrize(("layout", "to"), list(product(LAYOUTS, LAYOUTS)))
def test_there_and_back(layout, to, shape):
    packed = numbered(*shape)
    there = repack_gate_up(packed, layout, to)
    assert there.data_ptr() != packed.data_ptr() or not packed.numel()
    assert torch.equal(repack_gate_up(there, to, layout), packed)
    assert (layout == to) == torch.equal(there, packed) or not packed.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpack_undoes_pack_in_any_dimension(layout):
    gate, up = numbered(3, D, F), -1 - numbered(3, D, F)
    for dim in (-1, 1, 0):
        packed = pack_gate_up(gate, up, layout, dim)
        moved = pack_gate_up(gate.movedim(dim, 0), up.movedim(dim, 0), layout)
        assert torch.equal(packed.movedim(dim, 0), moved)
        halves = unpack_gate_up(packed, layout, dim)
        assert torch.equal(halves[0], gate)
        assert torch.equal(halves[1], up)
        assert all(half.untyped_storage().data_ptr() == packed.data_ptr() for half in halves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gated_mlp_reads_what_was_repacked(layout):
    x, gate, up, down = (randn(*s, dtype=torch.float64) for s in ((9, D), (F, D), (F, D), (D, F)))
    gate_bias, up_bias = randn(F, dtype=torch.float64), randn(F, dtype=torch.float64)
    weight, bias = pack_gate_up(gate, up, layout), pack_gate_up(gate_bias, up_bias, layout)
    given = (x, gate, up, down, gate_bias, up_bias)
    expected = gated_mlp(x, gate, up, down, gate_bias=gate_bias, up_bias=up_bias)
    found = gated_mlp(
        x, repack_gate_up(weight, layout), None, down, gate_bias=repack_gate_up(bias, layout)
    )
    torch.testing.assert_close(found, expected)
    # through the rows' order too
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), given)
    )
