"""Binds the operands of an instruction to the registers of the lanes that execute it.

A bound instruction is a call on a mask, an array of booleans or None for all lanes. It returns None
to go on, or the signal that ends a unit's turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .floats import TYPES
from .memory import Fault
from .parser import Instruction

Array = np.ndarray
Call = Callable[[Any], Any]
# signals: at a barrier, at the end, waiting for a copy
BARRIER, EXIT, SPIN = -1, -2, -3
_ADDRESS = re.compile(r"\[\s*([%\w$@.]+)\s*(?:\+\s*(-?\w+))?\s*\]")


@cache
def constant(text: str, dtype: np.dtype) -> Any:
    """Return the number that a literal means in a dtype."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        bits = np.array(int(text[2:], 16), np.uint32)
        return bits.view(dtype)[()] if dtype.itemsize == 4 else bits.view(np.float32).astype(dtype)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return np.array(int(text[2:], 16), np.uint64).view(dtype)[()]
    value = int(text.rstrip("U"), 0)
    if dtype.kind == "b":
        return bool(value)
    bits = np.array(value & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}")
    return bits.view(dtype)[()]


@cache
def kinds_in(name: str) -> list[str]:
    """Return the types in the name of an instruction, in order."""
    return [word for word in name.split(".")[1:] if word in TYPES]


class Binding:
    """One instruction and the unit of lanes that executes it."""

    def __init__(self, instruction: Instruction, unit: Any):
        self.instruction, self.unit, self.text = instruction, unit, instruction.text
        self.operands, self.has = instruction.operands, instruction.has
        # the types in the name; the last one is the operands'
        self.kinds = kinds_in(instruction.name)
        self.kind = self.kinds[-1] if self.kinds else "b32"
        self.every = unit.every

    def source(self, text: str, kind: str) -> Any:
        """Return a live view of a register, or a number."""
        dtype = TYPES[kind]
        if text in self.unit.registers:
            register = self.unit.registers[text]
            return register if dtype.kind == "b" else register.view(dtype)
        if text.startswith("%"):
            return self.unit.special(text).view(dtype)
        # the only array in shared memory starts at 0
        return dtype.type(0) if text in self.unit.program.shared else constant(text, dtype)

    def place(self, text: str, kind: str) -> Array:
        """Return a live view of a register, in its own type if the kind has another width."""
        register, dtype = self.unit.registers[text], TYPES[kind]
        return register.view(dtype) if register.dtype.itemsize == dtype.itemsize else register

    def target(self, text: str, kind: str) -> Callable[[Any, Any], None]:
        """Return a function that writes a value to the lanes of a mask."""
        if text == "_":
            return lambda value, mask: None
        place = self.place(text, kind)

        def write(value: Any, mask: Any) -> None:
            if mask is None:
                place[...] = value
            else:
                np.copyto(place, value, where=mask, casting="unsafe")

        return write

    def registers_of(self, operand: Any) -> list[Any]:
        """Return the registers of an operand, a vector or not; None where it is "_"."""
        names = operand if isinstance(operand, tuple) else (operand,)
        return [None if name == "_" else self.unit.registers[name] for name in names]

    def lanes(self, mask: Any) -> Array:
        """Return the numbers of a mask's lanes."""
        return self.every if mask is None else np.nonzero(mask)[0]

    def index(self, mask: Any) -> Any:
        """Return an index of a mask's lanes: of all of them one that copies nothing."""
        return slice(None) if mask is None else np.nonzero(mask)[0]

    def check_warps(self, mask: Any) -> None:
        """Raise unless a mask's lanes are whole warps."""
        if mask is not None:
            warps = mask.reshape(-1, 32)
            if (warps.any(1) & ~warps.all(1)).any():
                raise Fault(f"{self.text}: a warp that has diverged")

    def whole_warps(self, mask: Any) -> Array:
        """Return the numbers of a mask's lanes, which must be whole warps."""
        self.check_warps(mask)
        return self.lanes(mask)

    def address(self, text: str) -> Callable[[Any], Array]:
        """Return a function from lanes to their addresses."""
        base, offset = address_parts(text)
        if base in self.unit.program.shared or base.isdigit():
            start = 0 if base in self.unit.program.shared else int(base)
            fixed = np.full(self.unit.lanes, start + offset, np.int64)
            return lambda lanes: fixed[lanes]
        register = self.unit.registers[base]
        return lambda lanes: register[lanes].astype(np.int64) + offset


@cache
def address_parts(text: str) -> tuple[str, int]:
    """Split `[base + offset]`."""
    parts = _ADDRESS.fullmatch(text)
    assert parts, text
    return parts[1], int(parts[2] or "0", 0)
