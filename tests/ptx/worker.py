"""Runs cases in a process in which Triton compiles: in that of the tests kernels are interpreted.

Reads a request per line, the arguments of one of REQUESTS as JSON, and prints an answer per line:

    echo '["case", {"arch": "sm_90", "name": "gate/silu-bf16-apart"}]' | python -m tests.ptx.worker
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch

from tests.ptx import coverage, mutants
from tests.ptx.emulator import Hostility
from tests.ptx.emulator.launching import Emulator, cpu_seconds
from tests.ptx.judging import judge
from tests.ptx.table import cases_of

ORDERS: dict[str, Callable[[int], Any]] = {
    "up": range,
    "down": lambda count: range(count - 1, -1, -1),
    "random": lambda count: np.random.default_rng(count).permutation(count),
}


def hostility(mode: str = "blocks", order: str = "up", copies: str = "late") -> Hostility:
    """Return how a run is: by warps with races checked, or all warps of some blocks in step."""
    by_warp = mode == "warps"
    return Hostility(by_warp, ORDERS[order], races=by_warp, early=copies == "early")


def run_case(arch: str, name: str, **how: str) -> dict[str, Any]:
    """Run a case; return the ratio of errors, the problem if any, CPU seconds and launches."""
    emulator, before, ratio = Emulator(arch, hostility(**how)), cpu_seconds(), None
    torch.manual_seed(0)
    try:
        with emulator.launches():
            ratio, problem = judge(cases_of(arch)[name].compute())
    except Exception:
        problem = traceback.format_exc()
    return {
        "ratio": ratio,
        "problem": problem,
        "seconds": cpu_seconds() - before,
        "emulated": sum(ran.seconds for ran in emulator.ran),
        "launches": Counter(ran.kernel for ran in emulator.ran),
    }


def not_run(arch: str) -> list[str]:
    """Return the kernels that the compile guard has for a chip and that no case launches."""
    names = cases_of(arch)
    return coverage.not_run(arch, [names[n] for n in names if not n.startswith("contract")])


REQUESTS: dict[str, Callable[..., Any]] = {
    "case": run_case,
    "not_run": not_run,
    "orders": mutants.orders,
    "mutant": mutants.outcome,
    "repeatable": mutants.is_repeatable,
}


def main() -> None:
    """Answer requests until there are none."""
    torch.set_num_threads(1)
    # bound instructions are many small objects that live on
    gc.freeze()
    gc.set_threshold(50_000, 10, 100)
    # what a kernel leaves unwritten is NaN
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    for line in sys.stdin:
        request, arguments = json.loads(line)
        # standard output is for the answers alone
        with redirect_stdout(sys.stderr):
            answer = REQUESTS[request](**arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
