"""Executes the PTX that Triton compiles, on a CPU, as hostilely as the programming model allows.

    emulator = Emulator("sm_90", Hostility(by_warp=True, races=True))
    with emulator.launches():
        kernel[grid](*cpu_tensors, ...)

`Emulator` is in `launching`, which needs Triton; everything else runs PTX from anywhere. `Fault` is
raised for what a sanitizer of a device would report, `UnknownInstruction` for an opcode or modifier
that is not executed.
"""

from .forms import UnknownInstruction
from .machine import Hostility, Param, run
from .memory import Fault
from .parser import Instruction, Program, parse, parse_instruction

__all__ = [
    "Fault",
    "Hostility",
    "Instruction",
    "Param",
    "Program",
    "UnknownInstruction",
    "parse",
    "parse_instruction",
    "run",
]
