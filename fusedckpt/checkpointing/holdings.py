"""What a segment's function reads besides its arguments: modules, tensors, random generators."""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device))
# a longer container is data, not layers
_MAX_LENGTH = 4096
_DEPTH = 5


class Global(NamedTuple):
    """A name and what it stood for."""

    space: dict[str, Any]
    name: str
    value: Any


class Holdings:
    """Modules, tensors and generators that a function holds.

    Looked for in itself, bound methods, partials, closures, defaults, globals and attributes that
    its code names, containers and dataclasses. What it reaches through other objects is not found.
    """

    def __init__(self, *objects: Any):
        self.modules: dict[nn.Module, None] = {}
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        self.globals: list[Global] = []
        self._seen: set[int] = set()
        for _ in range(_DEPTH):
            objects = tuple(part for obj in objects for part in self._see(obj))
            if not objects:
                break

    def _see(self, obj: Any) -> Iterable[Any]:
        """Note what `obj` is, or return what it consists of."""
        if type(obj) in _ATOMS or id(obj) in self._seen:
            return ()
        self._seen.add(id(obj))
        if isinstance(obj, nn.Module):
            self.modules.update(dict.fromkeys(obj.modules()))
        elif isinstance(obj, Tensor):
            self.tensors.append(obj)
        elif isinstance(obj, torch.Generator):
            self.generators.append(obj)
        elif isinstance(obj, types.FunctionType):
            found = _globals(obj)
            self.globals += found
            return _parts_of_function(obj, [entry.value for entry in found])
        else:
            return _parts(obj)
        return ()


def _parts(obj: Any) -> Iterable[Any]:
    if isinstance(obj, (list, tuple, set, Mapping)):
        if len(obj) > _MAX_LENGTH:
            return ()
        return obj.values() if isinstance(obj, Mapping) else obj
    if isinstance(obj, types.MethodType):
        return obj.__self__, obj.__func__, *_named_attributes(obj.__func__, [obj.__self__])
    if isinstance(obj, functools.partial):
        return obj.func, *obj.args, *obj.keywords.values()
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [getattr(obj, field.name, None) for field in dataclasses.fields(obj)]
    return ()


def _parts_of_function(fn: types.FunctionType, globals: list[Any]) -> list[Any]:
    cells = [cell.cell_contents for cell in fn.__closure__ or () if cell != types.CellType()]
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    found = [*cells, *defaults, *globals]
    return found + _named_attributes(fn, found)


def _globals(fn: types.FunctionType) -> list[Global]:
    """Return the globals that its code names: objects, but no functions of libraries."""
    names, space = _names(fn.__code__)[0], fn.__globals__
    entries = [Global(space, name, space[name]) for name in names if name in space]
    return [
        entry
        for entry in entries
        if not isinstance(entry.value, (type, types.ModuleType, types.BuiltinFunctionType))
        and getattr(entry.value, "__globals__", space) is space
    ]


def _named_attributes(fn: Any, objects: Iterable[Any]) -> list[Any]:
    """Return the attributes of plain objects that the code of `fn` names: `self.net`."""
    if not isinstance(fn, types.FunctionType):
        return []
    found = []
    for obj in objects:
        if isinstance(obj, (nn.Module, Tensor, type, types.ModuleType, types.FunctionType)):
            continue
        attributes = getattr(obj, "__dict__", None)
        if isinstance(attributes, dict) and attributes:
            found += [attributes[name] for name in _names(fn.__code__)[1] if name in attributes]
    return found


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the globals and of the attributes that code reads."""
    found: tuple[dict[str, None], dict[str, None]] = {}, {}
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            found[0][instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found[1][instruction.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for mine, its in zip(found, _names(inner), strict=True):
                mine.update(dict.fromkeys(its))
    return tuple(found[0]), tuple(found[1])


def callee(fn: Any) -> Any:
    """Return the method that calling an object runs, itself where that is what to look into."""
    known = (nn.Module, type, functools.partial, types.FunctionType, types.MethodType)
    call = None if isinstance(fn, known) else vars(type(fn)).get("__call__")
    return types.MethodType(call, fn) if isinstance(call, types.FunctionType) else fn
