"""Items of containers and fields of objects, read, copied and restored without their own methods.

A subclass of dict may be read-only, may validate, or may tell others of its changes; diffusers'
configurations are such. So items are read and written by the methods of Python's own classes, and
only where they changed.
"""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.checkpointing.calls import ATOMS

# the classes whose methods read and write the items of a subclass, too
_BUILT_IN: tuple[type, ...] = (OrderedDict, dict, list, deque, set)
# containers that refer weakly to objects, in a dict or set `data`
_WEAK = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
# containers by class; others are objects with attributes
CONTAINERS = (*_BUILT_IN, *_WEAK, tuple, UserDict, UserList)
# objects that are no data: a step does not change them, or they are put back by other means
_OPAQUE = (Tensor, nn.Module, Optimizer, type, types.ModuleType, enum.Enum, *_WEAK)


def parts_of(value: Any) -> list[Any]:
    """Return the objects in a container, and those in the attributes of an object that is data."""
    if type(value) in _BUILT_IN:
        # most are: they have no attributes
        return [item for _, item in _pairs(type(value), value)]
    if isinstance(value, (str, bytes, bytearray, *_OPAQUE)):
        return []
    base = _base_of(value)
    if base is not None:
        values = [item for _, item in _pairs(base, value)]
    elif isinstance(value, tuple):
        return [*tuple.__iter__(value)]
    elif isinstance(value, Mapping) and not _has_data(value):
        return [*value.values()]
    elif isinstance(value, MutableSequence) and not _has_data(value):
        return [*value]
    else:
        values = []
    return values + [*attributes_of(value).values()]


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


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that is data: of its `__dict__` and its slots."""
    if type(value) in _BUILT_IN or isinstance(value, _OPAQUE) or callable(value):
        return {}
    attributes = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots_of(type(value)).items():
        try:
            attributes[name] = slot.__get__(value)
        except AttributeError:
            # it has no value yet
            continue
    return attributes


def restorer(value: Any) -> Callable[[], None]:
    """Return a function that brings the items and attributes of an object back to those of now.

    It writes nothing where nothing changed. Weak containers do not come to hold their objects.
    """
    if type(value) in _BUILT_IN:
        return _restorer_of_items(type(value), value)
    if isinstance(value, _WEAK):
        return _restorer_of_weak(value)
    base = _base_of(value)
    attributes = attributes_of(value)
    before = [] if base is None else _pairs(base, value)
    is_mapping = base is None and isinstance(value, MutableMapping) and not _has_data(value)
    items = [*value.items()] if is_mapping else []

    def restore() -> None:
        if base is not None and not _are_same(before, _pairs(base, value)):
            _refill(base, value, before)
        if is_mapping and not _are_same(items, [*value.items()]):
            value.clear()
            value.update(items)
        _set_attributes(value, attributes)

    return restore


def _restorer_of_items(base: Any, value: Any) -> Callable[[], None]:
    """Return a function that brings the items of a container without attributes back."""
    before = _pairs(base, value)

    def restore() -> None:
        if not _are_same(before, _pairs(base, value)):
            _refill(base, value, before)

    return restore


def _restorer_of_weak(value: Any) -> Callable[[], None]:
    """Return a function that brings back those items of a weak container that still live."""
    base = _base_of(value.data)
    assert base is not None
    before = _pairs(base, value.data)

    def restore() -> None:
        alive = [pair for pair in before if all(_is_alive(part) for part in pair)]
        if not _are_same(alive, _pairs(base, value.data)):
            _refill(base, value.data, alive)

    return restore


def trimmer(value: Any) -> Callable[[], None]:
    """Return a function that removes the items that a dict or a list gets from now on."""
    base = _base_of(value)
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


def refill_dict(container: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Bring the items of a dict back to those of before; write nothing where they are the same."""
    if not _are_same([*before.items()], [*dict.items(container)]):
        _refill(dict, container, [*before.items()])


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a container or an object with `change` of each part.

    An object without any part that changes is returned itself, a list, dict or set is copied.
    """
    if isinstance(value, (str, bytes, bytearray, *_OPAQUE)):
        return value
    base = _base_of(value)
    if base is not None:
        duplicate = _empty_copy(base, value)
        _refill(base, duplicate, [(key, change(item)) for key, item in _pairs(base, value)])
        _set_attributes(duplicate, {k: change(x) for k, x in attributes_of(value).items()})
        return duplicate
    if isinstance(value, tuple):
        parts = [*tuple.__iter__(value)]
        changed = [*map(change, parts)]
        if all(a is b for a, b in zip(parts, changed, strict=True)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, (MutableMapping, MutableSequence)) and not _has_data(value):
        duplicate = copy.copy(value)
        pairs = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        for key, item in [*pairs]:
            duplicate[key] = change(item)
        return duplicate
    attributes = attributes_of(value)
    changed = {name: change(x) for name, x in attributes.items()}
    if _has_data(value) or any(changed[name] is not x for name, x in attributes.items()):
        try:
            duplicate = object.__new__(type(value))
        except TypeError:
            # of a class written in C, which makes its own objects
            return value
        _set_attributes(duplicate, changed)
        return duplicate
    return value


def _base_of(value: Any) -> Any:
    return next((base for base in _BUILT_IN if isinstance(value, base)), None)


def _has_data(value: Any) -> bool:
    """Whether a container has its items in an attribute, as UserDict and UserList do."""
    return isinstance(getattr(value, "__dict__", {}).get("data"), (dict, list))


def _pairs(base: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return keys and items, in order; an item of a sequence or a set is its own key."""
    if issubclass(base, dict):
        return [*base.items(value)]
    return [(item, item) for item in base.__iter__(value)]


def _refill(base: Any, value: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    pairs = [*pairs]
    base.clear(value)
    if issubclass(base, dict):
        for key, item in pairs:
            base.__setitem__(value, key, item)
    else:
        add = base.update if base is set else base.extend
        add(value, [item for _, item in pairs])


def _are_same(before: Any, after: Any) -> bool:
    """Whether pairs are the same objects in the same order."""
    return len(before) == len(after) and all(
        key is other_key and item is other
        for (key, item), (other_key, other) in zip(before, after, strict=True)
    )


def _empty_copy(base: Any, value: Any) -> Any:
    """Return a container of the class of another one, without calling the class."""
    duplicate = base.__new__(type(value))
    if isinstance(value, deque):
        deque.__init__(duplicate, (), value.maxlen)
    elif isinstance(value, defaultdict):
        defaultdict.__init__(duplicate, value.default_factory)
    return duplicate


def _slots_of(kind: type) -> dict[str, Any]:
    """Return the descriptors of the slots of a class and its bases, by name."""
    return {
        name: slot
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    }


def _set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Give an object these attributes and no others, past its own `__setattr__`."""
    present = attributes_of(value)
    if _are_same([*attributes.items()], [*present.items()]):
        return
    slots = _slots_of(type(value))
    for name, slot in slots.items():
        if name in attributes:
            slot.__set__(value, attributes[name])
        elif name in present:
            slot.__delete__(value)
    if hasattr(value, "__dict__"):
        refill_dict(
            value.__dict__, {name: x for name, x in attributes.items() if name not in slots}
        )


def _is_alive(part: Any) -> bool:
    return not isinstance(part, weakref.ref) or part() is not None
