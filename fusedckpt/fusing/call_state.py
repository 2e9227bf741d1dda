"""The state that a module's forward reads and changes: noted at a call, brought back later.

Noted are the attributes of the module and of those inside, of their classes, of plain objects in
them and among the arguments, and the contents of plain containers in all of these: by reference,
without a copy of a tensor. So a recompute finds a counter, a popped argument, a scheduler or an
option of a config as the forward did, and leaves all of them as they are.

Tensors are not copied but for those that the forward itself writes in place, see
`written_tensors`. A parameter or buffer that other code wrote since is an error, by its name. Other
state, as that of a global variable, is not noted: samples of the saved tensors tell where it has
changed.
"""

from __future__ import annotations

import random
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fusedckpt.autograd.backward import versions_of
from fusedckpt.checkpointing.calls import ATOMS
from fusedckpt.fusing.state_holders import (
    BASES,
    CONTAINERS,
    Slots,
    contents_of,
    is_of_library,
    numbers_of,
    put_back,
    slots_of,
)
from fusedckpt.fusing.written_tensors import Member, Written

# a container of more entries is data, and more objects are no state of one module
_MOST_ENTRIES, _MOST_OBJECTS = 1 << 10, 1 << 8
# attributes of every module: hooks, and members, of which a forward may replace some
_OF_MODULES = frozenset(vars(nn.Module()))
_MEMBERS = "_parameters", "_buffers", "_modules"
# objects of these packages are no state of a model
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "triton", "fusedckpt"}

# a container or the attributes of an object, and its contents at some time
_Contents = tuple[Any, Any]
_Versions = list[tuple[Tensor, int]]


