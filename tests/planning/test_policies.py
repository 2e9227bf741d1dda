"""Plans by rule."""

import random
from dataclasses import replace

import pytest
from random_chains import random_chain

from fusedckpt.planning.chain import Chain, Keep, Level, simulate
from fusedckpt.planning.policies import policy

AGAIN = Level("again", 0, 1.0, 1, 1)


def chain_of(count, fixed=()):
    """Return a chain whose units are joined but for fixed ones."""
    chain = random_chain(random.Random(10), count)
    units = [
        replace(
            unit,
            fixed="modifies its input" if i in fixed else "",
            again=None if i in fixed else AGAIN,
            joined=i > 0 and not {i - 1, i} & {*fixed},
        )
        for i, unit in enumerate(chain.units)
    ]
    return Chain(tuple(units), chain.base)


def test_policies_cover_the_chain():
    chain = chain_of(17)
    count = {"none": 17, "all": 17, "uniform:1": 1, "uniform:5": 5, "uniform:17": 17}
    for name, expected in count.items():
        items = policy(chain, name)
        simulate(chain, items)
        assert len(items) == expected
        assert all(isinstance(item, Keep) == (name == "none") for item in items)
    lengths = [item.stop - item.start for item in policy(chain, "uniform:5")]
    assert sorted(lengths) == [3, 3, 3, 4, 4]


def test_policies_keep_fixed_units():
    chain = chain_of(9, fixed={0, 4, 8})
    starts = {"none": range(9), "all": range(9), "uniform:1": (0, 1, 4, 5, 8)}
    for name, expected in starts.items():
        items = policy(chain, name)
        simulate(chain, items)
        assert [item.start for item in items] == list(expected)
    with pytest.raises(ValueError, match="uniform:1 to 6"):
        policy(chain, "uniform:7")


def test_units_that_cannot_be_joined_begin_a_segment():
    chain = chain_of(6)
    units = [replace(unit, joined=unit.joined and i != 3) for i, unit in enumerate(chain.units)]
    items = policy(Chain(tuple(units)), "uniform:1")
    assert [(item.start, item.stop) for item in items] == [(0, 3), (3, 6)]


def test_sqrt_balances_bytes():
    kept = [1] * 12 + [12] * 4
    chain = chain_of(16)
    units = [
        replace(unit, input=0, levels=(Level("plain", k, 0.0, 1, 1),))
        for unit, k in zip(chain.units, kept, strict=True)
    ]
    items = policy(Chain(tuple(units)), "sqrt")
    sizes = [sum(kept[item.start : item.stop]) for item in items]
    assert len(items) <= 4
    # 60 bytes in four segments, of which single units take 12
    assert max(sizes) == 24
