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
def names_in_forward(kind: type) -> frozenset[str]:
    """Return the names in the code of a class's forward, and of the methods that it calls."""
    if defining_class(kind, "forward").__module__.startswith("torch."):
        return frozenset()
    seen: set[str] = set()
    names: set[str] = set()
    todo = {"forward"}
    while todo:
        seen |= todo
        # of all classes: one calls the other's by super()
        methods = [vars(base).get(name) for base in kind.__mro__ for name in todo]
        functions = [inspect.unwrap(method) for method in methods if callable(method)]
        codes = [fn.__code__ for fn in functions if hasattr(fn, "__code__")]
        new_names = {name for code in codes for name in names_in(code)}
        names |= new_names
        todo = {name for name in new_names - seen if name not in vars(nn.Module)}
    return frozenset(names)


def defining_class(kind: type, method: str) -> type:
    """Return the base of a class that defines a method, the class itself if none does.

    FSDP's class of a module is made in torch, and its forward is not.
    """
    return next((base for base in kind.__mro__ if method in vars(base)), kind)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code, and in that of the functions inside."""
    for part in codes_in(code):
        yield from part.co_names
