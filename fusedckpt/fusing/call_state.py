"""The state that a module's forward reads and changes: noted at a call, brought back later.

It notes the attributes of the module and of those inside, of their classes, of plain objects in
them and among the arguments, and the contents of plain containers in all of these: by reference,
without a copy of a tensor. So a recompute finds a counter, a popped argument, a scheduler or an
option of a config as the forward did, and leaves all of them as they are.

Tensors are not copied but for those that the forward itself writes in place, see
`written_tensors`. A parameter or buffer that other code wrote since is an error, by its name. Other
state, such as a global variable, is not noted: samples of the saved tensors tell where it has
changed.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from fusedckpt.autograd import private
from fusedckpt.autograd.backward import versions_of
from fusedckpt.fusing.written_tensors import ModuleTensor, WrittenTensors
from fusedckpt.state import rng
from fusedckpt.state.holders import (
    ATOMS,
    PLAIN,
    contents_of,
    holders_of,
    is_of_library,
    numbers_of,
    put_back,
)

# a container of more entries is data, and more objects are no state of one module
_MOST_ENTRIES = 1 << 10
_MOST_OBJECTS = 1 << 8
# attributes of every module: hooks, and members, of which a forward may replace some
_MEMBERS = "_parameters", "_buffers", "_modules"
# objects of these packages are no state of a model
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "triton", "fusedckpt"}

# a container or the attributes of an object, and its contents at some time
_Contents = tuple[Any, Any]
_Versions = list[tuple[Tensor, int]]


class CallState:
    """The state of a module, and of the arguments of one call of it, before that call."""

    def __init__(self, module: nn.Module, args: Sequence[Any]):
        self._module = module
        self._contents: list[_Contents] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        # parameters, and whether they require gradients
        self._flags: list[tuple[Tensor, bool]] = []
        # generators, and their states
        self._generators: list[tuple[rng.GeneratorCalls, Any]] = []
        # tensors in objects among the arguments; the checkpoint knows the others
        self._in_arguments: _Versions = []
        seen = set[int]()
        self._walk([x for x in args if not isinstance(x, Tensor)], seen, self._in_arguments)
        members, objects = self._note_modules()
        others = _Versions()
        self._walk(objects, seen, others)
        self._written = WrittenTensors(members, others)

    def _note_modules(self) -> tuple[list[ModuleTensor], list[Any]]:
        """Note the modules; return their members, and objects in their attributes and classes."""
        members = list[ModuleTensor]()
        objects = list[Any]()
        classes = dict[type, None]()
        for module in self._module.modules():
            attributes = vars(module)
            contents = dict(attributes)
            self._contents.append((attributes, contents))
            self._classes.append((module, type(module)))
            classes[type(module)] = None
            for name in _MEMBERS:
                contents[name] = dict(contents[name])
            parameters = contents["_parameters"]
            for name, tensor in (*parameters.items(), *contents["_buffers"].items()):
                if tensor is not None:
                    members.append(ModuleTensor(module, name, tensor, versions_of(tensor)[0]))
            self._flags += [(p, p.requires_grad) for p in parameters.values() if _is_leaf(p)]
            objects += [x for name, x in contents.items() if name not in private.MODULE_ATTRIBUTES]
        for kind in classes:
            objects += [x for read in _class_readers(kind) for x in read()]
            for numbers in numbers_of(kind):
                self._note_contents(numbers)
        return members, objects

    def _walk(self, queue: list[Any], seen: set[int], tensors: _Versions) -> None:
        """Note the objects in a queue, and the objects in these, the nearest first."""
        most = len(self._contents) + _MOST_OBJECTS
        for value in queue:
            if type(value) in ATOMS or id(value) in seen or len(self._contents) >= most:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                tensors.append((value, versions_of(value)[0]))
            else:
                queue += self._note(value)

    def _note(self, value: Any) -> Sequence[Any]:
        """Note one object, and return the objects in it."""
        kind = type(value)
        if kind in PLAIN:
            return self._note_contents(value)
        if isinstance(value, tuple):
            return value[:_MOST_ENTRIES]
        if (calls := rng.of_object(value)) is not None:
            self._generators.append((calls, calls.read()))
        elif _is_plain_class(kind):
            holders = holders_of(value, of_callables=True)
            return [part for holder in holders for part in self._note_contents(holder)]
        return ()

    def _note_contents(self, holder: Any) -> Sequence[Any]:
        if len(holder) > _MOST_ENTRIES:
            return ()
        contents = contents_of(holder)
        self._contents.append((holder, contents))
        return [*contents.values()] if isinstance(contents, dict) else contents

    def end(self) -> bool:
        """Learn, after the call, which tensors it wrote; return whether any has no copy."""
        self._written.learn()
        return self._written.uncopied != []

    def written_parameter(self) -> str:
        """Return the name of a parameter that the call wrote, "" for none."""
        members = self._written.uncopied
        written = (m for m in members if m is not None and not m.is_buffer)
        return next(map(self._name_of, written), "")

    def _name_of(self, member: ModuleTensor) -> str:
        prefixes = {m: f"{name}." if name else "" for name, m in self._module.named_modules()}
        return f"{prefixes.get(member.module, '')}{member.name}"

    def check(self) -> None:
        """Raise where other code wrote a parameter or buffer since, or the call a parameter.

        Raises:
            RuntimeError: with its name.
        """
        if self._written.uncopied and (written := self.written_parameter()):
            raise RuntimeError(
                f"{type(self._module).__name__}: its forward wrote its parameter {written} for the "
                "first time, and would write it once more in backward. Further calls run the "
                "forward of its class; write the parameter outside of the forward"
            )
        name = None
        if (member := self._written.written_by_others()) is not None:
            name = self._name_of(member)
        elif any(versions_of(tensor) != (version,) for tensor, version in self._in_arguments):
            name = "a tensor in its arguments"
        if name is not None:
            raise RuntimeError(
                f"{type(self._module).__name__}: {name} has been modified by an inplace operation "
                "between forward and backward, in which the module's forward runs again"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring the state back meanwhile; no write inside changes a tensor of the state."""
        replacements = self._written.replacements()
        present = [(holder, contents_of(holder)) for holder, _ in self._contents]
        classes = [(module, type(module)) for module, _ in self._classes]
        toggled = [p for p, flag in self._flags if p.requires_grad != flag]
        states = [(calls, calls.read()) for calls, _ in self._generators]
        try:
            for holder, contents in self._contents:
                put_back(holder, _replaced(contents, replacements))
            _set_classes(self._classes)
            _toggle(toggled)
            for calls, state in self._generators:
                calls.write(state)
            yield
        finally:
            for calls, state in states:
                calls.write(state)
            _toggle(toggled)
            for holder, contents in present:
                put_back(holder, contents)
            _set_classes(classes)


