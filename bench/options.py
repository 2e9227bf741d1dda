"""The commands' options and their defaults, readable without torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["DEFAULTS", "add_demo_options"]

# sized for a minute: on two CPU cores, on one data-centre GPU
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "steps": 32,
        "layers": 4,
        "dim": 256,
        "seq": 128,
        "batch": 16,
        "dtype": "float32",
    },
    "cuda": {
        "steps": 200,
        "layers": 12,
        "dim": 1024,
        "seq": 1024,
        "batch": 8,
        "dtype": "bfloat16",
    },
}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected an integer in [0, 2^63), got {text!r}")
    return int(text)


def _default(name: str) -> str:
    cpu, cuda = (DEFAULTS[kind][name] for kind in ("cpu", "cuda"))
    return f"default: {cpu} on a CPU, {cuda} on a GPU"


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `demo`; what depends on the device stays None where it is not given."""
    for name, what in (
        ("steps", "training steps"),
        ("layers", "transformer blocks"),
        ("dim", "width of the residual stream, a multiple of the head size 64"),
        ("seq", "bytes per sequence"),
        ("batch", "sequences per step"),
    ):
        text = f"{what}; {_default(name)}"
        parser.add_argument(f"--{name}", type=_positive, metavar="N", help=text)
    text = f"type of every parameter and activation; {_default('dtype')}"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=text)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="default: 0")
    text = "folder for demo.json and demo.png; default: bench/out"
    parser.add_argument("--out", type=Path, default=Path("bench/out"), metavar="DIR", help=text)
