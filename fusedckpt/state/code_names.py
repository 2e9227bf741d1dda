"""The names in the code of a class's methods: functions that it calls, attributes that it reads.

They show operations that a forward may do and one run does not: in a branch that was not taken, or
for inputs that are not known.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

# packages of which functions beside a class's own file are not looked into
READ_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "transformers", "diffusers", "timm"}
# instructions between a variable and the attribute that is read of it; those that copy a value
_COPYING = ("COPY", "DUP_TOP")
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", *_COPYING)
# how many functions are looked into for one class
_MOST_FUNCTIONS = 200


@cache
def names_in_forward(kind: type) -> frozenset[str]:
    """Return the names in the code of a class's forward, and of the methods that it calls."""
    if defining_class(kind, "forward").__module__.startswith("torch."):
        return frozenset()
    names: set[str] = set()
    todo = ["forward"]
    for method in todo:
        new_names = {n for fn in methods_of(kind, method) for n in names_in(fn.__code__)} - names
        names |= new_names
        todo += [name for name in new_names if name not in vars(nn.Module) and name not in todo]
    return frozenset(names)


def methods_of(kind: type, name: str) -> Iterator[FunctionType]:
    """Yield the method that an object of a class has, and those of its bases that this one calls.

    A method that is overridden runs only where the override names super() or the base.
    """
    # the names in the methods that run
    names = set[str]()
    is_next = True
    for base in kind.__mro__:
        is_ours = base.__module__.startswith("fusedckpt.")
        if name not in vars(base) or is_ours or not (is_next or base.__name__ in names):
            continue
        method = vars(base)[name]
        method = getattr(method, "__func__", method)
        method = inspect.unwrap(method) if callable(method) else None
        if not isinstance(method, FunctionType) or base.__module__.startswith("torch."):
            return
        yield method
        new_names = {*names_in(method.__code__)}
        is_next = "super" in new_names
        names |= new_names


def functions_reached(
    kind: type, method: str, ends: Callable[[Any], bool] = lambda _: False
) -> Iterator[FunctionType]:
    """Yield the methods of a class that a method calls, itself first, and functions that they call.

    Of functions, those of the files and packages of the callers. ends: tells of which functions the
    code is not looked into.
    """
    return _with_callees([*methods_of(kind, method)], kind, ends)


def functions_from(fn: FunctionType) -> Iterator[FunctionType]:
    """Yield a function, and functions that it calls, of its file or package."""
    return _with_callees([fn], None, lambda _: False)


def _with_callees(
    queue: list[FunctionType], kind: type | None, ends: Callable[[Any], bool]
) -> Iterator[FunctionType]:
    """Yield the functions in a queue, and those that they call; kind: the class of methods."""
    seen = set[CodeType]()
    for fn in queue:
        if fn.__code__ in seen or len(seen) > _MOST_FUNCTIONS:
            continue
        seen.add(fn.__code__)
        yield fn
        names = {*names_in(fn.__code__)}
        values = [*values_named(fn, names)]
        if kind is not None:
            values += class_attributes(kind, names)
        for value in values:
            if isinstance(value, FunctionType) and _belongs_to(value, fn) and not ends(value):
                queue.append(inspect.unwrap(value))
        if kind is None:
            continue
        for name in names:
            queue += methods_of(kind, name) if not hasattr(nn.Module, name) else ()


def class_attributes(kind: type, names: set[str]) -> Iterator[Any]:
    """Yield the attributes of a class that are no methods, such as a function of a table."""
    for base in kind.__mro__[: kind.__mro__.index(object)]:
        values = (vars(base)[name] for name in names & vars(base).keys())
        values = (getattr(value, "__func__", value) for value in values)
        yield from (value for value in values if not isinstance(value, FunctionType))


def _belongs_to(fn: FunctionType, caller: FunctionType) -> bool:
    """Whether a function is of the file or package of another one that calls it."""
    if fn.__module__ == caller.__module__:
        return True
    package = (caller.__module__ or "").partition(".")[0]
    return package not in READ_PACKAGES and (fn.__module__ or "").partition(".")[0] == package


def values_named(fn: FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield the values of a function's globals and closed-over variables, and of modules' names."""
    for global_name in _globals_in(fn.__code__):
        value = fn.__globals__.get(global_name)
        if isinstance(value, ModuleType):
            yield from (vars(value).get(name) for name in names)
        yield value
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # not assigned yet
            continue


@lru_cache(1 << 10)
def _globals_in(function: CodeType) -> Sequence[str]:
    """Return the names of global variables that a function's code loads, in their order."""
    names = dict[str, None]()
    for code in codes_in(function):
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                names[instruction.argval] = None
    return [*names]


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


def write_tensors(names: Collection[str]) -> bool:
    """Whether code of these names writes to tensors: by a method that ends in "_", or `data`."""
    return "data" in names or any(n.endswith("_") and not n.endswith("__") for n in names)


@cache
def writes_in_place(kind: type) -> bool:
    """Whether the code of a class's forward may write to tensors, by `x += y` too."""
    return any(map(_writes, functions_reached(kind, "forward")))


def has_functions_that_write(module: Any) -> bool:
    """Whether functions in attributes of a module, or its hooks, may write to tensors."""
    hooks = module._forward_pre_hooks, module._forward_hooks
    for value in (*vars(module).values(), *(hook for each in hooks for hook in each.values())):
        fn = getattr(value, "__func__", value)
        # our own observers write no tensor of the model
        is_known = isinstance(fn, FunctionType) and not _is_ours(fn)
        if is_known and any(map(_writes, functions_from(fn))):
            return True
    return False


def _is_ours(fn: FunctionType) -> bool:
    return (fn.__module__ or "").partition(".")[0] == "fusedckpt"


def _writes(fn: FunctionType) -> bool:
    if write_tensors({*names_in(fn.__code__)}):
        return True
    for code in codes_in(fn.__code__):
        for instruction in dis.get_instructions(code):
            # before Python 3.11 each is an operation of its own
            is_binary = instruction.opname == "BINARY_OP" and instruction.argrepr[-1] == "="
            if is_binary or instruction.opname.startswith("INPLACE_"):
                return True
    return False


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
    is_written = False
    place += 1
    # code ends with a return, so that there is a next instruction
    while (operation := instructions[place].opname) in _OF_ATTRIBUTES:
        if operation in _COPYING:
            # `x.a += 1` copies x
            if instructions[place + 1].opname != "LOAD_ATTR":
                break
            is_written = True
        else:
            attributes.append(instructions[place].argval)
        place += 1
    if operation in ("STORE_ATTR", "DELETE_ATTR"):
        is_written = True
        attributes.append(instructions[place].argval)
    return CodeRead(root, name, tuple(attributes), is_written)


def _absolute(name: str, level: Any, package: str | None) -> str:
    """Return the full name of a module that code imports."""
    if not isinstance(level, int) or not level:
        return name
    return resolve_name("." * level + name, package or "")
