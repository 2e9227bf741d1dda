"""Which module is an MLP, gated MLP or linear with its activation, and what it computes exactly.

Found by structure: children that are linears, an activation and dropouts, and nothing else. Shapes
give the parts that each linear may play; running the module on random numbers in float64 tells
which it does play, with which activation, and where it drops. No class and no attribute is known by
its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt import parity
from fusedckpt.autograd.hooks import has_hooks
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.parity import is_transposed
from fusedckpt.structure import (
    TOL,
    Layout,
    Parts,
    activation_of,
    layouts,
    parts_of,
    shape_of,
)
from fusedckpt.swapped import FusedMLP, MLPPlan, Swap, subclass


def mlp_swap(module: nn.Module, save: str) -> Swap | str | None:
    """Return how an MLP is swapped, the reason why it cannot be, or None for what is none."""
    if isinstance(module, (FusedMLP, nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return None
    parts = parts_of(module)
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    counts = [tensor.shape[0] for tensor in own.values() if tensor.dim() == 3]
    if len(counts) > 1 and len({*counts}) == 1 < counts[0]:
        return "its weights are 3-dimensional: a mixture of experts is not fused"
    known = {name: activation_of(act) for name, act in parts.activations.items()}
    if any(known.values()):
        obstacle = _beside(parts, own)
    elif own or parts.others or not any(layouts(parts.linears)):
        # attention too has linears, and what looks like activations
        return None
    else:
        obstacle = None
    obstacle = obstacle or _unfit_children(parts, known)
    if obstacle is not None or not parts.linears:
        return obstacle if known else None
    if not parity.takes_one(module):
        return f"the forward of {type(module).__name__} takes more than an input" if known else None
    names = [name for name in known.values() if name] or [n for n in ACTIVATIONS if n != "identity"]
    found = _first_equal(module, parts, names, save)
    if found is None and known:
        return f"the forward of {type(module).__name__} is not that of an MLP of its layers"
    return found


def _beside(parts: Parts, own: dict[str, Any]) -> str | None:
    """Return why a module with an activation is no MLP alone, None if it may be."""
    wrapped = parts.others if all(map(_wraps_linear, parts.others.values())) else {}
    for name, child in wrapped.items():
        return f"{name}: {type(child).__name__} is no plain nn.Linear"
    if not parts.linears or not (own or parts.others):
        return None
    beside = ", ".join([*own, *parts.others])
    return f"its linears and activation stand beside {beside}: no module computes them alone"


def _unfit_children(parts: Parts, known: dict[str, str | None]) -> str | None:
    """Return why the layers cannot be computed as one, None if they may be."""
    if not parts.linears:
        return None
    for name, child in parts.linears.items():
        if not is_transposed(child) and type(child) is not nn.Linear:
            return f"{name}: {type(child).__name__} is no plain nn.Linear"
    for name, act in parts.activations.items():
        if known[name] in (None, "identity"):
            return f"{name}: {act} is no activation that can be fused"
    for name, child in (parts.linears | parts.activations | parts.dropouts).items():
        if has_hooks(child):
            return f"{name}: a hook watches it, or its forward was replaced"
    dtypes = sorted({str(linear.weight.dtype) for linear in parts.linears.values()})
    return f"its weights have several dtypes: {', '.join(dtypes)}" if len(dtypes) > 1 else None


def _wraps_linear(child: nn.Module) -> bool:
    """Whether a layer stands for a linear, as adapters do."""
    return (
        any(isinstance(inner, nn.Linear) for inner in child.children())
        and len([*child.modules()]) <= 12
    )


def _first_equal(module: nn.Module, parts: Parts, names: list[str], save: str) -> Swap | str | None:
    """Return the first swap that the module's shapes allow and its numbers confirm."""
    for layout in layouts(parts.linears):
        probe = _Probe(module, layout)
        if probe.expected(False, None) is None:
            continue
        for name in names:
            swap = _swap(module, parts, layout, name, save)
            if probe.is_equal(swap, False, None):
                return next(_with_dropouts(probe, swap, parts), None) or (
                    f"{type(module).__name__} computes something else while training"
                )
    return None


def _swap(module: nn.Module, parts: Parts, layout: Layout, activation: str, save: str) -> Swap:
    linears = [parts.linears[name] for name in layout.linears]
    # whatever else of the module's own its forward may use
    own = {k: v for k, v in module.__dict__.items() if not k.startswith("_")}
    same = parts.activations | parts.identities | {k: v for k, v in own.items() if callable(v)}
    rates = [k for k, v in own.items() if "drop" in k and type(v) in (int, float)]
    plan = MLPPlan(
        layout.kind,
        layout.linears,
        tuple(type(linear) for linear in linears),
        tuple(is_transposed(linear) for linear in linears),
        activation,
        layout.packed,
        tuple(same.items()),
        rates=tuple(rates),
    )
    details = [activation, *([f"packed, {layout.packed} first"] if layout.packed else [])]
    details += ["weights as [in, out]"] if any(plan.transposed) else []
    return Swap(
        "linear" if layout.kind == "linear_act" else "mlp",
        f"{type(module).__name__} -> {layout.kind} ({', '.join(details)})",
        subclass(FusedMLP, type(module)),
        {"_fusedckpt_plan": plan, "save": save},
        (shape_of(linears[0])[1],),
        (layout.features,),
        layout.sizes,
    )


def _with_dropouts(probe: _Probe, swap: Swap, parts: Parts) -> Iterator[Swap]:
    """Yield the swap with its place for dropouts, where that is what the module does in training.

    Tried in turn: they do nothing, one drops from the result, they drop inside.
    """
    plan: MLPPlan = swap.attributes["_fusedckpt_plan"]
    names = tuple(parts.dropouts)
    for last, inside in ((None, ()), *((name, ()) for name in names), (None, names)):
        changed = {"_fusedckpt_plan": plan._replace(last=last, dropouts=inside)}
        found = replace(swap, attributes=swap.attributes | changed)
        if all(probe.is_equal(found, True, p) for p in (0.0, 0.5)):
            yield found


class _Probe:
    """A module's results on random numbers in float64, and whether swapping changes them."""

    def __init__(self, module: nn.Module, layout: Layout):
        self.module = module
        self.draw = parity.Draw(module, (layout.features,), layout.sizes)
        self.found: dict[Any, Tensor | None] = {}

    def expected(self, training: bool, p: float | None) -> Tensor | None:
        """Return what the module computes, None where it cannot."""
        if (training, p) not in self.found:
            clone = parity.replica(self.module, self.draw.values, training, p)
            self.found[training, p] = self._run(clone)
        return self.found[training, p]

    def is_equal(self, swap: Swap, training: bool, p: float | None) -> bool:
        """Whether the swapped module computes the same; p: of all dropouts, None as they are."""
        expected = self.expected(training, p)
        clone = parity.swapped_replica(swap, self.module, self.draw.values, training, p)
        found = None if expected is None else self._run(clone)
        return (
            expected is not None
            and found is not None
            and found.shape == expected.shape
            and torch.allclose(found, expected.to(found.dtype), rtol=TOL, atol=TOL)
        )

    def _run(self, clone: nn.Module) -> Tensor | None:
        with parity.undisturbed(torch.device("cpu")), torch.no_grad():
            torch.manual_seed(0)
            try:
                y = parity.call(clone, self.draw.x)
            except Exception:  # arbitrary code of others, on numbers that may not fit it
                return None
        return y if isinstance(y, Tensor) else None
