"""The chain of units that a plan cuts: fused layers, blocks, children of a Sequential."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from fusedckpt.fusing.swapped import FusedMLP, FusedRMSNorm
from fusedckpt.layers.blocks import MLP, GatedMLP, NormLinear
from fusedckpt.layers.linear import Linear
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.sequential import Sequential, runs

__all__ = ["candidates", "has_levels", "is_fused", "named", "parts_of"]

_FUSED = (MLP, GatedMLP, NormLinear, Linear, RMSNorm, LayerNorm, FusedMLP, FusedRMSNorm)


def is_fused(module: nn.Module) -> bool:
    """Whether a level tells the module itself what to keep."""
    if isinstance(module, Sequential):
        return any(run.kind != "layer" for run in runs(list(module)))
    return isinstance(module, _FUSED)


def has_levels(module: nn.Module) -> bool:
    """Whether a level tells the module, or one inside it, what to keep."""
    return any(is_fused(child) for child in module.modules())


def candidates(model: nn.Module, finer: bool = False) -> list[str]:
    """Return the names of the modules that may be units, in order of definition.

    What is in an nn.Sequential, nn.ModuleList or nn.ModuleDict, and in those inside of them, but
    that an nn.Sequential of layers beside as many others is a unit, unless `finer`. Where the rest
    of the model has more layers with parameters than these (a body of attributes, a head that is a
    Sequential), the rest, too. Where there are none of these: the fused layers; else the model's
    own children. A module that is there twice has its first name.
    """
    count = len(model) if _is_container(model) else 0  # type: ignore[arg-type]  # sized
    found = [*_walk("", model, count, finer)]
    inside = [(name, m) for name, m, is_inside in found if is_inside]
    rest = [m for _, m, is_inside in found if not is_inside]
    if inside and _layers(rest) > _layers(m for _, m in inside):
        inside = [(name, m) for name, m, _ in found]
    inside = inside or [*_fused("", model)] or [*model.named_children()]
    first = {module: name for name, module in reversed(inside)}
    return [name for name, module in inside if first.pop(module, None) == name]


def _walk(
    prefix: str, module: nn.Module, count: int, finer: bool
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules into which another falls, and whether each is in a container.

    count: of what the innermost container around holds, 0 outside of any.
    """
    for name, child in module.named_children():
        name = f"{prefix}.{name}" if prefix else name
        if _is_container(child) and (finer or not _is_block(child, count)):
            yield from _walk(name, child, len(child), finer)  # type: ignore[arg-type]  # sized
        elif count or not any(map(_is_container, child.modules())):
            yield name, child, count > 0
        else:
            yield from _walk(name, child, 0, finer)


def _is_block(module: nn.Module, count: int) -> bool:
    """Whether it is a Sequential of layers, one of `count` modules, that is no longer than that."""
    if not isinstance(module, nn.Sequential) or len(module) > count:
        return False
    # several with children of their own are a stage of blocks
    return sum(any(child.children()) for child in module) < 2


def _fused(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        name = f"{prefix}.{name}" if prefix else name
        if is_fused(child):
            yield name, child
        else:
            yield from _fused(name, child)


def _is_container(module: nn.Module) -> bool:
    # one of a single module is none; a fused Sequential computes its children together
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return container and len(module) > 1 and not is_fused(module)


def _layers(modules: Iterable[nn.Module]) -> int:
    """Return how many modules have parameters of their own."""
    inner = {inner for module in modules for inner in module.modules()}
    return sum(any(True for _ in module.parameters(recurse=False)) for module in inner)


def parts_of(unit: nn.Module) -> list[str]:
    """Return the names of the modules in a unit that may run again on their own."""
    found: list[str] = []
    for name, child in () if is_fused(unit) else unit.named_children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        found += [f"{name}.{inner}" for inner in parts_of(child)] if is_list else [name]
    return found


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
