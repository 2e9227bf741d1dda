"""Holders of state: containers, and the attributes of objects and of classes, read and filled.

A subclass of dict may be read-only, may validate, or may tell others of its changes; diffusers'
configurations are such. So a holder's contents are read and written by the methods of Python's own
classes, and only where they changed.

A holder is a dict, list, set or deque, or an object with `read()` and `fill(contents)`: `Slots`,
`NamedAttributes`, `CellContents`, `WeakItems`, `ForeignItems`. `holders_of` returns those of an
object, `contents_of` reads one, `put_back` writes it.
"""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from functools import cache
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

# data, of which a container may hold very much
ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None)))
# a container of more entries is data, and more objects are no state of one module or variable
MOST_ENTRIES = 1 << 10
MOST_OBJECTS = 1 << 8
# classes with methods that read and write the items of a subclass, too
_BUILT_IN: tuple[type, ...] = (OrderedDict, dict, list, deque, set)
# classes of containers without attributes
PLAIN = frozenset((*_BUILT_IN, defaultdict, Counter))
# containers that refer weakly to objects, in a dict or set `data`
_WEAK = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
# containers by class; others are objects with attributes
CONTAINERS = (*_BUILT_IN, *_WEAK, tuple, UserDict, UserList)
# objects that are no data: a step does not change them, or they are put back by other means
_OPAQUE = (Tensor, nn.Module, Optimizer, type, types.ModuleType, enum.Enum, *_WEAK)


def contents_of(holder: Any) -> Any:
    """Return the contents of a holder: a dict of them, or a list."""
    if type(holder) is dict:
        # most are
        return holder.copy()
    base = _base_of(type(holder))
    if base is None:
        return holder.read()
    return dict(base.items(holder)) if issubclass(base, dict) else [*base.__iter__(holder)]


def has(holder: Any, contents: Any) -> bool:
    """Whether the contents of a holder are the same objects in the same order."""
    if type(holder) is not dict:
        return are_same(contents_of(holder), contents)
    if len(holder) != len(contents):
        return False
    return all(map(is_, holder.values(), contents.values())) and all(map(is_, holder, contents))


def put_back(holder: Any, contents: Any) -> None:
    """Give a holder contents, unless it has them."""
    if has(holder, contents):
        return
    base = _base_of(type(holder))
    if base is None:
        holder.fill(contents)
        return
    base.clear(holder)
    if base is OrderedDict:
        for key, value in contents.items():
            base.__setitem__(holder, key, value)
    elif base in (dict, set):
        base.update(holder, contents)
    else:
        base.extend(holder, contents)


def are_same(before: Any, after: Any) -> bool:
    """Whether contents are the same objects in the same order."""
    if len(before) != len(after) or not all(map(is_, before, after)):
        return False
    return not isinstance(before, dict) or all(map(is_, before.values(), after.values()))


def holders_of(value: Any, of_callables: bool = False) -> list[Any]:
    """Return the holders of an object's state: its items, its attributes, and its slots.

    of_callables: whether attributes of objects that can be called are state, too.
    """
    kind = type(value)
    if kind in PLAIN:
        return [value]
    holders = _holders_of_attributes(value, of_callables)
    if _base_of(kind) is not None:
        return [value, *holders]
    if _is_of(kind, _WEAK):
        return [WeakItems(value)]
    if _is_of(kind, (MutableMapping,)) and not _has_data(value):
        return [ForeignItems(value), *holders]
    return holders


def _holders_of_attributes(value: Any, of_callables: bool = False) -> list[Any]:
    """Return the holders of the attributes of an object that is data."""
    if _is_of(type(value), _OPAQUE) or (callable(value) and not of_callables):
        return []
    try:
        # past its class's own methods
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    holders: list[Any] = [attributes] if type(attributes) is dict else []
    return [*holders, Slots(value)] if slots_of(type(value)) else holders


class Slots:
    """The attributes of an object that stand in no dict, read past its class's own methods."""

    def __init__(self, owner: Any):
        self._owner = owner
        self._slots = slots_of(type(owner))

    def __len__(self) -> int:
        return len(self._slots)

    def read(self) -> dict[str, Any]:
        """Return the names and values of the slots that are set."""
        contents = {}
        for name, slot in self._slots.items():
            try:
                contents[name] = slot.__get__(self._owner)
            except AttributeError:
                # it has no value yet
                continue
        return contents

    def fill(self, contents: Mapping[str, Any]) -> None:
        """Set these slots, and no others."""
        present = self.read()
        for name, slot in self._slots.items():
            if name in contents:
                slot.__set__(self._owner, contents[name])
            elif name in present:
                slot.__delete__(self._owner)


