"""Imports run one way, between folders and between files, those that come late included."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import fusedckpt

PACKAGE = Path(fusedckpt.__file__).parent
# what each folder and top file may import: whatever stands before it, where it is named
ALLOWED = {
    "kernels": set(),
    "autograd": {"kernels"},
    "state": {"autograd"},
    "allocations": {"autograd"},
    "memory": {"autograd", "allocations"},
    "blocks": {"kernels", "autograd"},
    "layers": {"kernels", "autograd", "blocks"},
    "functional": {"kernels", "autograd", "layers"},
    "parallel": {"layers"},
    "reference": {"blocks", "functional"},
    "checkpointing": {"kernels", "autograd", "memory", "state"},
    "outside": {"autograd", "state", "layers"},
    "recipes": {"kernels", "autograd", "state", "blocks", "layers"},
    "fusing": {
        *("deprecated", "kernels", "autograd", "reference", "blocks", "layers", "memory", "state"),
        *("checkpointing", "outside", "recipes"),
    },
    "reporting": {
        *("autograd", "allocations", "memory", "state", "layers", "checkpointing", "fusing"),
    },
    "planning": {
        *("autograd", "memory", "state", "blocks", "layers", "checkpointing", "fusing"),
        "reporting",
    },
    "__main__": {"reporting", "planning"},
    "integrations": {
        *("kernels", "autograd", "blocks", "layers", "checkpointing", "fusing", "reporting"),
        "planning",
    },
}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("fusedckpt", *parts)).removesuffix(".__init__")


FILES = {module_of(path): path for path in sorted(PACKAGE.glob("**/*.py"))}
FILES |= {module_of(path): path for path in sorted((PACKAGE / "kernels").glob("*.py"))}


def imports_of(module: str) -> set[str]:
    """Return what a file imports, at whatever time, and what it names in a string to import."""
    names = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            package = module.rsplit(".", node.level)[0] if node.level else ""
            base = ".".join(filter(None, (package, node.module)))
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    # `from fusedckpt import x` names the package too, which imports everything
    return (names & FILES.keys()) - {module, "fusedckpt"}


@cache
def import_graph() -> dict[str, set[str]]:
    return {module: imports_of(module) for module in FILES}


def folder_of(module: str) -> str:
    return module.split(".")[1]


def test_no_circles():
    assert "fusedckpt.autograd.dispatch" in import_graph()["fusedckpt.layers.linear"]
    assert any(module.startswith("fusedckpt.kernels.") for module in import_graph())
    tuple(TopologicalSorter(import_graph()).static_order())


def test_no_circles_in_the_bench():
    graph = {}
    for path in (PACKAGE.parent / "bench").glob("*.py"):
        named = graph.setdefault(path.stem, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "bench":
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bench."):
                named.add(str(node.module).removeprefix("bench."))
    assert len(graph) > 20
    tuple(TopologicalSorter(graph).static_order())


def test_folders_import_what_stands_below():
    wrong = [
        (module, other)
        for module, others in import_graph().items()
        for other in others
        if module != "fusedckpt"
        and folder_of(other) != folder_of(module)
        and folder_of(other) not in ALLOWED[folder_of(module)]
    ]
    assert not wrong


def test_no_module_has_the_name_of_a_public_function():
    functions = {name for name in fusedckpt.__all__ if callable(getattr(fusedckpt, name))}
    assert "checkpoint" in functions
    assert not functions & {module.rpartition(".")[2] for module in FILES}
