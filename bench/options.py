"""Options of commands: checked numbers, options that repeat, defaults that differ on a GPU."""

from __future__ import annotations

from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def _number(kind: Callable[[str], Any], accepts: Callable[[Any], bool], what: str) -> Any:
    def convert(text: str) -> Any:
        with suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise ArgumentTypeError(f"expected {what}, got {text!r}")

    return convert


POSITIVE = _number(int, lambda x: x > 0, "a positive integer")
NATURAL = _number(int, lambda x: 0 <= x < 2**63, "an integer in [0, 2^63)")
FRACTION = _number(float, lambda x: 0 <= x < 1, "a number in [0, 1)")


class _Append(Action):
    """Collects an option that may be repeated; a value given twice counts once."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option: Any = None) -> None:
        earlier = getattr(namespace, self.dest)
        earlier = () if earlier is self.default else earlier
        setattr(namespace, self.dest, tuple(dict.fromkeys([*earlier, values])))


class Options(ArgumentParser):
    """The parser of a command; `gpu` values are the defaults where it runs on a GPU.

    preset: defaults by name that come before the command's own, on every device.
    """

    def __init__(
        self, command: str, text: str | None, device: str, preset: dict[str, Any] | None = None
    ):
        usage = f"python -m bench {command} [options]"
        super().__init__(f"python -m bench {command}", usage=usage, description=text)
        self.command = command
        self.device = device
        self.preset = preset or {}

    def one(self, name: str, text: str, cpu: Any = None, gpu: Any = None, **how: Any) -> None:
        """Add an option with a default."""
        default = gpu if gpu is not None and self.device != "cpu" else cpu
        default = self.preset.get(name, default)
        if default not in (None, ()):
            many = isinstance(default, tuple)
            text += f"; default: {', '.join(map(str, default)) if many else default}"
        self.add_argument(f"--{name}", help=text, default=default, **how)

    def count(self, name: str, text: str, cpu: int, gpu: int | None = None) -> None:
        """Add a positive number."""
        self.one(name, text, cpu, gpu, type=POSITIVE, metavar="N")

    def many(self, name: str, text: str, cpu: Any = (), gpu: Any = None, **how: Any) -> None:
        """Add an option that may be repeated."""
        text = f"may be repeated: {text}"
        self.one(name, text, cpu, gpu, **{"action": _Append, "metavar": "NAME", **how})

    def flag(self, name: str, text: str) -> None:
        """Add a switch."""
        self.add_argument(f"--{name}", help=text, action="store_true")

    def dtype(self, choices: Sequence[str] = DTYPES) -> None:
        """Add the dtype of all tensors."""
        self.one("dtype", "dtype of every tensor", "float32", "bfloat16", choices=choices)

    def seed(self) -> None:
        """Add the random seed."""
        self.one("seed", "random seed", 0, type=NATURAL, metavar="N")

    def place(self, files: str, has_device: bool = True) -> None:
        """Add the device and the folder for files."""
        if has_device:
            text = "cpu, cuda or cuda:N; default: cuda where a GPU is visible"
            self.add_argument("--device", help=text, default=self.device)
        self.one("out", f"folder for {files}", Path("bench/out"), type=Path, metavar="DIR")
