"""Every emulated case of a chip, by name."""

from __future__ import annotations

from functools import cache

from tests.ptx.contract_cases import contract_cases
from tests.ptx.expert_cases import expert_cases
from tests.ptx.judging import KernelCase
from tests.ptx.kernel_cases import element_cases, gated_norm_cases, head_cases, norm_cases
from tests.ptx.pointwise_cases import pointwise_cases
from tests.ptx.product_cases import product_cases

ARCHS = ("sm_80", "sm_90")


@cache
def cases_of(arch: str) -> dict[str, KernelCase]:
    """Return the cases of a chip."""
    kernels = [*element_cases(), *norm_cases(), *head_cases(), *expert_cases()]
    kernels += [*gated_norm_cases(), *pointwise_cases(), *product_cases(arch)]
    cases = [*kernels, *contract_cases(ARCHS.index(arch))]
    names = {case.name: case for case in cases}
    assert len(names) == len(cases), "two cases have one name"
    return names
