"""The chain of units that a plan cuts: fused layers, blocks, children of a Sequential."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.autograd.private import COMPILED_CHILD, compiled_call
from fusedckpt.planning import roles
from fusedckpt.planning.budget import Policy
from fusedckpt.planning.repeated_blocks import RepeatedBlocks, side_by_side
from fusedckpt.reporting.step import Step


def unit_names(model: nn.Module, policy: Policy, units: Any) -> list[str]:
    """Return the names of the modules to plan: the caller's, or those of a rule."""
    if not isinstance(policy, str):
        if units is not None:
            raise ValueError("plan: pass units= or a policy= that lists modules, got both")
        return _named(model, policy)
    names = candidates(model) if units is None else _named(model, units)
    check_count(policy, names)
    return names


def check_count(policy: Policy, names: Sequence[str]) -> None:
    """Refuse a policy of more segments than there are units."""
    rule, _, number = policy.partition(":") if isinstance(policy, str) else ("", "", "")
    if rule == "uniform" and int(number) > len(names):
        raise ValueError(
            f"plan: policy must be from uniform:1 to uniform:{len(names)}, got {policy!r}"
        )


def default_units(step: Step, names: list[str]) -> list[str]:
    """Return the names of a model's default units; names: those that its containers suggest.

    Where entries of a container have containers of repeated blocks inside, a forward shows whether
    these blocks run one after the other, and are units.
    """
    closed = set[str]()
    known = set[str]()
    while nested := {
        name: entries
        for name, entries in RepeatedBlocks(step.model, closed).nested().items()
        if name not in known
    }:
        closed |= side_by_side(step, nested)
        known |= nested.keys()
    return candidates(step.model, closed) if known else names


def levels_of(module: nn.Module) -> tuple[str, ...]:
    """Return the save levels that layers in a module offer, from the most that is saved."""
    offered = {level for child in module.modules() for level in _offered(child) or ()}
    return tuple(level for level in reversed(LEVELS) if level in offered)


def _offered(module: nn.Module) -> tuple[str, ...] | None:
    """Return the levels of a module itself, None where no level sets the tensors that it saves."""
    return getattr(module, "save_levels", None)


def has_levels(module: nn.Module) -> bool:
    """Whether a level sets the tensors that the module, or one inside it, saves."""
    return any(_offered(child) is not None for child in module.modules())


def candidates(model: nn.Module, closed: Collection[str] = ()) -> list[str]:
    """Return the names of the modules that may be units, in order of definition.

    A container (nn.Sequential, nn.ModuleList, nn.ModuleDict) has repeated blocks if two of its
    entries have one class, and two weights each. The entries of containers are units, but those
    with repeated blocks inside: in their place, the entries of the containers inside, and modules
    with parameters beside these. An nn.Sequential of layers beside as many others is a unit.
    Modules outside of containers are units if they offer levels, such as a head with its loss, or
    if they have more layers with parameters than the containers (a body of attributes, a head that
    is a Sequential). Without any containers the units are the fused layers, else the model's
    children. A module that is registered twice has its first name.

    closed: names of containers with entries that run side by side, and are no units.
    """
    parts = [*RepeatedBlocks(model, closed).parts()]
    entries = [part.module for part in parts if part.is_entry]
    others = [part.module for part in parts if not part.is_entry]
    units: list[tuple[str, nn.Module]] = []
    if entries:
        takes_all = _num_layers(others) > _num_layers(entries)
        units = [
            (part.name, part.module)
            for part in parts
            if part.is_entry or takes_all or levels_of(part.module)[1:]
        ]
    units = units or [*_fused("", model)] or [*model.named_children()]
    first_names = {module: name for name, module in reversed(units)}
    return [name for name, module in units if first_names.pop(module, None) == name]


def _fused(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if _offered(child) is not None:
            yield f"{prefix}{name}", child
        else:
            yield from _fused(f"{prefix}{name}.", child)


def _num_layers(modules: Iterable[nn.Module]) -> int:
    """Return how many modules have parameters of their own."""
    inner = {inner for module in modules for inner in module.modules()}
    return sum(any(True for _ in module.parameters(recurse=False)) for module in inner)


def _named(model: nn.Module, units: Iterable[str | nn.Module]) -> list[str]:
    """Return the names of the units that a caller lists by name or as modules."""
    if isinstance(units, (str, nn.Module)) or not isinstance(units, Iterable):
        came = type(units).__name__
        raise TypeError(f"plan: units must be a list of modules or their names, got a {came}")
    names = {module: name for name, module in model.named_modules()}
    unit_names: list[str] = []
    for unit in units:
        name = names.get(unit) if isinstance(unit, nn.Module) else unit
        if not isinstance(name, str) or not name or name not in names.values():
            came = unit if isinstance(unit, str) else type(unit).__name__
            raise ValueError(f"plan: units must be modules inside the model, got {came!r}")
        unit_names.append(name)
    if not unit_names or len(set(unit_names)) < len(unit_names):
        raise ValueError(f"plan: units must list one or more modules, each once, got {unit_names}")
    for name in unit_names:
        if any(name.startswith(f"{other}.") for other in unit_names):
            raise ValueError(f"plan: unit {name} lies inside another unit: pass only one of them")
    return unit_names


def check_model(model: nn.Module) -> None:
    """Refuse a model with units that cannot be given roles."""
    if any(map(roles.is_assigned, model.modules())):
        raise ValueError("plan: another plan is applied to this model: call its undo() first")
    for name, module in model.named_modules():
        # torch.compile(module), and module.compile()
        if compiled_call(module) is not None or COMPILED_CHILD in module._modules:
            raise ValueError(
                f"plan: {name or 'the model'} is compiled, and a plan must be applied before: make "
                "the model anew, plan it, apply the plan, then compile"
            )
        if isinstance(module, nn.SyncBatchNorm) and _has_peers(module.process_group):
            raise ValueError(
                f"plan: {name or 'the model'} is a SyncBatchNorm, whose forward waits for other "
                "ranks, but only one rank measures: plan first, then convert_sync_batchnorm"
            )
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError("plan: the model is sharded: make it anew, plan it, then shard it")


def _has_peers(group: Any) -> bool:
    is_alone = not dist.is_available() or not dist.is_initialized()
    return not is_alone and dist.get_world_size(group) > 1
