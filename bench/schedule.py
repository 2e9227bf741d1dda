"""Print the tensors that a layer's forward and backward make, read, write over and free.

A line is a call of a kernel: its results, its inputs, results that are written over a tensor
(`h=d_h`), and tensors that are freed after it. On the left are the features of its results, per
row; a gradient of a parameter has the parameter's shape.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.options import POSITIVE, Options
from fusedckpt import NormSpec, functional
from fusedckpt.autograd import dispatch

# features of x and of the hidden layer
SIZES = {"D": 7, "F": 11}
ROWS = 5
# the function of a layer, its activation and the shapes of its weights by name
LAYERS: dict[str, tuple[str | None, dict[str, str]]] = {
    "linear_act": ("gelu", {"weight": "FD"}),
    "norm_linear": (None, {"q": "DD", "k": "DD", "v": "DD"}),
    "mlp": ("gelu", {"fc1": "FD", "fc2": "DF"}),
    "gated_mlp": ("silu", {"gate": "FD", "up": "FD", "down": "DF"}),
    "rms_norm": (None, {}),
    "layer_norm": (None, {}),
}


def options(add: Options) -> None:
    """Add the options."""
    add.add_argument("layer", help="the function", choices=LAYERS)
    add.one("save", "save level", "inputs", choices=("inputs", "gate", "preact"))
    add.one("norm", "a norm before; default: none, but for norm_linear", choices=("rms", "layer"))
    add.flag("residual", "add x to the result")
    add.one("chunks", "chunks of rows", type=POSITIVE, metavar="N")
    add.many("wanted", "gradients: x, norm, or a linear; default: all", metavar="NAME")


def prepare(args: Namespace) -> Namespace:
    """Refuse options that the layer does not have."""
    leaves = ["x", "norm", *LAYERS[args.layer][1]]
    for name in args.wanted:
        if name not in leaves:
            raise ValueError(f"--wanted {name} is none of {', '.join(leaves)}")
    try:
        args.result = _result(args)
    except TypeError as error:
        raise ValueError(f"{args.layer}: {error}") from error
    return args


def run(args: Namespace) -> int:
    """Print the schedules."""
    with dispatch.forced_path("aten"):
        print("\n".join(lines(args)))
    return 0


def lines(args: Namespace) -> Iterator[str]:
    """Yield the lines of a layer's forward and backward."""
    y = args.result
    node: Any = (y[0] if isinstance(y, tuple) else y).grad_fn
    call, saved = node.call, node.saved
    products = call.flags_of(args.save)
    dys = (True,) * len(call.program.results)
    backward = call.backward(node.needs_input_grad[2:], products, dys, any(products))
    widths = _widths(call)
    names = [n for n in saved.names if isinstance(n, str) and n not in call.program.products]
    names += [n for n, flag in zip(call.program.products, products, strict=True) if flag]
    yield "forward"
    yield from _with_widths(saved.forward, widths)
    yield f"saves {', '.join(f'{name} {widths[name]}' for name in names)}"
    yield "backward"
    yield from _with_widths(backward, widths)


def _result(args: Namespace) -> Any:
    """Return the result of a call, of which the wanted gradients are required."""

    def leaf(name: str, shape: Sequence[int]) -> Tensor:
        is_wanted = not args.wanted or name in args.wanted
        return torch.randn(*shape).requires_grad_(is_wanted)

    d = SIZES["D"]
    x, (activation, shapes) = leaf("x", (ROWS, d)), LAYERS[args.layer]
    weights = [leaf(name, [SIZES[key] for key in shape]) for name, shape in shapes.items()]
    options: Any = {"residual": args.residual, "chunks": args.chunks, "activation": activation}
    options = {name: value for name, value in options.items() if value}
    if args.save != "inputs" or activation:
        options["save"] = args.save
    kind = args.norm or ("rms" if args.layer == "norm_linear" else None)
    norm = kind and NormSpec(kind, leaf("norm", (d,)), None)
    function = getattr(functional, args.layer)
    with dispatch.forced_path("aten"):
        if args.layer == "norm_linear":
            return function(x, norm, weights, **options)
        if norm is not None:
            options["norm"] = norm
        if args.layer in ("rms_norm", "layer_norm"):
            return function(x, (d,), leaf("norm", (d,)), **options)
        if args.layer == "mlp":
            weights = [weights[0], None, weights[1], None]
        return function(x, *weights, **options)


def _widths(call: Any) -> dict[str, str]:
    """Return the features of each value, and the shape of each parameter's gradient, by name."""
    letters = {size: key for key, size in SIZES.items()}
    shapes = [() if meta is None else meta.shape for meta in call.metas]
    found = {name: letters[width] for name, (width, _) in call.described.items()}
    found |= {f"d_{name}": width for name, width in found.items()}
    params = zip(call.program.params, shapes[call.num_inputs :], strict=True)
    for name, shape in params:
        found["d_" + re.sub(r"\W", "_", name)] = " x ".join(letters[size] for size in shape)
    return found


def _with_widths(schedule: Any, widths: dict[str, str]) -> Iterator[str]:
    for line in str(schedule).splitlines():
        made = [] if line.startswith("return") else line.split(" = ")[0].split(", ")
        # a gradient that is added to has a number after its name
        named = [widths.get(name) or widths.get(re.sub(r"_\d+$", "", name), "") for name in made]
        yield f"  {', '.join(name for name in named if name):10} {line}"
