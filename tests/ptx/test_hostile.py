"""Kernels warp by warp, with races checked, and mutants: FUSEDCKPT_PTX=all has every one.

Else a few of each, others every day; FUSEDCKPT_PTX_DAY=739580 repeats a day's.
"""

import os
from collections.abc import Sequence
from datetime import date

import pytest

pytest.importorskip("triton", reason="kernels need Triton")
import triton

from tests.ptx.table import ARCHS, cases_of

RUNS_ALL = os.environ.get("FUSEDCKPT_PTX") == "all"
TURNS = 2
WARPS = (
    {"mode": "warps", "order": "down", "copies": "late"},
    {"mode": "warps", "order": "random", "copies": "early"},
)
# the places, among the instructions that order others, of those that a kernel could do without: a
# barrier before anything is in shared memory, a wait for copies after the loop that read them, one
# between a thread's copies and its own reads, and on sm_90 barriers that double a wait which every
# warp makes. The kernels of norms have the same
# order on both chips: a chip has some, so that tests stay short
HARMLESS = {
    ("sm_80", "gemm"): {0, 4},
    ("sm_90", "gemm"): {0, 1, 2, 3, 4, 6, 10, 12},
    ("sm_90", "unaligned"): set(),
    ("sm_90", "norm_grad"): {0, 2, 8, 9},
    ("sm_80", "split_norm_grad"): {1, 7, 8, 9},
    ("sm_90", "warp_norm_grad"): {0, 2, 3, 4},
    ("sm_90", "gated_norm_grad"): {1, 2, 3},
    ("sm_80", "statistics"): set(),
}


def kernel_names(arch: str) -> list[str]:
    return [name for name in cases_of(arch) if not name.startswith("contract")]


def chosen(items: Sequence, turn: int):
    """Return a turn's item of a day."""
    day = int(os.environ.get("FUSEDCKPT_PTX_DAY", date.today().toordinal()))
    return items[(day + turn * (len(items) // TURNS)) % len(items)]


def check(ask, arch: str, name: str, how: dict[str, str]) -> None:
    problem = ask("case", arch=arch, name=name, **how)["problem"]
    assert problem is None, f"{name} on {arch}, {how}: {problem}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("turn", range(TURNS))
def test_a_few_kernels_warp_by_warp(ask, arch, turn):
    check(ask, arch, chosen(kernel_names(arch), turn), WARPS[turn])


@pytest.mark.parametrize("how", WARPS, ids=lambda how: f"{how['order']}-{how['copies']}")
@pytest.mark.parametrize(
    ("arch", "name"), [(a, n) for a in ARCHS for n in kernel_names(a) if RUNS_ALL]
)
def test_every_kernel_warp_by_warp(ask, arch, name, how):
    check(ask, arch, name, how)


@pytest.mark.parametrize(("arch", "kernel"), HARMLESS)
def test_every_kind_of_order_is_needed(ask, arch, kernel):
    """Without all barriers, or all waits or fences of a kind, a kernel is not right."""
    orders = ask("orders", arch=arch, kernel=kernel)
    kinds = {kind for _, kind in orders}
    assert "barrier" in kinds
    # statistics load into registers
    assert (len(kinds) > 1) == (kernel != "statistics")
    for kind in sorted(kinds):
        numbers = [number for number, other in orders if other == kind]
        assert ask("mutant", arch=arch, kernel=kernel, numbers=numbers), f"{kind} is not missed"


@pytest.mark.parametrize(("arch", "kernel"), HARMLESS)
def test_another_order_of_warps_and_copies_gives_the_same_bits(ask, arch, kernel):
    assert ask("repeatable", arch=arch, kernel=kernel)


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="another Triton orders otherwise")
@pytest.mark.parametrize(("arch", "kernel"), HARMLESS)
def test_an_order_alone_is_needed_or_known_to_be_harmless(ask, arch, kernel):
    orders = ask("orders", arch=arch, kernel=kernel)
    places = range(len(orders))
    chosen_places = places if RUNS_ALL else {chosen(places, turn) for turn in range(TURNS)}
    unnoticed = {
        place
        for place in chosen_places
        if ask("mutant", arch=arch, kernel=kernel, numbers=[orders[place][0]]) is None
    }
    assert unnoticed == HARMLESS[arch, kernel] & {*chosen_places}
