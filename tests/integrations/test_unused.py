"""What is not used is not imported, and all of it is in the wheel."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


LIBRARIES = {"transformers", "accelerate", "axolotl", "lightning", "torchtitan", "peft"}
LIBRARIES |= {"llamafactory", "swift"}
# a library's module, and those of libraries that it needs itself
_TRAINER = {"fusedckpt.integrations.transformers"}
BUILT_ON = {f"fusedckpt.integrations.{name}": _TRAINER for name in ("axolotl", "swift")}


def imported(node):
    """Yield the modules and names that a file imports as it is imported itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif not isinstance(child, ast.FunctionDef):
            yield from imported(child)


def test_no_library_is_imported_unless_used():
    """Each by the module of its name alone, which nothing imports; Axolotl needs transformers."""
    own = {f"fusedckpt.integrations.{name}": name for name in LIBRARIES}
    for path in (ROOT / "fusedckpt").glob("**/*.py"):
        names = {*imported(ast.parse(path.read_text(encoding="utf-8")))}
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert {name.split(".")[0] for name in names} & LIBRARIES <= {own.get(module)}, path
        others = {name for name in own if any(n.startswith(name) for n in names)}
        assert others <= BUILT_ON.get(module, set()), path


def test_wheels_have_every_folder():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.search(r"packages = \[(.*?)\]", text, re.DOTALL)
    assert packages is not None
    folders = {path.parent for path in (ROOT / "fusedckpt").glob("**/*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(re.findall(r'"(.+?)"', packages[1])) == names | {"fusedckpt.kernels"}
