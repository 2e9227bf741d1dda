"""Options of commands: numbers that are checked, and defaults that depend on the device."""

from __future__ import annotations

from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple


class Default(NamedTuple):
    """The value of an option that is not given, on a CPU and on a GPU."""

    cpu: Any
    cuda: Any

    def __str__(self) -> str:
        cpu, cuda = (", ".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in self)
        return cpu if cpu == cuda else f"{cpu} on a CPU, {cuda} on a GPU"


def _number(kind: Callable[[str], Any], accepts: Callable[[Any], bool], what: str) -> Any:
    def convert(text: str) -> Any:
        with suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise ArgumentTypeError(f"expected {what}, got {text!r}")

    return convert


POSITIVE = _number(int, lambda x: x > 0, "a positive integer")
NATURAL = _number(int, lambda x: 0 <= x < 2**63, "an integer in [0, 2^63)")
MINUTES = _number(float, lambda x: 0 < x < 1e6, "a positive number")
FRACTION = _number(float, lambda x: 0 <= x < 1, "a number in [0, 1)")


class _Append(Action):
    """Collects an option that may be repeated; a value given twice is meant once."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option: Any = None) -> None:
        found = getattr(namespace, self.dest)
        found = () if isinstance(found, Default) else found
        setattr(namespace, self.dest, tuple(dict.fromkeys([*found, values])))


class Options:
    """Adds options to a parser."""

    def __init__(self, parser: ArgumentParser):
        self.parser = parser

    def one(self, name: str, text: str, cpu: Any = None, cuda: Any = None, **how: Any) -> None:
        """An option with a default, maybe another one on a GPU."""
        default = Default(cpu, cpu if cuda is None else cuda)
        if cpu not in (None, ()):
            text += f"; default: {default}"
        self.parser.add_argument(f"--{name}", help=text, default=default, **how)

    def count(self, name: str, text: str, cpu: int, cuda: int | None = None) -> None:
        """A positive number."""
        self.one(name, text, cpu, cuda, type=POSITIVE, metavar="N")

    def many(self, name: str, text: str, cpu: Any = (), cuda: Any = None, **how: Any) -> None:
        """An option that may be repeated."""
        text = f"may be repeated: {text}"
        self.one(name, text, cpu, cuda, **{"action": _Append, "metavar": "NAME", **how})

    def flag(self, name: str, text: str) -> None:
        """A switch."""
        self.parser.add_argument(f"--{name}", help=text, action="store_true")

    def file(self, name: str, text: str, metavar: str = "FILE") -> None:
        """A file by position."""
        self.parser.add_argument(name, help=text, type=Path, metavar=metavar)

    def place(self, files: str, device: bool = True) -> None:
        """The device, and the folder for files."""
        if device:
            self.one("device", "cpu, cuda or cuda:N; default: cuda where there is one")
        text = f"folder for {files}"
        self.one("out", text, Path("bench/out"), type=Path, metavar="DIR")

    def names(self) -> None:
        """The options that `run` and `capacity` have in common."""
        self.many("only", "only implementations with this in their name, and eager")
        self.many("skip", "no implementations with this in their name")
        text = "seconds that one step of an implementation may take"
        self.count("timeout", text, 600)
        self.flag("in-process", "measure in this process, for a debugger: a crash ends the command")