def is_noted(value: Any) -> bool:
    """Whether an argument is a container; its contents are brought back."""
    return type(value) in PLAIN or isinstance(value, UserDict)


def _is_leaf(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_leaf


def _replaced(contents: Any, replacements: Mapping[int, Tensor]) -> Any:
    """Return contents with other tensors, and the members of a module copied."""
    if not isinstance(contents, dict):
        return [replacements.get(id(x), x) for x in contents] if replacements else contents
    if replacements:
        copied = {key: replacements.get(id(x), x) for key, x in contents.items()}
    else:
        copied = dict(contents)
    if copied.keys() >= set(_MEMBERS):
        for name in _MEMBERS:
            copied[name] = _replaced(contents[name], replacements)
    return copied


def _set_classes(classes: list[tuple[nn.Module, type[nn.Module]]]) -> None:
    for module, kind in classes:
        if type(module) is not kind:
            module.__class__ = kind


def _toggle(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)


@cache
def _is_plain_class(kind: type) -> bool:
    """Whether objects of a class are state: not those of libraries, modules, tensors and enums."""
    if kind is SimpleNamespace or issubclass(kind, UserDict):
        return True
    is_library = kind.__module__.partition(".")[0] in _LIBRARIES
    return not (is_library or issubclass(kind, (nn.Module, Tensor, Enum, type)))


@cache
def _class_readers(kind: type) -> Sequence[Callable[[], Sequence[Any]]]:
    """Return readers of the state beside a class's objects.

    That is its attributes, the variables that its methods close over, and generators among the
    globals of its Python module.
    """
    readers = []
    for base in kind.__mro__:
        if is_of_library(base):
            continue
        module_globals = vars(sys.modules.get(base.__module__, base))
        for name, value in [*module_globals.items()]:
            if rng.of_object(value) is not None:
                readers.append(partial(_named, module_globals, name))
        for name, value in vars(base).items():
            if isinstance(value, FunctionType):
                readers += [partial(_closed_over, cell) for cell in value.__closure__ or ()]
            elif not name.startswith("__") and (is_noted(value) or _is_plain_class(type(value))):
                readers.append(partial(_named, vars(base), name))
    return readers


def _named(table: Mapping[str, Any], name: str) -> Sequence[Any]:
    return (table.get(name),)


def _closed_over(cell: CellType) -> Sequence[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        # not assigned yet
        return ()