class State:
    """The state of a module, and of the arguments of one call of it, before that call."""

    def __init__(self, module: nn.Module, args: Sequence[Any]):
        self._module = module
        self._noted: list[_Contents] = []
        self._kinds: list[tuple[nn.Module, type[nn.Module]]] = []
        self._flags: list[tuple[Tensor, bool]] = []
        self._generators: list[tuple[Callable[[Any], Any], Callable[[], Any], Any]] = []
        # tensors in objects among the arguments; the checkpoint knows the others
        self._given: _Versions = []
        seen, others = set[int](), _Versions()
        self._walk([x for x in args if not isinstance(x, Tensor)], seen, self._given)
        members, objects = self._of_modules()
        self._walk(objects, seen, others)
        self._written = Written(members, others)

    def _of_modules(self) -> tuple[list[Member], list[Any]]:
        """Note the modules; return their members, and objects in their attributes and classes."""
        members = list[Member]()
        objects = list[Any]()
        classes = dict[type, None]()
        for module in self._module.modules():
            attributes = vars(module)
            contents = dict(attributes)
            self._noted.append((attributes, contents))
            self._kinds.append((module, type(module)))
            classes[type(module)] = None
            for name in _MEMBERS:
                contents[name] = dict(contents[name])
            parameters = contents["_parameters"]
            for name, tensor in (*parameters.items(), *contents["_buffers"].items()):
                if tensor is not None:
                    members.append(Member(module, name, tensor, versions_of(tensor)[0]))
            self._flags += [(p, p.requires_grad) for p in parameters.values() if _is_leaf(p)]
            objects += [x for name, x in contents.items() if name not in _OF_MODULES]
        for kind in classes:
            objects += [x for read in _of_class(kind) for x in read()]
            for numbers in numbers_of(kind):
                self._note_contents(numbers)
        return members, objects

    def _walk(self, queue: list[Any], seen: set[int], tensors: _Versions) -> None:
        """Note the objects in a queue, and the objects in these, the nearest first."""
        most = len(self._noted) + _MOST_OBJECTS
        for value in queue:
            if type(value) in ATOMS or id(value) in seen or len(self._noted) >= most:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                tensors.append((value, versions_of(value)[0]))
            else:
                queue += self._note(value)

    def _note(self, value: Any) -> Sequence[Any]:
        """Note one object, and return the objects in it."""
        kind = type(value)
        if kind in CONTAINERS:
            return self._note_contents(value)
        if isinstance(value, tuple):
            return value[:_MOST_ENTRIES]
        if (calls := _generator(value)) is not None:
            self._generators.append((*calls, calls[1]()))
        elif _is_plain_class(kind):
            attributes = getattr(value, "__dict__", None)
            contents = [*self._note_contents(value)] if isinstance(value, BASES) else []
            contents += self._note_contents(attributes) if type(attributes) is dict else ()
            contents += self._note_contents(Slots(value)) if slots_of(kind) else ()
            return contents
        return ()

    def _note_contents(self, holder: Any) -> Sequence[Any]:
        if len(holder) > _MOST_ENTRIES:
            return ()
        contents = contents_of(holder)
        self._noted.append((holder, contents))
        return [*contents.values()] if isinstance(contents, dict) else contents

    def end(self) -> None:
        """Take note, after the call, of the tensors that it wrote."""
        self._written.end()

    def check(self) -> None:
        """Raise where other code wrote a parameter or buffer since.

        Raises:
            RuntimeError: with its name.
        """
        what = None
        if (one := self._written.by_others()) is not None:
            names = {m: f"{name}." if name else "" for name, m in self._module.named_modules()}
            what = f"{names.get(one.module, '')}{one.name}"
        elif any(versions_of(tensor) != (version,) for tensor, version in self._given):
            what = "a tensor in its arguments"
        if what is not None:
            raise RuntimeError(
                f"{type(self._module).__name__}: {what} has been modified by an inplace operation "
                "between forward and backward, in which the module's forward runs again"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring the state back meanwhile; no write inside changes a tensor of the state."""
        swaps = self._written.swaps()
        present = [(holder, contents_of(holder)) for holder, _ in self._noted]
        kinds = [(module, type(module)) for module, _ in self._kinds]
        toggled = [p for p, flag in self._flags if p.requires_grad != flag]
        states = [(write, read()) for write, read, _ in self._generators]
        try:
            for holder, contents in self._noted:
                put_back(holder, _swapped(contents, swaps))
            _set_classes(self._kinds)
            _toggle(toggled)
            for write, _, state in self._generators:
                write(state)
            yield
        finally:
            for write, state in states:
                write(state)
            _toggle(toggled)
            for holder, contents in present:
                put_back(holder, contents)
            _set_classes(kinds)


def is_noted(value: Any) -> bool:
    """Whether an argument is a container; its contents are brought back."""
    return type(value) in CONTAINERS or isinstance(value, UserDict)


def _is_leaf(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_leaf


def _swapped(contents: Any, swaps: Mapping[int, Tensor]) -> Any:
    """Return contents with other tensors, and the members of a module copied."""
    if not isinstance(contents, dict):
        return [swaps.get(id(x), x) for x in contents] if swaps else contents
    found = {key: swaps.get(id(x), x) for key, x in contents.items()} if swaps else dict(contents)
    if all(name in found for name in _MEMBERS):
        for name in _MEMBERS:
            found[name] = _swapped(contents[name], swaps)
    return found


def _set_classes(kinds: list[tuple[nn.Module, type[nn.Module]]]) -> None:
    for module, kind in kinds:
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


def _generator(value: Any) -> tuple[Callable[[Any], Any], Callable[[], Any]] | None:
    """Return functions that write and read a random number generator's state, None for others."""
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state
    if isinstance(value, random.Random):
        return value.setstate, value.getstate
    if isinstance(value, np.random.RandomState):
        return value.set_state, value.get_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(setattr, bits, "state"), lambda: bits.state
    return None


@cache
def _of_class(kind: type) -> Sequence[Callable[[], Sequence[Any]]]:
    """Return readers of the state beside a class's objects.

    That is its attributes, the variables that its methods close over, and generators among the
    globals of its Python module.
    """
    found = []
    for base in kind.__mro__:
        if is_of_library(base):
            continue
        table = vars(sys.modules.get(base.__module__, base))
        generators = [n for n, value in [*table.items()] if _generator(value) is not None]
        found += [partial(_named, table, name) for name in generators]
        for name, value in vars(base).items():
            if isinstance(value, FunctionType):
                found += [partial(_closed_over, cell) for cell in value.__closure__ or ()]
            elif not name.startswith("__") and (is_noted(value) or _is_plain_class(type(value))):
                found.append(partial(_named, vars(base), name))
    return found


def _named(table: Mapping[str, Any], name: str) -> Sequence[Any]:
    return (table.get(name),)


def _closed_over(cell: CellType) -> Sequence[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        # not assigned yet
        return ()
