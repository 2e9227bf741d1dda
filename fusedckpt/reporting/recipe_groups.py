"""The tensors of a step that recipes make again, by the functions that made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusedckpt.autograd.tracker import Choice
from fusedckpt.reporting.tables import Row, size

# groups shown; the others are summed up
_MOST_GROUPS = 12
# functions shown of a group
_LONGEST = 6
HEADS = ("recipes: functions, the last one first", "tensors", "size", "in backward")


@dataclass(frozen=True)
class RecipeGroup:
    """Tensors of a step with recipes of the same functions."""

    # the functions that made them, the last one first
    functions: tuple[str, ...]
    # whether they are saved all the same: a longer sequence of functions is not run again
    is_cut: bool
    # their number, each counted once
    count: int
    # their bytes
    nbytes: int


def grouped_recipes(choices: Iterable[Choice]) -> tuple[RecipeGroup, ...]:
    """Return the groups of a forward's tensors, those that are saved first, by their sizes."""
    sizes: dict[tuple[tuple[str, ...], bool], dict[int, int]] = {}
    for choice in choices:
        functions = choice.functions or choice.cut
        if functions:
            group = sizes.setdefault((functions, bool(choice.cut)), {})
            # several readers of one tensor choose the same
            group[choice.source] = choice.nbytes
    groups = [
        RecipeGroup(functions, is_cut, len(nbytes), sum(nbytes.values()))
        for (functions, is_cut), nbytes in sizes.items()
    ]
    return tuple(sorted(groups, key=lambda group: (not group.is_cut, -group.nbytes)))


def report_rows_of(groups: Sequence[RecipeGroup]) -> list[Row]:
    """Return a row of HEADS for each group."""
    rows = [
        (
            _names(group.functions),
            f"{group.count}",
            size(group.nbytes),
            "saved: its sequence was cut" if group.is_cut else "made again",
        )
        for group in groups[:_MOST_GROUPS]
    ]
    if more := groups[_MOST_GROUPS:]:
        count = sum(group.count for group in more)
        nbytes = sum(group.nbytes for group in more)
        rows.append((f"{len(more)} more", f"{count}", size(nbytes), ""))
    return rows


def _names(functions: Sequence[str]) -> str:
    """Write the functions of a group."""
    more = len(functions) - _LONGEST
    return ", ".join(functions[:_LONGEST]) + (f" and {more} more" if more > 0 else "")
