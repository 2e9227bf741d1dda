"""The commands' options, readable without torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.defaults import (
    BLOCKS,
    CAPACITY_DEFAULTS,
    CASE_NAMES,
    CLASSICS_DEFAULTS,
    DEMO_DEFAULTS,
    MODEL_NAMES,
    RUN_DEFAULTS,
    TUNE_DEFAULTS,
)
from bench.sizes import DEFAULT_TOKENS, SIZES

__all__ = [
    "add_capacity_options",
    "add_classics_options",
    "add_compare_options",
    "add_demo_options",
    "add_gpu_options",
    "add_plot_options",
    "add_run_options",
    "add_table_options",
    "add_tune_options",
    "add_ways_options",
]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number in [0, 1), got {text!r}")
    return value


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected an integer in [0, 2^63), got {text!r}")
    return int(text)


def _default(name: str, table: dict[str, dict[str, Any]]) -> str:
    cpu, cuda = (table[kind][name] for kind in ("cpu", "cuda"))
    return f"default: {cpu} on a CPU, {cuda} on a GPU"


def _add_place(parser: argparse.ArgumentParser, files: str) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    _add_out(parser, files)


def _add_out(parser: argparse.ArgumentParser, files: str) -> None:
    text = f"folder for {files}; default: bench/out"
    parser.add_argument("--out", type=Path, default=Path("bench/out"), metavar="DIR", help=text)


def _add_names(parser: argparse.ArgumentParser) -> None:
    text = "only implementations with this in their name, and eager; may be repeated"
    parser.add_argument("--only", action="append", metavar="TEXT", help=text)
    text = "no implementations with this in their name; may be repeated"
    parser.add_argument("--skip", action="append", metavar="TEXT", help=text)


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `demo`; what depends on the device stays None where it is not given."""
    for name, what in (
        ("steps", "training steps"),
        ("layers", "transformer blocks"),
        ("dim", "width of the residual stream, a multiple of the head size 64"),
        ("seq", "bytes per sequence"),
        ("batch", "sequences per step"),
    ):
        text = f"{what}; {_default(name, DEMO_DEFAULTS)}"
        parser.add_argument(f"--{name}", type=_positive, metavar="N", help=text)
    text = (
        "what to train: the demo's own transformer, or one of transformers' classes; default: own"
    )
    parser.add_argument("--model", choices=MODEL_NAMES, default="own", help=text)
    text = "kind of the own model's MLPs: plain with GELU, or gated; default: gelu"
    parser.add_argument("--mlp", choices=("gelu", "swiglu"), default="gelu", help=text)
    text = f"type of every parameter and activation; {_default('dtype', DEMO_DEFAULTS)}"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=text)
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="default: 0")
    _add_place(parser, "demo.json and demo.png")


