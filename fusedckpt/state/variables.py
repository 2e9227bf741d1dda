"""The variables beside a module that its code may write, found by the names in the code.

A forward may count in a global variable or in one that it closes over, append to a global list or
to the default value of an argument, or draw from a generator of its Python module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.jit import ScriptModule

from fusedckpt.autograd import private
from fusedckpt.state import rng
from fusedckpt.state.code_names import (
    READ_PACKAGES,
    CodeRead,
    functions_from,
    functions_reached,
    names_in,
    reads_in,
    values_named,
    write_tensors,
)
from fusedckpt.state.holders import (
    MOST_ENTRIES,
    CellContents,
    NamedAttributes,
    contents_of,
    holders_of,
    is_of_library,
    numbers_of,
)
from fusedckpt.state.noted import NotedState, is_collection, is_plain_class, with_state

# packages of functions that are not looked into: ours note results of runs on trial
_NOT_LOOKED_INTO = READ_PACKAGES | {"fusedckpt"}
# of a tensor that a run may write; a larger one is data, such as a set of samples
_MOST_BYTES = 1 << 28


class Variables(NamedTuple):
    """Where the state beside objects is."""

    # tables, and the names of entries
    tables: Sequence[tuple[Mapping[str, Any], str]]
    # variables that functions close over
    cells: Sequence[CellType]
    # default values of arguments
    defaults: Sequence[Any]
    # holders of variables that functions assign, of counters of classes and attributes of functions
    assigned: Sequence[NamedAttributes | CellContents | dict[str, Any]]

    def objects(self) -> list[Any]:
        """Return the objects in the variables."""
        objects = [*self.defaults]
        for table, name in self.tables:
            objects.append(table.get(name))
        for cell in self.cells:
            try:
                objects.append(cell.cell_contents)
            except ValueError:
                # not assigned yet
                continue
        return objects


NO_VARIABLES = Variables((), (), (), ())


@cache
def variables_of(kind: type) -> Variables:
    """Return the variables of a module's class.

    They are its attributes, generators among the globals of its Python module, the variables that
    its methods close over, and the variables of the functions that its forward calls.
    """
    finder = _VariableFinder()
    finder.assigned.update((id(numbers), numbers) for numbers in numbers_of(kind))
    for base in kind.__mro__:
        if is_of_library(base):
            continue
        module_globals = vars(sys.modules.get(base.__module__, base))
        for name, value in [*module_globals.items()]:
            if rng.of_object(value) is not None:
                finder.add_entry(module_globals, name)
        for name, value in vars(base).items():
            if isinstance(value, FunctionType):
                finder.add_cells(value)
            elif not name.startswith("__") and (
                is_collection(value) or is_plain_class(type(value))
            ):
                finder.add_entry(vars(base), name)
    finder.add_functions(functions_reached(kind, "forward"))
    return finder.found()


def variables_of_functions(functions: Iterable[Any]) -> Variables:
    """Return the variables of functions, of methods, and of objects that `partial` made of them.

    The arguments of a `partial` and the object of a method are as default values.
    """
    finder = _VariableFinder()
    queue = [*functions]
    for fn in queue:
        if isinstance(fn, partial):
            finder.defaults += [*fn.args, *fn.keywords.values()]
            queue.append(fn.func)
        elif isinstance(fn, MethodType):
            finder.defaults.append(fn.__self__)
            queue.append(fn.__func__)
        elif isinstance(fn, FunctionType) and not _is_foreign(fn):
            finder.add_functions(functions_from(fn))
            # its attributes
            finder.assigned[id(fn)] = vars(fn)
    return finder.found()


def _is_foreign(fn: FunctionType) -> bool:
    return (fn.__module__ or "").partition(".")[0] in _NOT_LOOKED_INTO


@lru_cache(1 << 10)
def _reads_of(code: CodeType) -> Sequence[CodeRead]:
    return [*reads_in(code)]


class NotedVariables(NamedTuple):
    """The variables that code may write, as they were when they were noted."""

    state: NotedState
    # those among them of at most 256 MiB, which are not copied; larger ones are data
    tensors: list[Tensor]
    # those that hooks may write
    parameters: list[nn.Parameter]


def noted_variables(model: nn.Module, *functions: Any, objects: bool = False) -> NotedVariables:
    """Note the variables that the code of a model or of these functions may write.

    The code of a model is that of its modules' classes, of their hooks, and of functions in their
    attributes. A module that a function names, as a hook that closes over the model does, is noted
    with all modules inside. objects: whether to note plain objects in attributes, too.
    """
    noted = NotedState()
    tensors = list[Tensor]()
    parameters = list[nn.Parameter]()
    seen = set[int]()
    called = [*functions]
    for module in model.modules():
        attributes = vars(module)
        called += attributes.values()
        hooks = [h for name in private.HOOK_ATTRIBUTES for h in attributes.get(name, {}).values()]
        if any(map(_writes_tensors, hooks)):
            parameters += module.parameters()
        called += hooks
        if objects:
            tensors += noted.note([*attributes.values()], seen)
    kinds = dict.fromkeys(map(type, model.modules()))
    reached = [fn for kind in kinds for fn in functions_reached(kind, "forward")]
    for function in (*called, *reached):
        for module in _modules_named(function):
            tensors += _note_module(module, noted, seen)
            if _writes_tensors(function):
                parameters += module.parameters()
    for variables in (variables_of_functions(called), *map(variables_of, kinds)):
        for holder in variables.assigned:
            noted.note_contents(holder)
        tensors += noted.note(variables.objects(), seen)
    small = [x for x in tensors if x.numel() * x.itemsize <= _MOST_BYTES]
    return NotedVariables(noted, small, [*dict.fromkeys(parameters)])


def _code_of(function: Any) -> FunctionType | None:
    """Return the function that runs where an object of functions is called."""
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    return function if isinstance(function, FunctionType) else None


def _writes_tensors(function: Any) -> bool:
    code = _code_of(function)
    return code is not None and write_tensors({*names_in(code.__code__)})


def _modules_named(function: Any) -> Iterator[nn.Module]:
    """Yield the modules among the variables that a function names, and in containers there.

    A copy of a model has copies of its methods' objects; functions are shared.
    """
    code = _code_of(function)
    if code is None or _is_foreign(code):
        return
    names = {*names_in(code.__code__)}
    values = [*values_named(code, names), *(code.__defaults__ or ())]
    for value in [*values, *(code.__kwdefaults__ or {}).values()]:
        if isinstance(value, nn.Module):
            yield value
        elif is_collection(value) or is_plain_class(type(value)):
            for holder in holders_of(value, of_callables=True):
                yield from _modules_in(holder)


def _modules_in(holder: Any) -> list[nn.Module]:
    if len(holder) > MOST_ENTRIES:
        return []
    contents = contents_of(holder)
    parts = contents.values() if isinstance(contents, dict) else contents
    return [part for part in parts if isinstance(part, nn.Module)]


def _note_module(root: nn.Module, noted: NotedState, seen: set[int]) -> list[Tensor]:
    """Note the state of a module and those inside; return the tensors that are not parameters."""
    tensors = list[Tensor]()
    for module in root.modules():
        attributes = vars(module)
        if id(attributes) in seen or isinstance(module, ScriptModule):
            continue
        seen.add(id(attributes))
        for holder in (attributes, module._parameters, module._buffers):
            noted.note_contents(holder)
        tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
        tensors += noted.note([*attributes.values()], seen)
    return tensors


class _VariableFinder:
    def __init__(self) -> None:
        # by table and name, by cell, and by holder's owner and name: each once
        self.tables: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self.cells: dict[int, CellType] = {}
        self.assigned: dict[Any, NamedAttributes | CellContents | dict[str, Any]] = {}
        self.defaults: list[Any] = []

    def found(self) -> Variables:
        tables, cells = [*self.tables.values()], [*self.cells.values()]
        assigned = [*self.assigned.values()]
        variables = Variables(tables, cells, with_state(self.defaults), assigned)
        return variables if any(variables) else NO_VARIABLES

    def add_entry(self, table: Mapping[str, Any], name: str) -> None:
        self.tables[id(table), name] = table, name

    def add_cells(self, fn: FunctionType) -> None:
        self.cells.update((id(cell), cell) for cell in fn.__closure__ or ())

    def add_functions(self, functions: Iterable[FunctionType]) -> None:
        for fn in functions:
            if _is_foreign(fn):
                continue
            self.add_cells(fn)
            self.defaults += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
            for read in _reads_of(fn.__code__):
                if read.root == "global":
                    self._add_global(fn, read)
                elif read.root == "free" and read.is_written and not read.attributes:
                    cell = (fn.__closure__ or ())[fn.__code__.co_freevars.index(read.name)]
                    self.assigned[id(cell)] = CellContents(cell)

    def _add_global(self, fn: FunctionType, read: CodeRead) -> None:
        """Add the places of a global variable, and of attributes of its value, that code names.

        Containers and tensors, which it may change, and all that it assigns.
        """
        owner: Any = sys.modules.get(fn.__module__)
        if owner is None or vars(owner) is not fn.__globals__:
            return
        names = (read.name, *read.attributes)
        for depth, name in enumerate(names, 1):
            attributes = getattr(owner, "__dict__", {})
            if read.is_written and depth == len(names):
                self.assigned[id(owner), name] = NamedAttributes(owner, [name])
                return
            value = attributes.get(name)
            if is_collection(value) or isinstance(value, Tensor):
                self.add_entry(attributes, name)
            if isinstance(value, Tensor):
                # a recompute writes another one
                self.assigned[id(owner), name] = NamedAttributes(owner, [name])
            if isinstance(value, (ModuleType, type)):
                library = value.__name__ if isinstance(value, ModuleType) else value.__module__
                if library.partition(".")[0] in READ_PACKAGES:
                    return
            elif not is_plain_class(type(value)):
                return
            owner = value
