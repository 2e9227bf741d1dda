"""The state for which a module's forward was proven equal, read in every call.

A forward is proven equal for the state that it read while it was recorded: classes, numbers, flags
and callables of the module and its children. A match has that state by name, as guards. When a
module is swapped they are compiled into a reader: rows in the order in which a call walks from the
module to its children, each of which costs a few look-ups and no call.

A reader holds names and constants, and nothing of a module: a call walks anew to the modules that
are there now. So nothing has to be told of a change, a replaced module is not kept alive, and
copies and pickles of a module need no other reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing.adapters import base_of, is_dequantizing
from fusedckpt.fusing.replica import Path
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import notes_of
from fusedckpt.outside.reads import MISSING, NONE, OutsideReads, are_equal_values


class Guard(NamedTuple):
    """The state of one module for which a match holds."""

    # the names of the children that lead to it
    path: Path
    # its class, None for the swapped module itself
    kind: type[nn.Module] | None
    # the number of its children, None for any
    num_children: int | None
    # attributes that were read, each as the names that lead to it, and their values
    reads: tuple[tuple[Path, Any], ...]


class Guards(NamedTuple):
    """The state for which a match holds."""

    # of the module and of those inside
    modules: tuple[Guard, ...] = ()
    # of the code outside
    outside: OutsideReads = NONE

    def without_root(self) -> Guards:
        """Return the guards without the module's own, for a module around the one that matched."""
        return self._replace(modules=tuple(guard for guard in self.modules if guard.path))


def child_at(module: nn.Module, path: Path) -> nn.Module | None:
    """Return the module at a path of names, below adapters; None if there is none."""
    child: nn.Module | None = module
    for name in path:
        child = None if child is None else child._modules.get(name)
        if child is not None and "base_layer" in child._modules:
            child = base_of(child)
    return child


class Reader:
    """Guards as rows, parents first: a call reads the modules that they are about.

    paths: of further modules to read.
    """

    def __init__(self, guards: Guards, paths: Iterable[Path] = ()):
        self.guards = guards
        self.outside = guards.outside.rows
        by_path = {guard.path: guard for guard in guards.modules}
        # the places of modules among those that `read` returns
        self.places: dict[Path, int] = {}
        # for each its parent's place and its name there, both None for the module itself; its full
        # name; and the guard's class, number of children and attributes
        rows: list[Any] = []
        for path in ((), *by_path, *paths):
            for prefix in (path[:length] for length in range(len(path) + 1)):
                if prefix in self.places:
                    continue
                _, kind, num_children, reads = by_path.get(prefix, Guard(prefix, None, None, ()))
                names = (self.places[prefix[:-1]], prefix[-1]) if prefix else (None, None)
                values = tuple((first, more, value) for (first, *more), value in reads)
                self.places[prefix] = len(rows)
                rows.append((*names, prefix, kind, num_children, values))
        self.rows = tuple(rows)
        self.watches_hooks = any(guard.kind is not None for guard in guards.modules)

    def __reduce__(self) -> Any:
        return Reader, (self.guards, tuple(self.places))

    def read(self, module: nn.Module) -> tuple[NotFused | None, list[Any], bool]:
        """Return the first change since the recording, the modules, and whether they are usual.

        The change is None if there is none; it names the child that was replaced or has hooks, or
        the changed attribute. Usual ones are of the very classes that were recorded, without
        adapters around them.
        """
        parts: list[Any] = []
        is_usual = True
        change = None
        for parent, name, path, kind, num_children, reads in self.rows:
            part: Any = module
            if name is not None:
                part = outer = parts[parent]._modules.get(name)
                if part is not None and "base_layer" in part._modules:
                    part = base_of(part)
                is_usual = is_usual and part is outer and type(part) is kind
                if part is None or (
                    type(part) is not kind and kind not in (None, _original_class(part))
                ):
                    change = NotFused("child", ".".join(path))
                    break
            parts.append(part)
            if num_children is not None and len(part._modules) != num_children:
                change = NotFused("child", ".".join(path))
            for first, more, value in reads:
                parameters = part._parameters
                # mostly a bias that is None, for which torch would search by a call of its own
                is_none = value is None and first in parameters
                now: Any = parameters[first] if is_none else getattr(part, first, MISSING)
                for attribute in more:
                    now = getattr(now, attribute, MISSING)
                if now is not value and not (type(now) is type(value) and now == value):
                    change = change or NotFused("changed", ".".join((*path, first, *more)))
            if change is not None:
                break
        for read, holder, name, value, place in self.outside:
            now = read(holder, name, MISSING)
            if now is not value and not are_equal_values(now, value):
                change = change or NotFused("changed", place.words)
                break
        # one call for all parts, as usually no part has a hook
        if self.watches_hooks and has_hooks(*parts[1:]):
            paths = [path for path, place in self.places.items() if 0 < place < len(parts)]
            hooked = next(p for p in paths if has_hooks(parts[self.places[p]]))
            change = NotFused("hook", ".".join(hooked))
        return change, parts, is_usual

    def change(self, module: nn.Module) -> NotFused | None:
        """Return the first change in a module since it was recorded, None if nothing changed."""
        return self.read(module)[0]


def _original_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before it was swapped, nn.Linear for a linear that dequantizes."""
    if is_dequantizing(module):
        return nn.Linear
    original = notes_of(module).original
    return type(module) if original is None else original.kind