@cache
def slots_of(kind: type) -> Mapping[str, Any]:
    """Return the descriptors of the slots of a class and its bases, by name."""
    return {
        name: slot
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    }


class NamedAttributes:
    """The attributes of some names of a class or a Python module, such as counters."""

    def __init__(self, owner: type | types.ModuleType, names: Sequence[str]):
        self._owner = owner
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def read(self) -> dict[str, Any]:
        """Return the names and values of the attributes of this object itself."""
        attributes = vars(self._owner)
        return {name: attributes[name] for name in self._names if name in attributes}

    def fill(self, contents: Mapping[str, Any]) -> None:
        """Set these attributes, and no others."""
        present = self.read()
        for name in present.keys() - contents.keys():
            delattr(self._owner, name)
        for name, value in contents.items():
            if name not in present or present[name] is not value:
                setattr(self._owner, name, value)


@cache
def numbers_of(kind: type) -> Sequence[NamedAttributes]:
    """Return the classes of the user that a class is made of, with all their numbers' names."""
    bases = [base for base in kind.__mro__ if not is_of_library(base)]
    names = [
        name
        for base in bases
        for name, value in vars(base).items()
        if type(value) in (int, float) and not name.startswith("__")
    ]
    return [NamedAttributes(base, names) for base in bases] if names else []


def is_of_library(kind: type) -> bool:
    """Whether a class is none of the user's."""
    return kind.__module__.partition(".")[0] in ("torch", "fusedckpt", "builtins")


class CellContents:
    """The value of a variable that functions close over, if it is assigned."""

    def __init__(self, cell: types.CellType):
        self._cell = cell

    def __len__(self) -> int:
        return 1

    def read(self) -> list[Any]:
        """Return the value in a list, an empty one where none is assigned."""
        try:
            return [self._cell.cell_contents]
        except ValueError:
            return []

    def fill(self, contents: Sequence[Any]) -> None:
        """Assign this value, or none."""
        if contents:
            (self._cell.cell_contents,) = contents
        else:
            del self._cell.cell_contents


class WeakItems:
    """The items of a container that refers weakly to objects; its contents do not hold them."""

    def __init__(self, owner: Any):
        self._data = owner.data

    def __len__(self) -> int:
        return len(self._data)

    def read(self) -> Any:
        """Return the items of now, with references in place of objects."""
        return contents_of(self._data)

    def fill(self, contents: Any) -> None:
        """Bring back those items that still live."""
        if isinstance(contents, dict):
            alive: Any = {k: x for k, x in contents.items() if _is_alive(k) and _is_alive(x)}
        else:
            alive = [x for x in contents if _is_alive(x)]
        put_back(self._data, alive)


def _is_alive(part: Any) -> bool:
    return not isinstance(part, weakref.ref) or part() is not None


class ForeignItems:
    """The items of a mapping that is none of Python's own classes, by its own methods."""

    def __init__(self, owner: MutableMapping[Any, Any]):
        self._owner = owner

    def __len__(self) -> int:
        return len(self._owner)

    def read(self) -> dict[Any, Any]:
        """Return the items."""
        return dict(self._owner.items())

    def fill(self, contents: Mapping[Any, Any]) -> None:
        """Set these items, and no others."""
        self._owner.clear()
        self._owner.update(contents)


def restorer(value: Any) -> Callable[[], None]:
    """Return a function that brings the items and attributes of an object back to those of now.

    It writes nothing where nothing changed.
    """
    noted = [(holder, contents_of(holder)) for holder in holders_of(value)]

    def restore() -> None:
        for holder, contents in noted:
            put_back(holder, contents)

    return restore


def trimmer(value: Any) -> Callable[[], None]:
    """Return a function that removes the items that a dict or a list gets from now on."""
    base = _base_of(type(value))
    if base is list:
        count = list.__len__(value)
        return lambda: list.__delitem__(value, slice(count, None))
    if base not in (dict, OrderedDict):
        return lambda: None
    keys = set(base.keys(value))

    def trim() -> None:
        for key in [key for key in base.keys(value) if key not in keys]:
            base.__delitem__(value, key)

    return trim


