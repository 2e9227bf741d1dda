"""Kernels warp by warp, with races checked, and mutants: FUSEDCKPT_PTX=all has every one.

Else a few of each, others every day; FUSEDCKPT_PTX_DAY=739580 repeats a day's.
"""

import os
from collections.abc import Sequence
from datetime import date

import pytest

triton = pytest.importorskip("triton", reason="kernels need Triton")
from tests.ptx.table import ARCHS, cases_of  # noqa: E402  # needs Triton

RUNS_ALL = os.environ.get("FUSEDCKPT_PTX") == "all"
TURNS = 2
WARPS = (
    {"mode": "warps", "order": "down", "copies": "late"},
    {"mode": "warps", "order": "random", "copies": "early"},
)
MUTATED = [("sm_80", "gemm"), ("sm_80", "norm_grad"), ("sm_90", "gemm"), ("sm_90", "unaligned")]


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


@pytest.mark.skipif(not RUNS_ALL, reason="FUSEDCKPT_PTX=all runs them")
@pytest.mark.parametrize("how", WARPS, ids=lambda how: f"{how['order']}-{how['copies']}")
@pytest.mark.parametrize(("arch", "name"), [(a, n) for a in ARCHS for n in kernel_names(a)])
def test_every_kernel_warp_by_warp(ask, arch, name, how):
    check(ask, arch, name, how)


@pytest.mark.parametrize(("arch", "kernel"), MUTATED)
def test_every_kind_of_order_is_needed(ask, arch, kernel):
    """Without all barriers, or all waits or fences of a kind, a kernel is not right."""
    orders = ask("orders", arch=arch, kernel=kernel)
    kinds = {kind for _, kind in orders}
    assert "barrier" in kinds
    assert len(kinds) > 1
    for kind in sorted(kinds):
        numbers = [number for number, other in orders if other == kind]
        assert ask("mutant", arch=arch, kernel=kernel, numbers=numbers), f"{kind} is not missed"


def unnoticed(ask, arch: str, kernel: str, places: Sequence[int]) -> set[int]:
    """Return the places among instructions that order others without which nothing is wrong."""
    orders = ask("orders", arch=arch, kernel=kernel)
    return {
        place
        for place in places
        if ask("mutant", arch=arch, kernel=kernel, numbers=[orders[place][0]]) is None
    }
