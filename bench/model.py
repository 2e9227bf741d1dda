"""Count instructions and bytes of each compiled kernel, without a GPU.

Kernels are compiled for a chip by name, at every size of cases.py, and their instructions counted
for a multiprocessor: see tests/kernels/model.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bench.options import Options
from bench.tables import show, significant

if TYPE_CHECKING:
    from tests.kernels.model import Model

LAUNCHES = "tests.kernels.launches:benchmarked"


def options(add: Options) -> None:
    """Add the options."""
    add.one("arch", "the chip", "sm_90", choices=("sm_80", "sm_90", "sm_100"))


def prepare(chosen: Namespace) -> Namespace:
    """Check that there is a compiler. Raises ValueError without one."""
    if find_spec("triton") is None:
        raise ValueError("model compiles kernels, and there is no Triton here")
    return chosen


COLUMNS: dict[str, Callable[[Model], str]] = {
    "kernel": lambda row: row.kernel,
    "regs": lambda row: str(row.registers),
    "spills": lambda row: str(row.spills),
    "blocks": lambda row: str(row.blocks),
    "KB in\nflight": lambda row: f"{row.in_flight / 1024:.0f}",
    "bytes/\nelement": lambda row: f"{row.moved:.1f}",
    "least": lambda row: str(row.minimum),
}
OTHERS = COLUMNS | {
    "barriers/\nrow": lambda row: significant(row.barriers),
    "trips": lambda row: str(row.trips),
    "instr./\nelement": lambda row: f"{row.instructions:.1f}",
    "issue of\nmemory": lambda row: f"{row.share:.0%}",
}
GEMMS = COLUMNS | {
    "barriers/\nstep": lambda row: significant(row.barriers),
    "instr./\nelement": lambda row: f"{row.instructions:.1f}",
    "of main\nloop": lambda row: f"{row.share:.0%}",
}


def run(chosen: Namespace) -> int:
    """Print a table of GEMMs and one of all other kernels; returns 1 where one does not compile."""
    from tests.kernels.compile_only import check, compile_all
    from tests.kernels.model import CHIPS, model

    records = compile_all(LAUNCHES, (chosen.arch,))
    chip = CHIPS[chosen.arch]
    print(
        f"{chosen.arch}, {chip.name} on paper: {chip.units} multiprocessors, {chip.matmul:g} "
        f"TFLOP/s and {chip.copy} TB/s,\nwhich takes {chip.in_flight / 1024:.0f} KB in flight in "
        f"each, and lets threads issue {chip.issued:.1f} instructions per byte\n"
    )
    rows: dict[bool, list[Model]] = {False: [], True: []}
    for record in records:
        if not record.error:
            rows[bool(record.loop[-1])].append(model(record))
    show("kernels over rows and elements", OTHERS, sorted(rows[False]))
    show("GEMMs: bytes of the epilogue, its time of the loop's", GEMMS, sorted(rows[True]))
    problems = [problem for record in records for problem in check(record)]
    for problem in problems:
        print(problem)
    return int(bool(problems))
