"""The shape of a kernel in NVIDIA's instructions: its loop, its loads, its waits.

Bytes are those that threads ask for, whether they come from memory or from a cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
LABEL = re.compile(r"^(\.L\w+):")
# read into registers, on its way to shared memory, and to global memory
READ, COPY, WRITE = r"LDG\b", r"(LDGSTS|UTMALDG)\b", r"(STG|ST)\b"
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class Body(NamedTuple):
    """A kernel's main loop, once around, or all of a kernel that has none; bytes per thread.

    depth: how many times around its copies are ahead; trips: waits for memory, one after another.
    """

    instructions: int = 0
    barriers: int = 0
    read: int = 0
    copied: int = 0
    written: int = 0
    depth: int = 0
    trips: int = 0
    # before the first load; and after the loop, where a GEMM's tile goes through its epilogue
    before: int = 0
    after: int = 0
    read_after: int = 0
    written_after: int = 0


def width(opcode: str) -> int:
    """Return how many bytes an access moves per thread."""
    return next((WIDTHS[part] for part in opcode.split(".") if part in WIDTHS), 4)


def loops(sass: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the opcodes of a kernel's listing, and the first and last of each jump back."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif found := INSTRUCTION.match(line):
            if found[1].startswith("BRA") and (target := re.search(r"\((\.L\w+)\)", found[2])):
                jumps.append((len(opcodes), target[1]))
            opcodes.append(found[1])
    return opcodes, [(labels[x], at + 1) for at, x in jumps if labels.get(x, at + 1) < at]


def body(sass: str) -> Body:
    """Read the listing of one kernel."""
    opcodes, spans = loops(sass)
    loads = [at for at, opcode in enumerate(opcodes) if re.match(f"{READ}|{COPY}", opcode)]
    spans = [(start, end) for start, end in spans if any(start <= at < end for at in loads)]
    # the wait for a tensor map's tile lies behind the kernel's end, and jumps back from there
    pick = min if any(opcode.startswith("UTMALDG") for opcode in opcodes) else max
    start, end = pick(spans, key=lambda span: span[1] - span[0], default=(0, len(opcodes)))
    inside = opcodes[start:end]
    return Body(
        sum(opcode != "NOP" for opcode in inside),
        sum(opcode.startswith("BAR.SYNC") for opcode in inside),
        moved(inside, READ),
        moved(inside, COPY),
        written=moved(inside, WRITE),
        depth=moved(opcodes[:start], COPY) // max(1, moved(inside, COPY)),
        trips=trips(inside),
        before=loads[0] if loads else 0,
        after=sum(opcode != "NOP" for opcode in opcodes[end:]),
        read_after=moved(opcodes[end:], READ),
        written_after=moved(opcodes[end:], WRITE),
    )


def moved(opcodes: Sequence[str], pattern: str) -> int:
    """Return how many bytes the accesses among these move per thread."""
    return sum(width(opcode) for opcode in opcodes if re.match(pattern, opcode))


def trips(opcodes: Sequence[str]) -> int:
    """Count groups of reads with barriers between them; copies are one, however many there are."""
    groups, waits = int(any(re.match(COPY, opcode) for opcode in opcodes)), True
    for opcode in opcodes:
        if re.match(READ, opcode):
            groups, waits = groups + waits, False
        waits = waits or opcode.startswith("BAR.SYNC")
    return groups
