"""`python -m fusedckpt [module:factory]`: versions, paths, and the report of `fuse` on a model.

With --batch, --seq or --dtype it estimates the memory of a training step, without allocating it:

    python -m fusedckpt mine:llama --batch 8 --seq 4096 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

import fusedckpt
from fusedckpt.reporting.estimate import estimate

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def main(arguments: list[str] | None = None) -> int:
    """Print versions and the path of every function; with a factory, a report of its model."""
    parser = argparse.ArgumentParser(
        prog="python -m fusedckpt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "factory",
        nargs="?",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns a model, or a tuple that begins with one, "
        "which is fused and named part by part; MODULE is importable from the working directory",
    )
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
    parser.add_argument("--batch", type=int, metavar="N", help="sequences of a step")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence")
    parser.add_argument("--dtype", choices=dtypes, help="default dtype of the factory")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim: AdamW")
    options = parser.parse_args(arguments)
    spec = options.factory
    sizes = options.batch, options.seq, dtypes.get(options.dtype)
    is_estimate = any(size is not None for size in sizes)
    if spec is None and is_estimate:
        parser.error("an estimate needs MODULE:FACTORY")
    try:
        factory = None if spec is None else _factory(spec)
    except (AttributeError, ImportError, ValueError) as error:
        parser.error(f"{spec}: {error}")
    print(f"fusedckpt {fusedckpt.__version__}, Python {platform.python_version()}, {_packages()}")
    if not is_estimate:
        print(*_paths("cpu"), sep="\n")
        for number in range(torch.cuda.device_count()):
            print(*_paths(f"cuda:{number}"), sep="\n")
    if factory is None:
        print("python -m fusedckpt MODULE:FACTORY prints what fuse finds in a model; --help")
        return 0
    if is_estimate:
        try:
            estimated = estimate(factory, *sizes, optimizer=options.optimizer)
        except (TypeError, ValueError) as error:
            parser.error(f"{spec}: {error}")
        print(estimated.report, estimated, sep="\n\n")
        return 0
    made = factory()
    model = made[0] if isinstance(made, (tuple, list)) and made else made
    if not isinstance(model, nn.Module):
        parser.error(f"{spec}: expected an nn.Module from it, got {type(model).__name__}")
    print(fusedckpt.fuse(model))
    return 0


def _packages() -> str:
    versions = [f"torch {torch.__version__}"]
    for name in ("triton", "transformers"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)


def _paths(device: str) -> list[str]:
    """Return lines of the functions that run on each path, by dtypes with the same paths."""
    dtypes: dict[str, list[str]] = {}
    for dtype in _DTYPES:
        functions: dict[str, list[str]] = {}
        for name, path in fusedckpt.backends(device, dtype).items():
            functions.setdefault(path, []).append(name)
        paths = "; ".join(
            f"{path} for {'all' if len(functions) == 1 else ', '.join(names)}"
            for path, names in functions.items()
        )
        dtypes.setdefault(paths, []).append(str(dtype).removeprefix("torch."))
    return [f"{device}:", *(f"  {', '.join(names)}: {paths}" for paths, names in dtypes.items())]


def _factory(spec: str) -> Callable[[], Any]:
    if ":" not in spec:
        raise ValueError("expected module:factory")
    sys.path.insert(0, "")
    return resolve_name(spec)


if __name__ == "__main__":
    sys.exit(main())
