"""Units with the modules that run beside them: those that save nothing, and tiny neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

# of more units neighbors are joined: time and memory of the solver grow with the square
MOST_UNITS = 512


class SurveyedUnit(NamedTuple):
    """A unit: a module, and modules beside it that save nothing, such as nn.Flatten."""

    # the name of the module
    name: str
    # the one that saves tensors for backward
    module: nn.Module
    # why no segment may contain it, or ""
    fixed: str
    # whether it gets the output of the unit before
    joined: bool
    # the save levels that it offers, from the most that is saved
    levels: tuple[str, ...]
    # whether it runs a kernel of attention
    attends: bool
    # bytes of its arguments that require grad
    input_bytes: int
    # bytes of its outputs that require grad
    output_bytes: int
    # whether its forward saves nothing for backward
    is_empty: bool
    # bytes of the weights that autocast casts, and that the forward saves
    cast_bytes: int
    # its modules by name, in the order in which they run
    members: tuple[tuple[str, nn.Module], ...]
    # bytes of its arguments that a segment which starts here can offload
    movable_bytes: int


def grouped(units: Sequence[SurveyedUnit], left_out: dict[str, str]) -> list[SurveyedUnit]:
    """Join units that save nothing to those before them, or behind them.

    In a segment of its own such a unit saves no input, which the measured step would lack. An
    identity or a view shares memory with the unit before; nn.Upsample runs with the unit behind,
    whose segment then saves the smaller input. Units without either are code between others.
    """
    groups = list[SurveyedUnit]()
    waiting = list[SurveyedUnit]()

    def place_waiting() -> None:
        """Join the units that wait to the unit before them, or leave them out."""
        if waiting and waiting[0].joined and groups:
            groups[-1] = _group([groups[-1], *waiting], groups[-1])
        else:
            left_out.update({unit.name: "saves nothing" for unit in waiting})
        waiting.clear()

    for unit in units:
        if not unit.joined:
            place_waiting()
        if not unit.is_empty:
            groups.append(_group([*waiting, unit], unit))
            waiting.clear()
        elif unit.joined and groups and not waiting and unit.output_bytes <= unit.input_bytes:
            groups[-1] = _group([groups[-1], unit], groups[-1])
        else:
            waiting.append(unit)
    place_waiting()
    return groups


def _group(units: Sequence[SurveyedUnit], main: SurveyedUnit) -> SurveyedUnit:
    """Return a unit of the modules of several; main: one that saves something."""
    return main._replace(
        joined=units[0].joined,
        attends=any(unit.attends for unit in units),
        input_bytes=units[0].input_bytes,
        output_bytes=units[-1].output_bytes,
        cast_bytes=sum(unit.cast_bytes for unit in units),
        members=tuple(member for unit in units for member in unit.members),
        movable_bytes=units[0].movable_bytes,
    )


def fewer(units: list[SurveyedUnit], most: int) -> list[SurveyedUnit]:
    """Join neighbors so that at most `most` units are left, if segments may contain them.

    The bytes that units return are balanced between the groups.
    """
    if len(units) <= most:
        return units
    low = 0
    high = sum(unit.output_bytes for unit in units)
    while low < high:
        middle = (low + high) // 2
        if len(_packed(units, middle)) <= most:
            high = middle
        else:
            low = middle + 1
    return [_group(group, group[0]) for group in _packed(units, high)]


def _packed(units: Sequence[SurveyedUnit], capacity: int) -> list[list[SurveyedUnit]]:
    """Return units with their neighbors, as long as these return no more than `capacity` bytes."""
    groups = list[list[SurveyedUnit]]()
    nbytes = 0
    for unit in units:
        nbytes += unit.output_bytes
        before = groups[-1][-1] if groups else None
        is_like = before is not None and (before.levels, before.fixed) == (unit.levels, "")
        if is_like and unit.joined and not unit.fixed and nbytes <= capacity:
            groups[-1].append(unit)
        else:
            groups.append([unit])
            nbytes = unit.output_bytes
    return groups
