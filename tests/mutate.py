"""Change lines of the library at random, one at a time, and count which of them the tests notice.

    python -m tests.mutate fusedckpt/fusing --tests tests/fusing tests/models --lines 20 --seed 0

Each change is made in a copy of the repository, where pytest runs until its first failure. Prints
a JSON line for each: the place, the code before and after, and the test that failed, or null. The
same arguments give the same changes, so two versions of the tests can be compared. Not run by
pytest.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SWAPPED = [("==", "!="), ("<", ">="), (">", "<="), ("is", "is not"), ("in", "not in")]
OPPOSITE = dict(SWAPPED) | {after: before for before, after in SWAPPED}
OPERATORS: dict[type[ast.AST], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}


class Change(NamedTuple):
    """New text for the part of a file between two offsets."""

    path: Path
    line: int
    start: int
    end: int
    text: str


def main() -> None:
    """Make the changes that the command line asks for, and print what became of each."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("sources", nargs="+", help="files or folders that are changed")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--lines", type=int, default=20, help="how many changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600, help="for the tests of one change")
    args = parser.parse_args()
    changes = [change for path in _files(args.sources) for change in _changes(path)]
    drawn = random.Random(args.seed).sample(changes, min(args.lines, len(changes)))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repository")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        caught = sum(_report(copy, change, args.tests, args.seconds) for change in drawn)
    print(f"{caught} of {len(drawn)} changes were noticed", file=sys.stderr)


def _files(sources: list[str]) -> list[Path]:
    named = [ROOT / source for source in sources]
    found = (path.rglob("*.py") if path.is_dir() else [path] for path in named)
    return sorted(file for files in found for file in files)


def _changes(path: Path) -> Iterator[Change]:
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    for node in _nodes(ast.parse(source)):
        text = _other(node)
        if text is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Change(path.relative_to(ROOT), node.lineno, start, end, text)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Return a node and the nodes in it, but for those in f-strings, which have no places."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _nodes(child)


def _other(node: ast.AST) -> str | None:
    """Return code that does something else than a node, or None."""
    match node:
        case ast.Compare(ops=[operator]):
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            sign = ast.unparse(ast.Compare(ast.Name(""), [operator], [ast.Name("")])).strip()
            return f"{left} {OPPOSITE[sign]} {right}" if sign in OPPOSITE else None
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            return f"bool({ast.unparse(node.operand)})"
        case ast.BinOp() if type(node.op) in OPERATORS:
            return f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
        case ast.Constant(value=bool()):
            return repr(not node.value)
        case ast.Constant(value=int()):
            return f"({node.value + 1})"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return "return None"
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute()]) | ast.AugAssign():
            return "pass"
        case ast.IfExp():
            return f"({ast.unparse(node.orelse)})"
    return None


def _report(copy: Path, change: Change, tests: list[str], seconds: float) -> bool:
    """Run the tests on one change, print the result, and return whether a test failed."""
    path = copy / change.path
    source = path.read_bytes()
    path.write_bytes(source[: change.start] + change.text.encode() + source[change.end :])
    failed = _first_failure(copy, tests, seconds)
    path.write_bytes(source)
    row = {"place": f"{change.path}:{change.line}"}
    row |= {"before": source[change.start : change.end].decode(), "after": change.text}
    print(json.dumps(row | {"failed": failed}), flush=True)
    return failed is not None


def _first_failure(copy: Path, tests: list[str], seconds: float) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-rfE", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:g} s"
    if run.returncode == 0:
        return None
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0][:200] if failures else "pytest stopped"


if __name__ == "__main__":
    main()
