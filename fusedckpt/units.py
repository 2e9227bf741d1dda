"""The chain of units that a plan cuts: fused layers, blocks, children of a Sequential."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from fusedckpt.layers.blocks import MLP, GatedMLP, NormLinear
from fusedckpt.layers.linear import Linear
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.sequential import Sequential, runs
from fusedckpt.swapped import FusedMLP, FusedRMSNorm

__all__ = ["candidates", "is_fused"]

_FUSED = (MLP, GatedMLP, NormLinear, Linear, RMSNorm, LayerNorm, FusedMLP, FusedRMSNorm)


def is_fused(module: nn.Module) -> bool:
    """Whether a level tells the module itself what to keep."""
    if isinstance(module, Sequential):
        return any(run.kind != "layer" for run in runs(list(module)))
    return isinstance(module, _FUSED)


def has_levels(module: nn.Module) -> bool:
    """Whether a level tells the module, or one inside it, what to keep."""
    return any(is_fused(child) for child in module.modules())


def candidates(model: nn.Module) -> list[str]:
    """Return the names of the modules that may be units, outermost first, in order of definition.

    The children of every nn.Sequential and nn.ModuleList that is in no unit itself; where there are
    none, the fused layers; else the model's own children.
    """
    found = [name for name, _ in _walk("", model)]
    if not found:
        found = [name for name, module in model.named_modules() if name and is_fused(module)]
    return found or [name for name, _ in model.named_children()]


def _walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = [(f"{prefix}.{name}" if prefix else name, m) for name, m in module.named_children()]
    # a fused Sequential computes its children together
    container = isinstance(module, (nn.Sequential, nn.ModuleList)) and len(children) > 1
    if container and not is_fused(module):
        yield from children
        return
    if is_fused(module):
        return
    for name, child in children:
        yield from _walk(name, child)


def named(model: nn.Module, units: Iterable[str | nn.Module]) -> list[str]:
    """Return the names of units that a caller gave by name or as modules.

    Raises:
        TypeError: what came is no list of names and modules.
        ValueError: it is empty, one is not in the model, came twice, or lies in another.
    """
    if isinstance(units, (str, nn.Module)) or not isinstance(units, Iterable):
        came = type(units).__name__
        raise TypeError(f"plan: units must be a list of modules or their names, got a {came}")
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []
    for unit in units:
        name = names.get(unit) if isinstance(unit, nn.Module) else unit
        if not isinstance(name, str) or not name or name not in names.values():
            came = unit if isinstance(unit, str) else type(unit).__name__
            raise ValueError(f"plan: units must be modules inside the model, got {came!r}")
        found.append(name)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"plan: expected units, each of them once, got {found}")
    for name in found:
        if any(name.startswith(f"{other}.") for other in found):
            raise ValueError(f"plan: unit {name} lies inside another unit")
    return found
