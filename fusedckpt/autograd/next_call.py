"""Whether any code could write to a tensor between two calls of ours.

A write through `.data`, a NumPy view or an address raises no version. None has happened where the
later call is the next one in the code of the caller: `self.fc(self.norm(x))`, or with names in
between. The instructions between both calls then load and store names alone, and neither call has
hooks.
"""

from __future__ import annotations

import dis
import sys
from functools import partial
from types import CodeType
from typing import NamedTuple

from torch import nn

# modules between the code of a model and ours
_BETWEEN = "torch.nn.modules.module", "torch.autograd.function", "torch._ops"


class _IsBetween(dict[str, bool]):
    """Whether a module is between the code of a model and ours, by its name: without a call."""

    def __missing__(self, name: str) -> bool:
        self[name] = name.startswith("fusedckpt.") or name in _BETWEEN
        return self[name]


_is_between = _IsBetween()
# instructions that run no code beyond that of attributes
_LOADS = ("LOAD_", "STORE_FAST", "BUILD_TUPLE", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "DICT_MERGE")
_QUIET = frozenset(
    ("PUSH_NULL", "PRECALL", "CACHE", "KW_NAMES", "NOP", "COPY", "SWAP", "POP_TOP", "DUP_TOP")
    + ("ROT_TWO", "ROT_THREE", "EXTENDED_ARG", "UNPACK_SEQUENCE", "NOT_TAKEN", "LIST_TO_TUPLE")
)
# by the number of a code, that and the pairs of places that were looked at
_paths: dict[int, tuple[CodeType, dict[tuple[int, int], bool]]] = {}
_MOST_CODES = 4096
# it calls its layers in a loop
_SEQUENTIAL = nn.Sequential.forward.__code__


class CallSite(NamedTuple):
    """A call in the code of a model."""

    # the number of the frame, which may be another's after that has ended
    frame: int
    # the place of its instruction in the code
    at: int
    code: CodeType


# a record without a call of Python's
_site = partial(tuple.__new__, CallSite)


class _Last:
    """The place of the last call of ours: a note from before another call proves nothing."""

    place: CallSite | None = None


def note(
    before: CallSite | None = None, *, is_behind: bool = False
) -> tuple[CallSite | None, bool]:
    """Note a call of ours that runs no code of the model.

    Returns its place in that code, None with hooks, and whether it is the next call after the one
    at a place before, and no other code has run between.

    is_behind: whether an nn.Sequential calls another layer of ours right before this one.
    """
    frame = sys._getframe(1)
    place = None
    while frame is not None:
        try:
            is_between = _is_between[frame.f_globals["__name__"]]
        except KeyError:
            # code that was run without a name
            is_between = False
        if not is_between:
            place = _site((id(frame), frame.f_lasti, frame.f_code))
            break
        if frame.f_code.co_name == "inner":
            # of a module that calls hooks
            break
        frame = frame.f_back
    last = _Last.place
    _Last.place = place
    if place is None or before is None or last is None:
        return place, False
    if not place.frame == last.frame == before.frame or last.at != before.at:
        return place, False
    if place.at <= last.at:
        return place, is_behind and place.at == last.at and place.code is _SEQUENTIAL
    # by its number, as a code's hash takes longer
    known = _paths.get(id(place.code))
    if known is None:
        if len(_paths) >= _MOST_CODES:
            _paths.clear()
        known = _paths[id(place.code)] = (place.code, {})
    is_straight = known[1].get((last.at, place.at))
    if is_straight is None:
        is_straight = _only_loads(place.code, last.at, place.at)
        known[1][last.at, place.at] = is_straight
    return place, is_straight


def forget() -> None:
    """Note that code of the model may have run since the last call of ours."""
    _Last.place = None


def _only_loads(code: CodeType, start: int, end: int) -> bool:
    """Whether the instructions between two only load and store names, and none is jumped to."""
    for instruction in dis.get_instructions(code):
        if instruction.offset <= start:
            continue
        if instruction.is_jump_target:
            return False
        if instruction.offset >= end:
            return True
        name = instruction.opname
        if not (name.startswith(_LOADS) or name in _QUIET):
            return False
    return False
