"""JSON lines and the records made of them: what is not as it must be is told by file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

__all__ = ["Line", "append", "blamed", "build", "lines", "save"]

T = TypeVar("T")
# what `json` calls them
NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
NAMES |= {float: "a number", int: "a whole number"}


class Line(NamedTuple):
    """What a line holds; where: the file and the line's number."""

    where: str
    record: dict[str, Any]

    @property
    def is_capacity(self) -> bool:
        """Whether it is of `bench capacity`, else of `bench run`."""
        return "memory" in self.record


def lines(path: Path) -> list[Line]:
    """Read a file, leaving out a last line that a crash cut off, with a warning.

    Raises ValueError, naming file and line, for what is no JSON object; OSError where there is no
    file.
    """
    data = path.read_bytes()
    texts = data.splitlines()
    found = []
    for number, text in enumerate(texts, 1):
        where = f"{path}:{number}"
        if number == len(texts) and not data.endswith(b"\n") and not _is_json(text):
            print(f"{where}: left out, the line is unfinished", file=sys.stderr)
            break
        with blamed(where):
            found.append(Line(where, _expect(dict, json.loads(text.decode()), "the line")))
    return found


def save(record: Any, path: Path) -> None:
    """Write a dataclass as JSON; a number that is not finite stays NaN or Infinity."""
    path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def append(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Add a line each, in the place of a last one that was cut off."""
    texts = [json.dumps(record) + "\n" for record in records]
    with path.open("a+b") as file:
        file.seek(0)
        before = file.read()
        end = before.rfind(b"\n") + 1
        if _is_json(before[end:]):
            file.write(b"\n")
        else:
            file.truncate(end)
        file.write("".join(texts).encode())


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text.decode())
    except (ValueError, RecursionError):
        return False
    return True


@contextmanager
def blamed(where: str) -> Iterator[None]:
    """Name the line in whatever is wrong with it."""
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where}: not a result of bench run or capacity ({error})") from error


def build(kind: type[T], value: Any) -> T:
    """Make a record of what JSON holds of it, by its annotations.

    Raises ValueError naming the field that is not of its type, TypeError for one that is missing.
    """
    return cast(T, _made(kind, value, kind.__name__))


def _made(kind: Any, value: Any, name: str) -> Any:
    outer, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if outer is UnionType:
        (some,) = (one for one in inner if one is not NoneType)
        return None if value is None else _made(some, value, name)
    if outer is tuple:
        items = enumerate(_expect(list, value, name))
        return tuple(_made(inner[0], item, f"{name}[{index}]") for index, item in items)
    if types := {} if outer else get_type_hints(kind):
        if unknown := _expect(dict, value, name).keys() - types.keys():
            raise ValueError(f"{name} has no {', '.join(sorted(unknown))}")
        made = {key: _made(types[key], item, f"{name}.{key}") for key, item in value.items()}
        return kind(**made)
    return _expect(outer or kind, value, name)


def _expect(kind: Any, value: Any, name: str) -> Any:
    # JSON writes 1.0 and 1 alike, and True is no number
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{name} is not {NAMES[kind]}")
    return value
