"""One owner for every job: the files that do a job, read from the calls that only it needs.

Another name for the same job hides it from `test_names.py`, not from here. A job with one file is
done: whoever needs it calls that file. A job with several lists the files that do it today: the
list may become shorter, and no file joins it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = {
    path.relative_to(ROOT / "fusedckpt").as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "fusedckpt").rglob("*.py")
    if "kernels" not in path.parts
}
# a job: the calls that do it, and the files that have them
JOBS: dict[str, tuple[str, set[str]]] = {
    "read or set a random state": (
        r"(get|set)_rng_state\(|\b(get|set)state\(|graphsafe_[gs]et_state|\.random\.get_state\(",
        # a plan makes generators draw extremes, to see all units run
        {"state/rng.py", "planning/skipped.py"},
    ),
    "read the slots of an object": (
        r'"__slots__" in|\.__slots__\b',
        {"state/holders.py"},
    ),
    "fill a container past the methods of its class": (
        r"\b(base|dict|list|set|deque)\.(clear|update|__setitem__|__iter__|items)\(\w+[,)]",
        {"state/holders.py"},
    ),
    "watch the calls of all modules": (
        r"register_module_(forward|full_backward)\w*hook\(",
        {
            *("checkpointing/determinism.py", "checkpointing/module_calls.py"),
            *("fusing/fuse_report.py", "fusing/mixers.py", "reporting/timeline.py"),
        },
    ),
    "set the class of a module": (
        r"module\.__class__ = ",
        {
            *("checkpointing/call_state.py", "fusing/first_step.py", "fusing/swap.py"),
            "planning/roles.py",
        },
    ),
    "walk the nodes of a graph": (
        r"in \w+\.next_functions\b",
        {
            *("autograd/backward.py", "blocks/shown.py", "checkpointing/calls.py"),
            *("checkpointing/prefetch.py", "fusing/fused_heads.py", "planning/graph.py"),
            *("planning/meter.py", "planning/repeated_blocks.py", "recipes/node_patterns.py"),
        },
    ),
    "compare tensors by bits or nearly": (
        r"torch\.(equal|allclose)\(|torch, \"hash_tensor\"",
        {
            *("checkpointing/determinism.py", "fusing/fused_heads.py", "fusing/experts.py"),
            *("fusing/mixers.py", "fusing/verification.py", "checkpointing/written_tensors.py"),
            *("state/rng.py", "state/tensors.py"),
        },
    ),
    "judge results by the error rule": (
        r"\bErrors\(",
        {"fusing/verification.py"},
    ),
    "decide how a call runs": (
        r"dispatch\.decide\((?!.*\.\.\.)\w",
        {"blocks/layer_function.py"},
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_no_other_file_does_the_job(job):
    pattern, owners = JOBS[job]
    files = {file for file, text in TEXTS.items() if re.search(pattern, text)}
    assert files == owners
