"""Recognise MLPs, gated MLPs and linears with an activation.

Any module with one to four matrices may be one. Its forward is recorded in several shapes and
dtypes, in training and eval; the recordings show its linears, the ops between them and the state it
reads. No names of classes or attributes are used.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusedckpt.fusing import adapters, reasons
from fusedckpt.fusing.fused_mlps import FusedMLP, of_chunks
from fusedckpt.fusing.guards import Held, child_at
from fusedckpt.fusing.lookalikes import acts_beside, is_transposed, looks_like
from fusedckpt.fusing.mlp_match import MatchedBlock, MLPMatch, Weight
from fusedckpt.fusing.recomputed_modules import RERUN, Recomputed
from fusedckpt.fusing.recorded_block import block_of, is_bent
from fusedckpt.fusing.recording import Node, Recording, record
from fusedckpt.fusing.replica import Path, rates_of, takes_one
from fusedckpt.fusing.spies import held_by
from fusedckpt.fusing.subclass import subclass
from fusedckpt.fusing.swap import Swap
from fusedckpt.kernels.activations import activation_name_of
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.sequential import Sequential, runs

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHAPE = (2, 3)
# further runs, in which the block has to be the same
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


def mlp_swap(module: nn.Module, save: str, chunks: int | None = None) -> Swap | NotFused | None:
    """Return how an MLP is swapped, the reason why it cannot be, or None for another module."""
    if type(module).forward in (nn.Linear.forward, nn.Module.forward) or not _may_be(module):
        return None
    match = _match(module)
    if not isinstance(match, MLPMatch) or any(_is_alone(c, module) for c in module.children()):
        return None if isinstance(match, MLPMatch) else match
    return _swap(module, match, save, chunks)


def recomputed_swap(module: nn.Module) -> Swap | None:
    """Return the swap of a module of one input that can be run again, as it reads simple state."""
    if not _may_be(module) or looks_like(module) != "mlp" or reasons.of_parts(module):
        return None
    recordings = [_first_recording(module)]
    if recordings[0].y is None:
        return None
    shape = recordings[0].shapes[0]
    recordings += [record(module, shape, training=True), record(module, shape, autocast=True)]
    # a forward that draws in training draws the same again
    if (
        any(recording.y is None for recording in recordings)
        or shape[:-1] != recordings[0].shapes[1][:-1]
    ):
        return None
    match = MLPMatch(RERUN, held_by([recording.log for recording in recordings]))
    change = f"{type(module).__name__} -> recomputed"
    to = subclass(Recomputed, type(module))
    return Swap("mlp", change, to, {"_fusedckpt_match": match}, features=shape[-1:], is_sized=True)


def feed_forward_of(layer: nn.Module) -> nn.Module | None:
    """Return the MLP that a method of a layer is, as a module of the layer's children."""
    kind = type(layer)
    if not isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return None
    forward = type(layer)._ff_block
    if forward not in (nn.TransformerEncoderLayer._ff_block, nn.TransformerDecoderLayer._ff_block):
        return None
    names = ("linear1", "dropout", "linear2", "activation")
    last = "dropout2" if forward is nn.TransformerEncoderLayer._ff_block else "dropout3"
    module = object.__new__(_method(kind, forward))
    children = {n: c for n, c in layer._modules.items() if n in (*names, last)}
    module.__dict__.update(vars(layer), _modules=children)
    return module


@cache
def _method(kind: type[nn.Module], forward: Any) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def lora_swap(module: nn.Module, save: str, chunks: int | None) -> Swap | NotFused:
    """Return how peft's LoRA around a linear is swapped, or why it is not."""
    base = module.get_submodule("base_layer")
    is_conv1d = is_transposed(base)
    if type(base) is not nn.Linear and not is_conv1d:
        return NotFused("lora", type(base).__name__)
    bias = None if base._parameters["bias"] is None else ("base_layer", "bias")
    block = MatchedBlock(
        "linear_act", (Weight(("base_layer", "weight"), bias, is_conv1d),), "identity"
    )
    held = (Held(("base_layer",), type(base), 0, ()),)
    return _swap(module, MLPMatch(block, held, _DTYPES), save, chunks)


def _swap(module: nn.Module, match: MLPMatch, save: str, chunks: int | None) -> Swap:
    block, first = match.block, match.block.linears[0]
    details = [block.activation, *([f"packed, {block.packed} first"] if block.packed else [])]
    details += (
        ["weights as [in, out]"] if any(linear.transposed for linear in block.linears) else []
    )
    details += of_chunks(chunks) if block.kind != "linear_act" else []
    name = "LoRA" if adapters.is_lora(module) else type(module).__name__
    return Swap(
        "linear" if block.kind == "linear_act" else "mlp",
        f"{name} -> {block.kind} ({', '.join(details)})",
        subclass(FusedMLP, type(module)),
        {"_fusedckpt_match": match, "save": save, "chunks": chunks},
        features=(module.get_parameter(".".join(first.weight)).shape[not first.transposed],),
        is_sized=True,
    )


def _may_be(module: nn.Module) -> bool:
    """Whether a module has a block's number of parameters, few layers, and one input."""
    layers = [*module.modules()]
    slots = [p for layer in layers[:_MODULES] for p in layer._parameters.values() if p is not None]
    if len(layers) > _MODULES or any(is_lazy(p) or 0 in p.shape for p in slots):
        return False
    dims = [p.dim() for p in slots]
    matrices, vectors = dims.count(2), dims.count(1)
    is_one = 1 <= matrices <= 4 and vectors <= 4 and len(dims) == matrices + vectors
    return is_one and takes_one(module)


