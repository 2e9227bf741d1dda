"""The names in the code of a class's methods: functions that it calls, attributes that it reads.

They show operations that a forward may do and one run does not: in a branch that was not taken, or
for inputs that are not known.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from types import CodeType
from typing import Any, NamedTuple

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


def is_read_as_global(code: CodeType, name: str) -> bool:
    """Whether a name in code is that of a global variable alone, and of no attribute."""
    operations = {i.opname for i in dis.get_instructions(code) if i.argval == name}
    return operations <= {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_CONST"}


class CodeRead(NamedTuple):
    """A variable from outside of a function that its code names."""

    # "global", "free" (closed over) or "import" (of a module, inside the function)
    root: str
    name: str
    # the attributes that are read of its value, one of the other
    attributes: tuple[str, ...]
    # whether the variable, or the last attribute, is assigned or deleted
    is_written: bool = False


def reads_in(function: CodeType, package: str | None = None) -> Iterator[CodeRead]:
    """Yield the variables from outside that a function's code names, those of functions inside too.

    package: of the function, for relative imports.
    """
    for code in codes_in(function):
        # local names of modules that were imported inside
        modules: dict[str, str] = {}
        instructions = [*dis.get_instructions(code)]
        for place, instruction in enumerate(instructions):
            operation = instruction.opname
            name = instruction.argval
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield _with_attributes("global", name, instructions, place)
            elif operation.endswith(("_GLOBAL", "_NAME")) and operation[:4] in ("STOR", "DELE"):
                yield CodeRead("global", name, (), is_written=True)
            elif "DEREF" in operation and name in function.co_freevars:
                if operation[:4] == "LOAD":
                    yield _with_attributes("free", name, instructions, place)
                else:
                    yield CodeRead("free", name, (), is_written=True)
            elif operation == "IMPORT_NAME":
                imported = _absolute(name, instructions[place - 2].argval, package)
                later = instructions[place + 1]
                if later.opname == "STORE_FAST":
                    # `import a.b` assigns a
                    modules[later.argval] = imported.partition(".")[0]
                for follower in instructions[place + 1 :: 2]:
                    if follower.opname != "IMPORT_FROM":
                        break
                    yield CodeRead("import", imported, (follower.argval,))
            elif operation.startswith("LOAD_FAST"):
                local = name[-1] if isinstance(name, tuple) else name
                if local in modules:
                    yield _with_attributes("import", modules[local], instructions, place)


def _with_attributes(
    root: str, name: str, instructions: list[dis.Instruction], place: int
) -> CodeRead:
    """Return the read of a variable, and of the attributes that follow."""
    attributes = []
    place += 1
    while instructions[place].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        attributes.append(instructions[place].argval)
        place += 1
    # code ends with a return, so that there is a next instruction
    is_written = instructions[place].opname in ("STORE_ATTR", "DELETE_ATTR")
    attributes += [instructions[place].argval] * is_written
    return CodeRead(root, name, tuple(attributes), is_written)


def _absolute(name: str, level: Any, package: str | None) -> str:
    """Return the full name of a module that code imports."""
    if not isinstance(level, int) or not level:
        return name
    return resolve_name("." * level + name, package or "")
