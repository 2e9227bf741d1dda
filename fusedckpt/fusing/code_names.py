"""The names in the code of a class's methods: functions that it calls, attributes that it reads.

They show what a forward may do where running it would not: in a branch that was not taken, or for
inputs that are not known.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType

from torch import nn


@cache
def called_by(kind: type, method: str = "forward") -> frozenset[str]:
    """Return the names in a method's code, and in that of the methods it calls."""
    # FSDP's class of a module is made in torch, the forward is not
    by = next((base for base in kind.__mro__ if method in vars(base)), kind)
    if by.__module__.startswith("torch."):
        return frozenset()
    seen: set[str] = set()
    called: set[str] = set()
    names = {method}
    while names:
        seen |= names
        # of all classes: one calls the other's by super()
        methods = [vars(base).get(name) for base in kind.__mro__ for name in names]
        codes = [inspect.unwrap(method) for method in methods if callable(method)]
        named = {name for code in codes for name in _names(getattr(code, "__code__", None))}
        called |= named
        names = {n for n in named - seen if n not in vars(nn.Module)}
    return frozenset(called)


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)
