"""Another thing, another word: no name of a class, function or constant twice in the library."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    *[path for path in (ROOT / "fusedckpt").rglob("*.py") if "kernels" not in path.parts],
    *(ROOT / "kernels").glob("*.py"),
]
# one computation by several paths: torch's ops that are differentiable, ATen in place, Triton
PATHS = ("fusedckpt/blocks/eager.py", "kernels/")
# layers of Hugging Face's kernels have the names by which models ask for them
NAMED_BY_OTHERS = "fusedckpt/integrations/hub_layers.py"


# constants that still have one name in so many files. No other joins them
SHARED = {
    "BLOCK": 3,
    "CONTAINERS": 2,
    "DTYPES": 3,
    "FEWEST": 2,
    "GROUP": 2,
    "MOST": 2,
    "NAME": 2,
    "OPTIONS": 2,
    "PLAIN": 3,
    "ROWS": 2,
    "SMALL": 2,
    "WRITES": 3,
    "_ACTIVATIONS": 2,
    "_CONSTANT": 2,
    "_DEPTH": 2,
    "_DTYPES": 2,
    "_FUNCTIONS": 2,
    "_KINDS": 2,
    "_LIBRARIES": 3,
    "_MARK": 3,
    "_MIB": 2,
    "_MOST": 4,
    "_MOST_ENTRIES": 3,
    "_MOST_OBJECTS": 2,
    "_OTHERS": 2,
    "_PARTS": 2,
    "_PLAIN": 3,
    "_PRODUCTS": 3,
    "_REENTRANT": 2,
    "_RULES": 2,
    "_SMALL": 2,
    "_UNNAMED": 2,
    "_WITH_STATISTICS": 2,
}


def definitions() -> Iterator[tuple[ast.stmt, str]]:
    """Yield the definitions at the top level of each file, and the file."""
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            yield node, path.relative_to(ROOT).as_posix()


def test_no_name_stands_for_two_things():
    places: dict[str, set[str]] = defaultdict(set)
    for node, file in definitions():
        is_named = isinstance(node, ast.FunctionDef) and node.name[0] != "_"
        if file != NAMED_BY_OTHERS and (is_named or isinstance(node, ast.ClassDef)):
            places[node.name].add(file)
    twice = {
        name: files
        for name, files in places.items()
        if len(files) > 1 and not all(file.startswith(PATHS) for file in files)
    }
    assert twice == {}


def test_no_constant_stands_for_two_things():
    places: dict[str, set[str]] = defaultdict(set)
    for node, file in definitions():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]+", target.id):
                places[target.id].add(file)
    twice = {name: files for name, files in places.items() if len(files) > SHARED.get(name, 1)}
    assert twice == {}
