"""`python -m bench schedule LAYER`: tensors a layer's forward and backward make, read and free.

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


def prepare(args: Namespace) -> Namespace:
    """Refuse options that the layer does not have."""
    _, shapes = LAYERS[args.layer]
    leaves = {"x": (), "norm": (), **shapes}
    for name in args.wanted:
        if name not in leaves:
            raise ValueError(f"--wanted {name} is none of {', '.join(leaves)}")
    has = {"linear_act": {"save"}, "norm_linear": {"norm"}}
    given = {"save": args.save != "inputs", "norm": args.norm is not None}
    given |= {"residual": args.residual, "chunks": args.chunks is not None}
    known = set(given) if args.layer.endswith("mlp") else has.get(args.layer, set())
    for name, is_given in given.items():
        if is_given and name not in known:
            raise ValueError(f"{args.layer} has no --{name}")
    if args.save == "gate" and args.layer != "gated_mlp":
        raise ValueError(f"{args.layer} has no --save gate")
    return args


def run(args: Namespace) -> int:
    """Print the schedules."""
    with dispatch.forced_path("aten"):
        print("\n".join(lines(args)))
    return 0


def lines(args: Namespace) -> Iterator[str]:
    """Yield the lines of a layer's forward and backward."""
    y = _result(args)
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
    if args.layer in ("rms_norm", "layer_norm"):
        return getattr(functional, args.layer)(x, (d,), leaf("norm", (d,)))
    if args.layer == "linear_act":
        return functional.linear_act(x, *weights, activation=activation, save=args.save)
    if args.layer == "norm_linear":
        norm = NormSpec(args.norm or "rms", leaf("norm", (d,)), None)
        return functional.norm_linear(x, norm, weights)
    norm = None if args.norm is None else NormSpec(args.norm, leaf("norm", (d,)), None)
    options: Any = {"norm": norm, "residual": args.residual, "chunks": args.chunks}
    options |= {"activation": activation, "save": args.save}
    if args.layer == "mlp":
        fc1, fc2 = weights
        return functional.mlp(x, fc1, None, fc2, None, **options)
    gate, up, down = weights
    return functional.gated_mlp(x, gate, up, down, **options)


def _widths(call: Any) -> dict[str, str]:
    """Return the features of each value, and the shape of each parameter's gradient, by name."""
    letters = {size: key for key, size in SIZES.items()}
    shapes = [() if meta is None else meta.shape for meta in call.metas]
    found = {
        name: letters[width] for name, (width, _) in call.described(shapes, call.metas).items()
    }
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
