"""Another thing, another word: no name of a class, function or constant twice in the library.

In the tests no module has the name of another, and none computes the same as another: models that
several tests need are in `zoo.py`, with flags.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *[path for path in (ROOT / "fusedckpt").rglob("*.py") if "kernels" not in path.parts],
    *(ROOT / "kernels").glob("*.py"),
]
# one computation by several paths: torch's ops that are differentiable, ATen in place, Triton
PATHS = ("fusedckpt/blocks/eager.py", "kernels/")
# layers of Hugging Face's kernels have the names by which models ask for them
NAMED_BY_OTHERS = "fusedckpt/integrations/hub_layers.py"

# of classes of the tests that derive from one another
DEPTH = 6


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


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """Return the classes of the tests that are modules, and where they are."""
    found = [
        (path.relative_to(ROOT).as_posix(), node)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    modules: dict[str, tuple[str, ast.ClassDef]] = {}
    for _ in range(DEPTH):
        names = {node.name for _, node in modules.values()}
        for file, node in found:
            bases = [ast.unparse(base) for base in node.bases]
            if any(
                x.startswith(("nn.", "torch.nn.")) or x.rpartition(".")[2] in names for x in bases
            ):
                modules[f"{file}:{node.lineno}"] = file, node
    return [*modules.values()]


class Canonical(ast.NodeTransformer):
    """Give variables and attributes numbers, by their order; drop what changes no result."""

    def __init__(self, own: set[str]):
        # attributes of the class itself; those of a base keep their names
        self.own = own
        self.numbers: dict[str, str] = {}
        self.locals: set[str] = set()
        self.in_init = False

    def number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"v{len(self.numbers)}")

    def visit_arg(self, node):
        self.locals.add(node.arg)
        return ast.arg(self.number(node.arg))

    def visit_Name(self, node):
        if self.in_init and (node.id in self.locals or node.id.isupper()):
            return ast.Name("size")
        if isinstance(node.ctx, ast.Store):
            self.locals.add(node.id)
        return ast.Name(self.number(node.id) if node.id in self.locals else node.id)

    def visit_Constant(self, node):
        is_size = self.in_init and type(node.value) is int
        return ast.Name("size") if is_size else node

    def visit_Attribute(self, node):
        text = ast.unparse(node)
        if text.startswith(("nn.functional.", "torch.nn.functional.")):
            return ast.Name(f"F.{node.attr}")
        if text in self.own:
            return ast.Name(self.number(f"self.{node.attr}"))
        self.generic_visit(node)
        return ast.Name(text) if text.startswith(("F.", "nn.", "torch.")) else node

    def visit_Call(self, node):
        self.generic_visit(node)
        func = ast.unparse(node.func)
        if self.in_init and func.startswith("nn.") and func != "nn.Sequential":
            # sizes and biases are flags
            return ast.Call(node.func, [], [])
        return node

    def visit_FunctionDef(self, node):
        self.locals = {"self"}
        if node.body and is_docstring(node.body[0]):
            node.body = node.body[1:]
        node.returns = None
        self.generic_visit(node)
        is_own = not node.name.startswith("__") and node.name != "forward"
        node.name = self.number(f"self.{node.name}") if is_own else node.name
        return node


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def assignments(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield one statement for each attribute, in place of those that unpack."""
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            yield node
            continue
        targets, value = node.targets[0].elts, node.value
        is_repeated = isinstance(value, ast.GeneratorExp)
        values = [value.elt] * len(targets) if is_repeated else getattr(value, "elts", [])
        if len(values) != len(targets):
            yield node
            continue
        for target, one in zip(targets, values, strict=True):
            # a copy, as one expression may be repeated
            yield from ast.parse(f"{ast.unparse(target)} = {ast.unparse(one)}").body


def canonical(source: str) -> str:
    """Return a class with no names of its own: attributes by their order in forward, sizes gone."""
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    found = [x for x in ast.walk(node) if isinstance(x, (ast.Attribute, ast.FunctionDef))]
    stored = {ast.unparse(x) for x in found if isinstance(getattr(x, "ctx", None), ast.Store)}
    names = Canonical(stored | {f"self.{x.name}" for x in found if isinstance(x, ast.FunctionDef)})
    inits = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    others = [x for x in node.body if x not in inits and not is_docstring(x)]
    lines = [ast.unparse(base) for base in node.bases]
    lines += [ast.unparse(names.visit(x)) for x in others]
    names.in_init = True
    for init in inits:
        names.locals = {x.arg for x in ast.walk(init.args) if isinstance(x, ast.arg)} - {"self"}
        body = [x for x in assignments(init.body) if not is_docstring(x)]
        lines += sorted(ast.unparse(names.visit(x)) for x in body)
    return "\n".join(line for line in lines if line != "pass")


def test_no_two_modules_are_equal():
    places: dict[str, list[str]] = defaultdict(list)
    for file, node in classes():
        places[canonical(ast.unparse(node))].append(f"{file}: {node.name}")
    assert [equal for equal in places.values() if len(equal) > 1] == []


def test_no_name_stands_for_two_modules():
    places: dict[str, list[str]] = defaultdict(list)
    for file, node in classes():
        places[node.name].append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


MLP = """
class MLP(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))
"""
OTHER = '''
class FeedForward(nn.Module):
    """With other names, in another order, with sizes by number and no bias."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.second = nn.Linear(32, 16, bias=False)
        self.first = nn.Linear(16, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(hidden)))
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gelu", "silu"),
        ("nn.Linear(16", "nn.Conv1d(16"),
        ("hidden)))", "1)))"),
    ],
)
def test_classes_are_compared_by_what_they_compute(old, new):
    assert canonical(OTHER) == canonical(MLP)
    assert canonical(OTHER.replace(old, new)) != canonical(MLP)
