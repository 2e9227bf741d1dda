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
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert twice == {}
