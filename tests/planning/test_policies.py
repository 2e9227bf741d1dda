"""Plans by rule."""

import random
from dataclasses import replace

import pytest
from random_chains import random_chain

from fusedckpt.planning.chain import Chain, Keep, Level, Segment, Unit, simulate
from fusedckpt.planning.policies import policy


def test_policies_cover_the_chain():
    chain = random_chain(random.Random(10), 17)
    chain = replace(chain, units=tuple(replace(unit, fixed=False) for unit in chain.units))
    count = {"none": 17, "all": 17, "uniform:1": 1, "uniform:5": 5, "uniform:17": 17}
    for name, expected in count.items():
        items = policy(chain, name)
        simulate(chain, items)
        assert len(items) == expected
        assert all(isinstance(item, Keep) == (name == "none") for item in items)
    lengths = [item.stop - item.start for item in policy(chain, "uniform:5")]
    assert sorted(lengths) == [3, 3, 3, 4, 4]


def test_policies_keep_fixed_units():
    chain = random_chain(random.Random(10), 9)
    fixed = {0, 4, 8}
    units = [replace(unit, fixed=i in fixed) for i, unit in enumerate(chain.units)]
    chain = replace(chain, units=tuple(units))
    starts = {"none": range(9), "all": range(9), "uniform:1": (0, 1, 4, 5, 8)}
    for name, expected in starts.items():
        items = policy(chain, name)
        simulate(chain, items)
        assert [item.start for item in items] == list(expected)
    with pytest.raises(ValueError, match="uniform:1 to 6"):
        policy(chain, "uniform:7")


def test_recursive_halves_halves_between_fixed_units():
    unit = Unit("a", (Level("plain", 1, 0.0, 1),), 1.0, 1, 1)
    units = [replace(unit, name=f"u{i}", fixed=i in (0, 5, 7)) for i in range(8)]
    pair = Segment(1, ("plain",) * 2, (Segment(1, ("plain",)), Keep(2, "plain")))
    assert policy(Chain(tuple(units)), "recursive") == (
        Keep(0, "plain"), pair, Segment(3, ("plain",)), Segment(4, ("plain",)),
        Keep(5, "plain"), Segment(6, ("plain",)), Keep(7, "plain"),
    )  # fmt: skip
    # nine inputs and a gradient, and as many reruns as `checkpoint_sequential` takes
    units = tuple(replace(unit, name=f"u{i}") for i in range(256))
    outcome = simulate(Chain(units), policy(Chain(units), "recursive"))
    assert outcome.peak == 10
    assert outcome.extra == 256 * 8 / 2 + 1


def test_segments_that_do_not_fit_their_own_are_refused():
    unit = Unit("a", (Level("plain", 1, 0.0, 1), Level("other", 1, 0.0, 1)), 1.0, 1, 1)
    chain = Chain(tuple(replace(unit, name=f"u{i}") for i in range(3)))
    inner = Segment(0, ("plain",) * 2), Keep(2, "plain")
    simulate(chain, [Segment(0, ("plain",) * 3, inner)])
    for wrong in (inner[:1], inner[1:], (*inner, Keep(3, "plain")), (inner[0], Keep(2, "other"))):
        with pytest.raises(ValueError, match=r"^simulate: "):
            simulate(chain, [Segment(0, ("plain",) * 3, wrong)])


def test_sqrt_balances_bytes():
    kept = [1] * 12 + [12] * 4
    units = [Unit(f"u{i}", (Level("plain", k, 0, 0),), 1, 1, 1) for i, k in enumerate(kept)]
    items = policy(Chain(tuple(units)), "sqrt")
    sizes = [sum(kept[item.start : item.stop]) for item in items]
    assert len(items) <= 4
    # 60 bytes in four segments, of which single units take 12
    assert max(sizes) == 24
