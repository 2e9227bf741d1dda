"""Binds an instruction: the table of opcodes, predicates and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import hopper, transfers, warps
from .arithmetic import bind_arithmetic, bind_cvt, bind_cvta, bind_mov, bind_setp
from .binding import EXIT, Binding, Call
from .forms import check_form
from .parser import Instruction
from .wgmma import bind_wgmma


def _bind_cp(b: Binding) -> Call:
    return hopper.bind_cp(b) if b.has("bulk") else transfers.bind_cp_async(b)


def _bind_fence(b: Binding) -> Call:
    """Pass what a warp has stored in shared memory to the async proxy.

    The fence of an mbarrier's initialization is for other blocks of a cluster: there are none.
    """
    unit = b.unit
    if not b.has("proxy"):
        return lambda mask: None

    def fence(mask: Any) -> None:
        lanes = b.lanes(mask)
        unit.launch.shared.fence(unit.block[lanes], unit.warp[lanes])

    return fence


# every other opcode of forms.FORMS is arithmetic
_BINDERS: dict[str, Callable[[Binding], Call]] = {
    "bar": warps.bind_bar, "cp": _bind_cp, "cvt": bind_cvt, "cvta": bind_cvta,
    "elect": warps.bind_elect, "fence": _bind_fence, "ld": transfers.bind_ld,
    "ldmatrix": warps.bind_ldmatrix, "mbarrier": hopper.bind_mbarrier, "mma": warps.bind_mma,
    "mov": bind_mov, "redux": warps.bind_redux, "setp": bind_setp, "shfl": warps.bind_shfl,
    "st": transfers.bind_st, "stmatrix": warps.bind_stmatrix, "wgmma": bind_wgmma,
}  # fmt: skip


def bind(instruction: Instruction, unit: Any) -> Call:
    """Bind an instruction to the registers of a unit; raise by name what is not known."""
    check_form(instruction)
    if instruction.opcode in ("bra", "ret", "exit"):
        return _branch(instruction, unit)
    call = _BINDERS.get(instruction.opcode, bind_arithmetic)(Binding(instruction, unit))
    if instruction.predicate is None:
        return call
    holds, negated = unit.registers[instruction.predicate], instruction.negated

    def guarded(mask: Any) -> Any:
        inside = ~holds if negated else holds
        inside = inside if mask is None else inside & mask
        count = np.count_nonzero(inside)
        if count == unit.lanes:
            return call(None)
        # a copy: the instruction may write the predicate
        return call(inside.copy()) if count else None

    return guarded


def _branch(instruction: Instruction, unit: Any) -> Call:
    """Return the next instruction's number, or (target, lanes that go there, the others)."""
    end = len(unit.program.instructions)
    jumps = instruction.opcode == "bra"
    target = unit.program.labels[instruction.operands[0]] if jumps else end
    if instruction.predicate is None:
        return (lambda mask: target) if jumps else (lambda mask: EXIT)
    holds, negated = unit.registers[instruction.predicate], instruction.negated

    def branch(mask: Any) -> Any:
        jumping = ~holds if negated else holds.copy()
        taken = jumping if mask is None else jumping & mask
        count = np.count_nonzero(taken)
        if not count:
            return None
        if count == (unit.lanes if mask is None else np.count_nonzero(mask)):
            return target
        return target, taken, ~jumping if mask is None else ~jumping & mask

    return branch
