"""The messages of the library, read from its code: `python -m tests.messages` prints them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fusedckpt.layers.fallbacks import WORDS

ROOT = Path(__file__).parents[1]
FILES = sorted(
    [
        *[path for path in (ROOT / "fusedckpt").rglob("*.py") if "kernels" not in path.parts],
        *(ROOT / "kernels").glob("*.py"),
    ]
)


class Message(NamedTuple):
    """A text that a user may read."""

    # path:line
    place: str
    # the class that is raised, "warn", or "reason"
    kind: str
    # values are the code of their expressions, in braces
    text: str


def text_of(node: ast.expr) -> str:
    """Return a string as it is written, with the code of values in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else text_of(part)
            for part in node.values
        )
    return f"{{{ast.unparse(node)}}}"


def raised_or_warned(path: Path) -> Iterator[Message]:
    """Yield the messages of a file's exceptions and warnings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise):
            call = node.exc
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            call = node
        else:
            continue
        if isinstance(call, ast.Call) and call.args:
            kind = "warn" if call is node else ast.unparse(call.func)
            place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
            yield Message(place, kind, text_of(call.args[0]))


def messages() -> Iterator[Message]:
    """Yield the messages of all exceptions and warnings, then the reasons of `fuse`'s report."""
    for path in FILES:
        yield from raised_or_warned(path)
    for key, (clause, remedy) in WORDS.items():
        yield Message(f"fusedckpt/layers/fallbacks.py:{key}", "reason", f"{clause}; {remedy}")


if __name__ == "__main__":
    print("| where | kind | message |\n|---|---|---|")
    for message in messages():
        print(f"| {message.place} | {message.kind} | {message.text} |")
