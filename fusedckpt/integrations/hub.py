"""A folder of layers for Hugging Face's `kernels`, made from the files of this library.

    python -m fusedckpt.integrations.hub FOLDER

makes a repository as the `kernels` library loads it, for every backend the same files:

    FOLDER/build.toml                           for kernel-builder
    FOLDER/torch-ext/fusedckpt_layers/          layers.py, and in _library/ all that it imports
    FOLDER/build/torch-<backend>/               the same, and metadata.json

`kernels` imports a folder under a name of its own, so imports become relative; names that are
global in a process (torch's ops, attributes of tensors) become the folder's own, so that it runs
beside an installed fusedckpt.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import fusedckpt
from fusedckpt.autograd import arguments

__all__ = ["BACKENDS", "build"]

REPOSITORY_NAME = "fusedckpt-layers"
VERSION = 1
# those of `kernels` on which torch, and triton or ATen, run these layers
BACKENDS = ("cpu", "cuda", "rocm", "xpu")
_PACKAGE = Path(fusedckpt.__file__).parent
_LAYERS = "fusedckpt.integrations.hub_layers"
_LIBRARY = "_library"
_MODULE = REPOSITORY_NAME.replace("-", "_")
# of names that are global in a process, where another version may be, too
ID = f"{_MODULE}_{VERSION}"
_IMPORT = re.compile(r"^(\s*)from fusedckpt(?:\.([\w.]+))? import", re.MULTILINE)
# names of the process: ops of torch.ops.fusedckpt, their library, attributes of tensors
_GLOBAL = re.compile(
    r'(?<=ops\.)fusedckpt\b|\bfusedckpt(?=::|"\s*,\s*"DEF")|(?<=["._])_?fusedckpt_'
)


def build(folder: str | Path, backends: Iterable[str] = BACKENDS) -> Path:
    """Write the folder of layers for Hugging Face's `kernels`, and return it.

    Args:
        folder: is made, or is empty.
        backends: for which of `kernels`' backends, among BACKENDS.

    Raises:
        ValueError: the folder has files, or a backend is not known.
    """
    folder = Path(folder)
    backends = tuple(backends)
    for backend in backends:
        arguments.choice("build", "backends", backend, BACKENDS)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"build: expected an empty folder, {folder} has files: pass a new one")
    source = folder / "torch-ext" / _MODULE
    for path, text in _files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text, encoding="utf-8")
    (folder / "build.toml").write_text(_toml(backends), encoding="utf-8")
    for backend in backends:
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(source, variant)
        metadata = json.dumps(_metadata(backend), indent=2)
        (variant / "metadata.json").write_text(metadata + "\n", encoding="utf-8")
    return folder


def _files() -> Iterator[tuple[Path, str]]:
    """Yield the files of the source folder, each with its text."""
    yield (
        Path("__init__.py"),
        f'"""{REPOSITORY_NAME}: layers that save their inputs."""\n\nfrom . import layers\n',
    )
    yield Path(_LIBRARY, "__init__.py"), ""
    for module in sorted(_imported(_LAYERS)):
        path = _path_of(module)
        text = path.read_text(encoding="utf-8")
        if module == _LAYERS:
            yield Path("layers.py"), _rewritten(text, f".{_LIBRARY}")
        else:
            inner = path.relative_to(_PACKAGE)
            yield Path(_LIBRARY) / inner, _rewritten(text, "." * len(inner.parts))


def _path_of(module: str) -> Path:
    """Return the file of a module of ours; `kernels` may be a link in the package, or a folder."""
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(module: str) -> set[str]:
    """Return the modules of ours that a module imports, it included."""
    modules: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        # `fusedckpt` itself imports everything; `kernels` is a folder without __init__.py
        if name in modules or name == "fusedckpt" or not _path_of(name).is_file():
            continue
        modules.add(name)
        waiting += [*_imports_of(name)]
        if name != module:
            waiting.append(name.rpartition(".")[0])
    return modules


def _imports_of(module: str) -> Iterator[str]:
    """Yield the names that a module imports, at whatever time."""
    for node in ast.walk(ast.parse(_path_of(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            package = module.rsplit(".", node.level)[0] if node.level else ""
            base = ".".join(filter(None, (package, node.module)))
            if base.split(".")[0] == "fusedckpt":
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _rewritten(text: str, root: str) -> str:
    """Return a file's text with imports relative to the library's root, and names of its own."""

    def relative(match: re.Match[str]) -> str:
        indent, module = match.groups()
        separator = "" if root.endswith(".") else "."
        return f"{indent}from {root}{separator if module else ''}{module or ''} import"

    text = _IMPORT.sub(relative, text)
    return _GLOBAL.sub(lambda match: match[0].replace("fusedckpt", ID), text)


def _metadata(backend: str) -> dict[str, object]:
    return {
        "name": REPOSITORY_NAME,
        "id": f"{ID}_{backend}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def _toml(backends: Iterable[str]) -> str:
    names = ", ".join(f'"{backend}"' for backend in backends)
    return (
        f'[general]\nname = "{REPOSITORY_NAME}"\nversion = {VERSION}\nlicense = "Apache-2.0"\n'
        f"backends = [{names}]\n\n[torch-noarch]\n"
    )


def _build_as_asked() -> None:
    parser = argparse.ArgumentParser(prog="python -m fusedckpt.integrations.hub")
    parser.add_argument("folder", help="is made, or is empty")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="of kernels, by commas")
    options = parser.parse_args()
    print(build(options.folder, options.backends.split(",")))


if __name__ == "__main__":
    _build_as_asked()
