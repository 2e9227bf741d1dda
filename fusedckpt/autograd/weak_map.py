"""A map from objects to values that keeps no object alive, and tells them apart by identity.

A `WeakKeyDictionary` compares its keys: the class of someone's module may have an `__eq__` that
raises, or returns a tensor.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class WeakMap(Generic[Key, Value]):
    """Values by objects."""

    def __init__(self) -> None:
        # by the objects' ids
        self._entries: dict[int, tuple[weakref.ref[Key], Value]] = {}

    def get(self, key: Key) -> Value | None:
        """Return the value of an object, None where it has none."""
        entry = self._entries.get(id(key))
        # an object that is freed may still have an entry while its id is another's
        return entry[1] if entry is not None and entry[0]() is key else None

    def put(self, key: Key, value: Value) -> Value:
        """Set the value of an object, and return it."""
        number = id(key)
        self._entries[number] = weakref.ref(key, partial(self._forget, number)), value
        return value

    def _forget(self, number: int, reference: Any) -> None:
        entry = self._entries.get(number)
        if entry is not None and entry[0] is reference:
            del self._entries[number]
