"""Which module is an MLP, gated MLP or linear with its activation, and what it computes exactly.

Any module with one to four matrices may be one. Its forward is recorded, in several shapes and
dtypes, in training and not; the recording says which linears there are, what stands between them
and what else is read. No class and no attribute is known by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusedckpt.fusing import left, parity
from fusedckpt.fusing.held import Block, Path, child_at
from fusedckpt.fusing.recording import Recording, record
from fusedckpt.fusing.spying import rates_of
from fusedckpt.fusing.structure import block_of, features_of, sizes_of
from fusedckpt.fusing.swapped import FusedMLP, MLPPlan, Swap, subclass

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHAPE = (2, 3)
# in what else it has to be the same
_RUNS: dict[str, dict[str, Any]] = {
    "for one token": {"shape": (1, 1)},
    "for long inputs": {"shape": (3, 4096)},
    "for two dimensions": {"shape": (5,)},
    "for four dimensions": {"shape": (2, 1, 3)},
    "for strided inputs": {"shape": _SHAPE, "strided": True},
    "while training": {"shape": _SHAPE, "training": True},
    "for long inputs in training": {"shape": (3, 4096), "training": True},
    "under autocast": {"shape": _SHAPE, "autocast": True},
}
# not every forward takes these
_MAY_RAISE = ("for two dimensions", "for four dimensions", "for strided inputs")
_MODULES = 16


def mlp_swap(module: nn.Module, save: str) -> Swap | str | None:
    """Return how an MLP is swapped, the reason why it cannot be, or None for what is none."""
    if isinstance(module, (FusedMLP, nn.ModuleList, nn.ModuleDict)):
        return None
    if type(module).forward is nn.Linear.forward or not _may_be_block(module):
        return None
    plan = _plan(module)
    if not isinstance(plan, MLPPlan):
        return plan
    if any(_is_alone(child, module) for child in module.children()):
        return None
    return _swap(module, plan, save)


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has as many parameters as a block, few layers, and reads one input."""
    layers = [*module.modules()]
    slots = [p for layer in layers[:_MODULES] for p in layer._parameters.values() if p is not None]
    if len(layers) > _MODULES or any(is_lazy(p) or 0 in p.shape for p in slots):
        return False
    dims = [p.dim() for p in slots]
    return (
        1 <= dims.count(2) <= 4
        and dims.count(1) <= 4
        and len(dims) == dims.count(1) + dims.count(2)
        and parity.takes_one(module)
    )


def _is_alone(child: nn.Module, parent: nn.Module) -> bool:
    """Whether a child has all parameters and is a block itself: then it is the one to swap."""
    own = {id(p) for p in parent.parameters()}
    if own != {id(p) for p in child.parameters()} or not _may_be_block(child):
        return False
    return isinstance(_plan(child), MLPPlan)


def _plan(module: nn.Module) -> MLPPlan | str | None:
    """Record a module; return its block and all that this depends on, or why it is none.

    None for one that does not look like a block either.
    """
    first = _first_recording(module)
    block = block_of(first)
    if isinstance(block, str):
        return block if left.holds(module) else None
    width = first.shapes[0][-1:]
    found = [first]
    for when, how in _RUNS.items():
        recording = record(module, **{**how, "shape": (*how["shape"], *width)})
        if recording.log.stop is not None:
            return f"{recording.log.stop} {when}"
        if block_of(recording) != block and not (recording.y is None and when in _MAY_RAISE):
            return f"{type(module).__name__} computes something else {when}"
        found.append(recording)
    own = next(module.parameters()).dtype
    dtypes = [own]
    for dtype in _DTYPES:
        recording = record(module, (*_SHAPE, *width), dtype)
        if dtype != own and block_of(recording) == block:
            dtypes.append(dtype)
            found.append(recording)
    return _pinned(module, block, found, tuple(dtypes))


def _first_recording(module: nn.Module) -> Recording:
    """Return a recording for the first width that the forward takes, the inner ones last."""
    shapes = [tuple(p.shape) for p in module.parameters() if p.dim() == 2]
    widths = dict.fromkeys([*(s[1] for s in shapes), *(s[0] for s in shapes)])
    found = [record(module, (*_SHAPE, width)) for width in widths]
    is_worth = (lambda r: r.y is not None, lambda r: r.log.stop is not None, lambda r: True)
    return next(r for worth in is_worth for r in found if worth(r))


def _pinned(
    module: nn.Module, block: Block, recordings: list[Recording], dtypes: tuple[torch.dtype, ...]
) -> MLPPlan:
    """Return the plan for all that the recordings read, and with the dropouts."""
    log = recordings[0].log
    for recording in recordings[1:]:
        for path, reads in recording.log.reads.items():
            log.reads.setdefault(path, {}).update(reads)
    rates = [
        (path, name)
        for path in log.kinds
        for name in rates_of(child_at(module, path) or module)
        if (name,) in log.reads.get(path, {})
    ]
    shape = recordings[0].shapes[0]
    dropouts = [
        path for path, _ in rates if path and isinstance(child_at(module, path), nn.Dropout)
    ]
    last = next((path for path in dropouts if _drops_result(module, shape, path, block)), None)
    inside = tuple(rate for rate in rates if rate[0] != last)
    return MLPPlan(block, log.held({*rates}), inside, last, dtypes)


def _drops_result(module: nn.Module, shape: tuple[int, ...], path: Path, block: Block) -> bool:
    """Whether a dropout comes after the block and nothing after it.

    If it drops everything, the result is the block's times zeros.
    """
    found = record(module, shape, training=True, dropping=path)
    y = found.y
    if y is None or y.kind != "point" or len(y.of) != 2 or y.of[1].kind != "number":
        return False
    return block_of(replace(found, y=y.of[0])) == block


def _swap(module: nn.Module, plan: MLPPlan, save: str) -> Swap:
    block = plan.block
    details = [block.activation, *([f"packed, {block.packed} first"] if block.packed else [])]
    details += ["weights as [in, out]"] if any(one.transposed for one in block.linears) else []
    parameters = dict(_parameters(module))
    shapes = {path: tuple(p.shape) for path, p in parameters.items()}
    small = sizes_of(block, shapes)
    return Swap(
        "linear" if block.kind == "linear_act" else "mlp",
        f"{type(module).__name__} -> {block.kind} ({', '.join(details)})",
        subclass(FusedMLP, type(module)),
        {"_fusedckpt_plan": plan, "save": save},
        (features_of(block, shapes),),
        (features_of(block, small),),
        {id(parameters[path]): shape for path, shape in small.items()},
        _numbers(plan, shapes, small),
    )


def _parameters(module: nn.Module, path: Path = ()) -> Iterator[tuple[Path, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield (*path, name), parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _parameters(child, (*path, name))


def _numbers(
    plan: MLPPlan, shapes: dict[Path, tuple[int, ...]], small: dict[Path, tuple[int, ...]]
) -> dict[tuple[Path, str], Any]:
    """Return numbers for a replica: sizes that are as small as its parameters are, no rates."""
    sizes: dict[int, int] = {}
    for path, shape in small.items():
        sizes.update(zip(shapes[path], shape, strict=True))
    half = {size // 2: to // 2 for size, to in sizes.items() if size % 2 == to % 2 == 0}
    found = {
        (held.path, names[0]): (half | sizes)[value]
        for held in plan.held
        for names, value in held.reads
        if len(names) == 1 and type(value) is int and value in (half | sizes) and value > 1
    }
    last = [] if plan.last is None else [(plan.last, "p")]
    return found | dict.fromkeys([*plan.rates, *last], 0.0)