def _add_journal(parser: argparse.ArgumentParser) -> None:
    # from supervisor.py to the process that it starts
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`; what depends on the device stays None where it is not given."""
    text = f"what to measure, may be repeated; default: all of {', '.join(CASE_NAMES)}"
    parser.add_argument("--case", action="append", choices=CASE_NAMES, metavar="NAME", help=text)
    text = f"widths, may be repeated: {', '.join(SIZES)}; {_default('size', RUN_DEFAULTS)}"
    parser.add_argument("--size", action="append", choices=SIZES, metavar="NAME", help=text)
    cpu, cuda = DEFAULT_TOKENS.values()
    text = f"rows of x, may be repeated; default: {cpu} on a CPU, {cuda} on a GPU, 48 at tiny"
    parser.add_argument("--tokens", type=_positive, action="append", metavar="N", help=text)
    text = f"type of every tensor; {_default('dtype', RUN_DEFAULTS)}"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    text = f"timed rounds; {_default('repeat', RUN_DEFAULTS)}"
    parser.add_argument("--repeat", type=_positive, metavar="N", help=text)
    _add_names(parser)
    text = "launch kernels from Python on a GPU, instead of replaying CUDA graphs"
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help=text)
    text = "keep what the file has of this device and commit, and measure the rest"
    parser.add_argument("--resume", action="store_true", help=text)
    _add_place(parser, "run.jsonl")
    _add_journal(parser)


def add_classics_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `classics`; what depends on the device stays None where not given."""
    text = "many convolutions, a deep MLP, or how deep a stack can go; default: all"
    choices = ("conv", "mlp", "depth", "all")
    parser.add_argument("--part", choices=choices, default="all", help=text)
    for name, what in (
        ("layers", "convolutions"),
        ("width", "channels of the convolutions, 320 in the classic net"),
        ("batch", "images per step"),
        ("mlp-layers", "layers of the MLP"),
        ("mlp-width", "width of the MLP and of its input, a square number"),
        ("mlp-batch", "images per step of the MLP"),
        ("depth-dim", "width of the stack, a multiple of the head size 64"),
        ("depth-seq", "tokens per sequence of the stack"),
        ("depth-batch", "sequences per step of the stack"),
        ("steps", "training steps per turn"),
        ("repeat", "turns of every way"),
    ):
        text = f"{what}; {_default(name.replace('-', '_'), CLASSICS_DEFAULTS)}"
        parser.add_argument(f"--{name}", type=_positive, metavar="N", help=text)
    text = f"what a step of the stack may take; {_default('depth_budget', CLASSICS_DEFAULTS)}"
    parser.add_argument("--depth-budget", metavar="SIZE", help=text)
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="default: 0")
    _add_place(parser, "classics.json and classics.png")


def add_ways_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ways`."""
    text = "the function that makes the model and its inputs: package.module:name or file.py:name"
    parser.add_argument("--model", required=True, metavar="MODULE:FACTORY", help=text)
    text = "for activations, of a plan, such as 2GiB; may be repeated; default: three in between"
    parser.add_argument("--budget", action="append", metavar="SIZE", help=text)
    text = "training steps per turn, on the same inputs; default: 2"
    parser.add_argument("--steps", type=_positive, default=2, metavar="N", help=text)
    text = "turns of every way; default: 3"
    parser.add_argument("--repeat", type=_positive, default=3, metavar="N", help=text)
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="default: 0")
    _add_out(parser, "ways.json and ways.png")


def add_capacity_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `capacity`; what depends on the device stays None where not given."""
    defaults = CAPACITY_DEFAULTS
    text = f"what to measure, may be repeated; default: {', '.join(BLOCKS)}"
    parser.add_argument("--case", action="append", choices=CASE_NAMES, metavar="NAME", help=text)
    text = f"widths, may be repeated: {', '.join(SIZES)}; {_default('size', defaults)}"
    parser.add_argument("--size", action="append", choices=SIZES, metavar="NAME", help=text)
    text = f"MiB that forward and backward may add; {_default('memory', defaults)}"
    parser.add_argument("--memory", type=_positive, metavar="MIB", help=text)
    text = f"type of every tensor; {_default('dtype', defaults)}"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    text = f"timed rounds; {_default('repeat', defaults)}"
    parser.add_argument("--repeat", type=_positive, metavar="N", help=text)
    _add_names(parser)
    _add_place(parser, "capacity.jsonl")
    _add_journal(parser)


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`."""
    default = TUNE_DEFAULTS
    text = f"widths, may be repeated; default: {', '.join(default['size'])}"
    parser.add_argument("--size", action="append", choices=SIZES, metavar="NAME", help=text)
    text = f"rows of x, may be repeated; default: {' and '.join(map(str, default['tokens']))}"
    parser.add_argument("--tokens", type=_positive, action="append", metavar="N", help=text)
    text = f"type of every tensor; default: {default['dtype']}"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    text = f"timed rounds; default: {default['repeat']}"
    parser.add_argument("--repeat", type=_positive, metavar="N", help=text)
    text = f"start nothing after that; default: {default['minutes']:g}"
    parser.add_argument("--minutes", type=_minutes, metavar="N", help=text)
    text = "measure plans alone, with the tiles that there are"
    parser.add_argument("--plans", dest="tiles", action="store_false", help=text)
    text = "file to write; default: the user's cache, which layers read"
    parser.add_argument("--cache", type=Path, metavar="FILE", help=text)
    text = "cpu, cuda or cuda:N; default: cuda where there is one"
    parser.add_argument("--device", help=text)


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpu`."""
    text = "how long all steps may take together; default: 9"
    parser.add_argument("--minutes", type=_minutes, default=9.0, metavar="N", help=text)
    text = "folder for results; default: bench/results/gpu-<device>"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "go through the steps on a CPU, at toy sizes"
    parser.add_argument("--allow-cpu", action="store_true", help=text)
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a GPU too")
    text = "take every step again; what earlier calls measured moves to a folder before-N"
    parser.add_argument("--restart", action="store_true", help=text)


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `table`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="what bench run wrote")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")


def add_plot_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plot`."""
    text = "what bench run, capacity, demo or classics wrote"
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    text = "folder for the figures; default: the file's"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `compare`."""
    parser.add_argument("before", type=Path, metavar="A", help="what bench run wrote")
    parser.add_argument("after", type=Path, metavar="B", help="what it wrote later, or elsewhere")
    text = "leave out times that differ by less, as a share; default: 0.05"
    parser.add_argument("--threshold", type=_share, default=0.05, metavar="X", help=text)
