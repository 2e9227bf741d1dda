"""`python -m fusedckpt [module:factory]`: versions, paths, and the report of `fuse` on a model.

`estimate` says where the memory of a training step goes, without allocating it:

    python -m fusedckpt estimate mine:llama --batch 8 --seq 4096 --dtype bfloat16

`fits` names the longest sequence, or the largest batch, that fits each card:

    python -m fusedckpt fits mine:llama --grows seq --step 1024 --batch 1 --cards 24,48,80
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

import fusedckpt
from fusedckpt.planning.max_size import HEADROOM, WAYS
from fusedckpt.reporting.factory import MadeModel, made_by_factory
from fusedckpt.reporting.memory_text import compared
from fusedckpt.reporting.versions import checkout_commit, installed_versions

_DTYPES_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_FACTORY = (
    "a function without arguments that returns a model, or a tuple that begins with one, "
    "which is fused and named part by part; MODULE is importable from the working directory"
)


def main(arguments: list[str] | None = None) -> int:
    """Print versions and the path of every function; with a factory, a report of its model."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, *others = arguments or [""]
    if command in _COMMANDS:
        return _COMMANDS[command](others)
    parser = _parser("", __doc__)
    parser.add_argument("factory", nargs="?", metavar="MODULE:FACTORY", help=_FACTORY)
    _add_sizes(parser)
    options = parser.parse_args(arguments)
    if any(size is not None for size in (options.batch, options.seq, options.dtype)):
        if options.factory is None:
            parser.error("an estimate needs MODULE:FACTORY")
        return _estimate(arguments)
    factory = None if options.factory is None else _factory(parser, options.factory)
    _print_versions()
    print(*_paths("cpu"), sep="\n")
    for number in range(torch.cuda.device_count()):
        print(*_paths(f"cuda:{number}"), sep="\n")
    if factory is None:
        print("python -m fusedckpt MODULE:FACTORY prints what fuse finds in a model; --help")
        return 0
    made = factory()
    model = made[0] if isinstance(made, (tuple, list)) and made else made
    if not isinstance(model, nn.Module):
        came = type(model).__name__
        parser.error(f"{options.factory}: expected an nn.Module from it, got {came}")
    print(fusedckpt.fuse(model))
    return 0


def _estimate(arguments: list[str]) -> int:
    """Print the estimate of a training step, before and after `fuse`."""
    parser = _parser("estimate", "Say where the memory of a training step goes, without it.")
    parser.add_argument("factory", metavar="MODULE:FACTORY", help=_FACTORY)
    _add_sizes(parser)
    options = parser.parse_args(arguments)
    factory = _factory(parser, options.factory)
    _print_versions()
    sizes = options.batch, options.seq, _DTYPES_BY_NAME.get(options.dtype)
    try:
        made = made_by_factory("estimate", factory, *sizes, optimizer=options.optimizer)
        _print_estimates(made)
    except (TypeError, ValueError) as error:
        parser.error(f"{options.factory}: {error}")
    return 0


def _fits(arguments: list[str]) -> int:
    """Print the largest inputs that fit each card."""
    parser = _parser("fits", "Name the largest inputs that fit each card, by way of training.")
    parser.add_argument("factory", metavar="MODULE:FACTORY", help=_FACTORY)
    _add_sizes(parser)
    parser.add_argument("--cards", default="24,48,80", help="their GiB: 24,48,80")
    grows = ("factory", "seq", "batch")
    parser.add_argument("--grows", choices=grows, default="factory", help="factory: takes a size")
    parser.add_argument(
        "--step", type=int, default=1, metavar="N", help="of which sizes are multiples"
    )
    parser.add_argument("--ways", help=f"some of: {'; '.join(WAYS)}; separated by semicolons")
    parser.add_argument("--slack", type=float, default=HEADROOM, help="share of a card to leave")
    parser.add_argument("--accumulate", action="store_true", help="gradients exist before the step")
    measure = "measure steps on a device, cpu or cuda, from the estimates down"
    parser.add_argument("--measure", metavar="DEVICE", help=measure)
    parser.add_argument("--plot", metavar="FILE", help="draw it, as .png or .svg")
    parser.add_argument("--json", metavar="FILE", help="append the record as a line")
    options = parser.parse_args(arguments)
    factory = _factory(parser, options.factory)
    _print_versions()
    try:
        sizes = fusedckpt.find_max_size(
            factory,
            [f"{card.strip()}GiB" for card in options.cards.split(",")],
            grows=options.grows,
            step=options.step,
            batch=options.batch,
            seq=options.seq,
            dtype=_DTYPES_BY_NAME.get(options.dtype),
            optimizer=None if options.optimizer == "none" else options.optimizer,
            accumulate=options.accumulate,
            ways=tuple(WAYS) if options.ways is None else _split(options.ways),
            slack=options.slack,
            measure=options.measure,
        )
    except (TypeError, ValueError) as error:
        parser.error(f"{options.factory}: {error}")
    print(sizes)
    if options.plot:
        sizes.plot(options.plot)
    if options.json:
        facts = {
            "fusedckpt": fusedckpt.__version__,
            "commit": checkout_commit(),
            "torch_commit": torch.version.git_version,
            **installed_versions(),
        }
        line = {"command": "fits", "line": shlex.join(arguments), **facts, **sizes.to_dict()}
        with Path(options.json).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(";")]


def _print_estimates(made: MadeModel) -> None:
    eager = made.estimated()
    report = fusedckpt.fuse(made.model)
    fused = made.estimated()
    head = f"Estimate of a training step of {eager.model}, {made.inputs}; nothing was allocated"
    print(report, f"{head}\n{compared({'eager': eager, 'fused': fused})}", fused, sep="\n\n")


def _parser(command: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m fusedckpt {command}".rstrip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, metavar="N", help="sequences of a step")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence")
    parser.add_argument("--dtype", choices=_DTYPES_BY_NAME, help="default dtype of the factory")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim: AdamW")


def _print_versions() -> None:
    versions = installed_versions()
    python = versions.pop("python")
    versions |= {name: "none" for name in ("triton", "transformers") if name not in versions}
    packages = (f"{name} {version}" for name, version in versions.items())
    print(f"fusedckpt {fusedckpt.__version__}, Python {python}, {', '.join(packages)}")


def _paths(device: str) -> list[str]:
    """Return lines of the functions that run on each path, by dtypes with the same paths."""
    dtypes: dict[str, list[str]] = {}
    for dtype in _DTYPES_BY_NAME.values():
        functions: dict[str, list[str]] = {}
        for name, path in fusedckpt.backends(device, dtype).items():
            functions.setdefault(path, []).append(name)
        paths = "; ".join(
            f"{path} for {'all' if len(functions) == 1 else ', '.join(names)}"
            for path, names in functions.items()
        )
        dtypes.setdefault(paths, []).append(str(dtype).removeprefix("torch."))
    return [f"{device}:", *(f"  {', '.join(names)}: {paths}" for paths, names in dtypes.items())]


def _factory(parser: argparse.ArgumentParser, spec: str) -> Callable[..., Any]:
    """Import a factory, or end with an error of the command."""
    if ":" not in spec:
        parser.error(f"{spec}: expected module:factory")
    sys.path.insert(0, "")
    try:
        return resolve_name(spec)
    except (AttributeError, ImportError, ValueError) as error:
        parser.error(f"{spec}: {error}")


_COMMANDS = {"estimate": _estimate, "fits": _fits}

if __name__ == "__main__":
    sys.exit(main())
