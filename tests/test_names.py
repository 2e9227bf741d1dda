"""Another thing, another word: no name of a class or public function twice in the library."""

from __future__ import annotations

import ast
from collections import defaultdict
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


def test_no_name_stands_for_two_things():
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        if path == ROOT / NAMED_BY_OTHERS:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != "_":
                places[node.name].append(path.relative_to(ROOT).as_posix())
    twice = {
        name: files
        for name, files in places.items()
        if len(set(files)) > 1 and not all(file.startswith(PATHS) for file in files)
    }
    assert twice == {}
