"""The terms of `bench predict --gemm`, of launches that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench import gemms
from bench.predict import CARDS, fit

H100 = CARDS["H100"]


def fit_of(registers: int, programs: int, after: int = 4000, **changes: Any) -> gemms.Fit:
    """A GEMM of 128 x 256 x 64 tiles and 64 steps, of 100 instructions each."""
    body = (100, 2, 0, 0, 0, 2, 0, 20, after, 0, 0)
    metadata = SimpleNamespace(num_stages=3, body=body)
    launch: Any = SimpleNamespace(
        arguments={"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64},
        kernel=SimpleNamespace(metadata=metadata),
        registers=registers,
        shared=90 << 10,
        num_warps=8,
        programs=programs,
    )
    values = {"card": H100, "name": "act", "size": 4096, "steps": 64, "used": 1.0, "needed": 0.9}
    return gemms.Fit(launch=launch, **(values | changes))


def test_bytes_in_flight_and_waves():
    alone, pair = fit_of(200, 132 * 3), fit_of(128, 132 * 3)
    assert (alone.together, pair.together) == (1, 2)
    # two stages ahead of the one in use, of 128 + 256 rows of 64 values
    assert (alone.in_flight, pair.in_flight) == (2 * 384 * 128, 4 * 384 * 128)
    assert (alone.waves, pair.waves) == (3.0, 1.5)
    assert (alone.busy, pair.busy) == (1.0, 0.75)
    assert fit_of(200, 132 * 3, used=0.5).waves == 1.5


def test_the_longest_clock_binds_a_step():
    step = fit_of(200, 132).step()
    assert step["tensor"] == 128 * 256 * 64 / 2048
    assert step["issue"] == 100 * 8 / 4
    assert step["L2"] == 384 * 128 / (5120 / 132)


def test_a_tile_alone_on_a_multiprocessor_waits_for_its_epilogue():
    alone, pair = fit_of(200, 132 * 4), fit_of(128, 132 * 4)
    main = 64 * max(alone.step().values())
    beside = 4000 * 8 / 4 + 650 * H100.clock
    tensor = 64 * alone.step()["tensor"]
    assert alone.most() == pytest.approx(tensor / (main + beside))
    assert pair.most() == pytest.approx(tensor / main)
    # an epilogue longer than the main loop is not hidden
    assert fit_of(128, 132 * 4, after=100_000).most() < tensor / main


def test_fusing_pays_later_where_the_contraction_is_long():
    shares = [gemms.least_share(H100, k, 4) for k in gemms.WIDTHS]
    assert shares == sorted(shares)
    vendor = 2 * 768 / gemms.RATES["H100"].gemm
    assert shares[0] == pytest.approx(vendor / (vendor + 4 * fit("sm_90")[1]))


def test_every_share_of_speed_is_called_predicted():
    assert "predicted share\nof vendor, at most" in gemms.GEMMS
    assert not [head for head in gemms.GEMMS if "us" in head.split()]