def parts_of(value: Any) -> list[Any]:
    """Return the objects in a container, and those in the attributes of an object that is data."""
    if type(value) in PLAIN:
        return _listed(contents_of(value))
    if isinstance(value, (str, bytes, bytearray, *_OPAQUE)):
        return []
    if isinstance(value, tuple):
        return [*tuple.__iter__(value)]
    if _base_of(type(value)) is None and not _has_data(value):
        if isinstance(value, Mapping):
            return [*value.values()]
        if isinstance(value, MutableSequence):
            return [*value]
    return [part for holder in holders_of(value) for part in _listed(contents_of(holder))]


def _listed(contents: Any) -> list[Any]:
    return [*contents.values()] if isinstance(contents, dict) else contents


def nested(tree: Any) -> Iterator[Any]:
    """Yield an object and those inside it, each object but data once."""
    seen = dict[int, Any]()
    todo = [tree]
    while todo:
        value = todo.pop()
        if type(value) not in ATOMS:
            if id(value) in seen:
                continue
            seen[id(value)] = value
            todo += reversed(parts_of(value))
        yield value


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a container or an object with `change` of each part.

    An object without any part that changes is returned itself, a list, dict or set is copied.
    """
    if isinstance(value, (str, bytes, bytearray, *_OPAQUE)):
        return value
    base = _base_of(type(value))
    if base is not None:
        duplicate = _empty_copy(base, value)
        put_back(duplicate, _changed(contents_of(value), change))
        _copy_attributes(value, duplicate, change)
        return duplicate
    if isinstance(value, tuple):
        parts = [*tuple.__iter__(value)]
        changed = [*map(change, parts)]
        if all(map(is_, parts, changed)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, (MutableMapping, MutableSequence)) and not _has_data(value):
        duplicate = copy.copy(value)
        pairs = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        for key, item in [*pairs]:
            duplicate[key] = change(item)
        return duplicate
    contents = [contents_of(holder) for holder in _holders_of_attributes(value)]
    changed = [_changed(each, change) for each in contents]
    if _has_data(value) or not all(map(are_same, contents, changed)):
        try:
            duplicate = object.__new__(type(value))
        except TypeError:
            # of a class written in C, which makes its own objects
            return value
        for holder, each in zip(_holders_of_attributes(duplicate), changed, strict=True):
            put_back(holder, each)
        return duplicate
    return value


def with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `tree` with new containers, and `change` of each tensor, once for each."""
    return _with_tensors(tree, change, {})


def _with_tensors(
    tree: Any, change: Callable[[Tensor], Tensor], known: dict[int, tuple[Any, Any]]
) -> Any:
    if type(tree) in ATOMS:
        return tree
    if id(tree) not in known:
        # an object inside itself refers to the caller's; it lives, so that its id is its own
        known[id(tree)] = tree, tree
        if isinstance(tree, Tensor):
            changed: Any = change(tree)
        else:
            changed = with_parts(tree, lambda part: _with_tensors(part, change, known))
        known[id(tree)] = tree, changed
    return known[id(tree)][1]


def _changed(contents: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(contents, dict):
        return {key: change(x) for key, x in contents.items()}
    return [*map(change, contents)]


def _copy_attributes(value: Any, duplicate: Any, change: Callable[[Any], Any]) -> None:
    pairs = zip(_holders_of_attributes(value), _holders_of_attributes(duplicate), strict=True)
    for holder, other in pairs:
        put_back(other, _changed(contents_of(holder), change))


@cache
def _base_of(kind: type) -> Any:
    return next((base for base in _BUILT_IN if issubclass(kind, base)), None)


@cache
def _is_of(kind: type, bases: tuple[type, ...]) -> bool:
    """Whether a class is one of some bases: isinstance asks an abstract one each time."""
    return issubclass(kind, bases)


def _has_data(value: Any) -> bool:
    """Whether a container has its items in an attribute, as UserDict and UserList do."""
    return isinstance(getattr(value, "__dict__", {}).get("data"), (dict, list))


def _empty_copy(base: Any, value: Any) -> Any:
    """Return a container of the class of another one, without calling the class."""
    duplicate = base.__new__(type(value))
    if isinstance(value, deque):
        deque.__init__(duplicate, (), value.maxlen)
    elif isinstance(value, defaultdict):
        defaultdict.__init__(duplicate, value.default_factory)
    return duplicate
