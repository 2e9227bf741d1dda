"""Count instructions and bytes of each compiled kernel, without a GPU.

    python -m tests.kernels.model_table [--arch sm_90]

Kernels are compiled for a chip by name, at every size of bench/cases.py, and their instructions
counted for a multiprocessor: see model.py.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable

from bench.tables import show, significant
from tests.kernels import compile_only
from tests.kernels.model import CHIPS, Model, model

LAUNCHES = "tests.kernels.launches", "benchmarked"


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


def main(argv: list[str]) -> int:
    """Print a table of GEMMs and one of all other kernels; returns 1 where one does not compile."""
    parser = ArgumentParser(prog="python -m tests.kernels.model_table", description=__doc__)
    parser.add_argument("--arch", help="the chip", default="sm_90", choices=CHIPS)
    arch = parser.parse_args(argv).arch
    records = compile_only.compile_all(*LAUNCHES, (arch,))
    chip = CHIPS[arch]
    print(
        f"{arch}, {chip.name} on paper: {chip.units} multiprocessors, {chip.matmul:g} "
        f"TFLOP/s and {chip.copy} TB/s,\nwhich takes {chip.in_flight / 1024:.0f} KB in flight in "
        f"each, and lets threads issue {chip.issued:.1f} instructions per byte\n"
    )
    rows: dict[bool, list[Model]] = {False: [], True: []}
    for record in records:
        if not record.error:
            rows[bool(record.loop[-1])].append(model(record))
    show("kernels over rows and elements", OTHERS, sorted(rows[False]))
    show("GEMMs: bytes of the epilogue, its time of the loop's", GEMMS, sorted(rows[True]))
    problems = [problem for record in records for problem in compile_only.check(record)]
    for problem in problems:
        print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