def _is_alone(child: nn.Module, parent: nn.Module) -> bool:
    """Whether a child has all parameters and is itself a block, to be swapped instead."""
    has_all = {*parent.parameters()} == {*child.parameters()}
    return has_all and _may_be(child) and isinstance(_match(child), MLPMatch)


def _match(module: nn.Module) -> MLPMatch | NotFused | None:
    """Record a module; return its block and the state it depends on, or why it is not a block.

    None for one that does not look like a block either.
    """
    first = _first_recording(module)
    block = block_of(first)
    if isinstance(block, NotFused):
        is_one = looks_like(module) or (is_bent(first) and acts_beside(module))
        return block if is_one else None
    width = first.shapes[0][-1:]
    recordings = [first]
    for when, how in _RUNS.items():
        recording = record(module, **{**how, "shape": (*how["shape"], *width)})
        if recording.log.stop is not None:
            return recording.log.stop
        if block_of(recording) != block and not (recording.y is None and when in _MAY_RAISE):
            return NotFused("varies", (type(module).__name__, when))
        recordings.append(recording)
    dtype_of_module = next(module.parameters()).dtype
    dtypes = [dtype_of_module]
    for dtype in _DTYPES:
        recording = record(module, (*_SHAPE, *width), dtype)
        if dtype != dtype_of_module and block_of(recording) == block:
            dtypes.append(dtype)
            recordings.append(recording)
    return _with_dropouts(module, block, recordings, tuple(dtypes))


def _first_recording(module: nn.Module) -> Recording:
    """Return a recording for the first width that the forward takes, the inner ones last."""
    shapes = [tuple(p.shape) for p in module.parameters() if p.dim() == 2]
    widths = dict.fromkeys([*(s[1] for s in shapes), *(s[0] for s in shapes)])
    recordings = [record(module, (*_SHAPE, width)) for width in widths]
    is_worth = (lambda r: r.y is not None, lambda r: r.log.stop is not None, lambda r: True)
    return next(r for worth in is_worth for r in recordings if worth(r))


def _with_dropouts(
    module: nn.Module,
    block: MatchedBlock,
    recordings: list[Recording],
    dtypes: tuple[torch.dtype, ...],
) -> MLPMatch:
    """Return the match for all that the recordings read, and with the dropouts."""
    logs = [recording.log for recording in recordings]
    rates = [
        (path, name)
        for path in logs[0].kinds
        for name in rates_of(child_at(module, path) or module)
        if any((name,) in log.reads.get(path, {}) for log in logs)
    ]
    dropped: dict[str, tuple[Path, str]] = {}
    for rate in rates:
        places = _dropped_by(module, recordings[0].shapes[0], rate, block)
        if not dropped.keys() & places:
            dropped |= dict.fromkeys(places, rate)
    inside = tuple(rate for rate in rates if rate not in dropped.values())
    held = held_by(logs, rates)
    hidden, last = dropped.get("hidden"), dropped.get("last")
    return MLPMatch(block, held, dtypes, inside, hidden=hidden, last=last)


def _dropped_by(
    module: nn.Module, shape: tuple[int, ...], rate: tuple[Path, str], block: MatchedBlock
) -> list[str]:
    """Return the tensor that a block's dropout drops: "hidden", the last linear's input, or "last",
    the result; a function's to "last" alone.

    If it drops everything, these are multiplied by zeros. None if the block is then another one.
    """
    path, name = rate
    is_module = path and isinstance(child_at(module, path), nn.Dropout)
    if not is_module and not _is_probability(module, shape, (*path, name)):
        return []
    recording = record(module, shape, training=True, rate=((*path, name), 1.0))
    y, places = recording.y, []
    if y is not None and _is_dropped(y):
        y, places = y.of[0], ["last"]
    if y is not None and y.kind == "product" and _is_dropped(y.of[0]):
        y, places = replace(y, of=(y.of[0].of[0], *y.of[1:])), [*places, "hidden"]
    if not is_module and places != ["last"]:
        return []
    return places if block_of(replace(recording, y=y)) == block else []


def _is_probability(module: nn.Module, shape: tuple[int, ...], rate: Path) -> bool:
    """Whether a number of a module is, as it is, the probability of one call of F.dropout."""
    for value in (0.25, 0.625):
        log = record(module, shape, training=True, rate=(rate, value)).log
        if log.dropped.count(value) != 1 or {*log.dropped} - {0.0, value}:
            return False
    return True


def _is_dropped(node: Node) -> bool:
    is_product = node.kind == "point" and node.name.rstrip("_") == "mul" and len(node.of) == 2
    return is_product and node.of[1].kind == "number" and node.of[1].name == "zeros"


def blocks_of(
    parent: nn.Sequential, save: str, chunks: int | None = None
) -> dict[str, tuple[dict[str, Any], Swap]]:
    """Return the layers of every block, and the swap of a Sequential of these alone.

    A block goes by its linear's name, as its norm may be swapped too.
    """
    blocks = {}
    for run in runs(parent):
        if run.kind == "layer":
            continue
        name, linear = next((n, m) for n, m in run.layers.items() if isinstance(m, nn.Linear))
        parts = [
            activation_name_of(layer) or f"nn.{type(layer).__name__}"
            for layer in run.layers.values()
        ]
        kind = "mlp" if run.kind == "mlp" else "linear"
        change = f"{' + '.join(parts)} -> {run.kind}"
        change += f" ({of_chunks(chunks)[0]})" if chunks is not None and kind == "mlp" else ""
        features = (linear.in_features,)
        swap = Swap(kind, change, Sequential, {"save": save, "chunks": chunks}, features=features)
        blocks[name] = run.layers, swap
    return blocks
