"""Swap the layers of a model in place for those that keep only their inputs, and back.

A swap changes a module's class and nothing else: the module object, its Parameters, hooks,
children and state_dict stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fusedckpt._wanted import Names, Wanted, patterns
from fusedckpt.autograd import levels
from fusedckpt.autograd.levels import LEVELS
from fusedckpt.checks import Checks
from fusedckpt.fuse_report import FuseReport
from fusedckpt.held import child_at
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.sequential import Sequential
from fusedckpt.match_mlps import mlp_swap
from fusedckpt.match_norms import norm_swap
from fusedckpt.match_sequentials import apart, blocks_of
from fusedckpt.swapped import MARK, Swap, is_made, subclass, unfit_layer, within

__all__ = ["FuseReport", "fuse", "unfuse"]


def fuse(
    model: nn.Module,
    *,
    save: str = "inputs",
    only: Names = None,
    skip: Names = None,
    norm: bool = True,
    mlp: bool = True,
    linear: bool = True,
    verify: bool = True,
) -> FuseReport:
    """Swap, in place, the layers of `model` that keep more for backward than they need.

    Found by what they are made of and what they compute, not by their classes:

    - norms: nn.RMSNorm, nn.LayerNorm, subclasses that inherit their forward, and RMSNorms of any
      class that rounds as torch, Llama or Gemma do;
    - MLPs and gated MLPs of any class: two or three linears (gate and up may be packed, weights may
      lie as [in, out]), an activation of `functional.linear_act`, dropouts;
    - a linear with its activation, of any class;
    - an nn.Sequential with [norm,] linear, activation, linear, or part of that.

    A swapped module gets a subclass of its class, or fusedckpt's where it was one of torch's; a
    call that was not proven to be the same (inside dropout, another dtype, a child replaced or
    hooked since) runs the old forward. Parameters, hooks, module names and the state_dict stay;
    `unfuse` restores the classes. What is fused already stays as it is.

    Args:
        model: any module; itself a norm, an MLP or a Sequential, too.
        save: what blocks with an activation keep, "inputs", "gate" or "preact", see `functional`;
            without a gate "gate" means "inputs".
        only, skip: names of modules, or patterns as fnmatch has them; a list of them, or one.
        norm, mlp, linear: whether norms, MLPs, and linears with a norm or activation are swapped.
        verify: hold every module's output and gradients, before it is swapped, against its own on
            random numbers: errors against float64 at most twice its own plus 8 epsilons. A module
            that differs stays and is named. What a module of an unknown class computes is found by
            running it in any case. Nothing of the model is run with its own weights, and neither
            its gradients, its buffers nor the random state change.

    Returns:
        What was swapped, what was left as it is and why, and what one token of training keeps.

    Raises:
        TypeError: `model` is no nn.Module, or names or `save` are no strings.
        ValueError: `save` is no level.
        An error leaves the model as it was.
    """
    _check_module("fuse", model)
    levels.check("fuse", save, LEVELS)
    wanted = Wanted(patterns("only", only), patterns("skip", skip), norm, mlp, linear)
    report = FuseReport()
    # all are planned before anything is touched
    planned: list[tuple[nn.Module, Swap]] = []
    inside: set[nn.Module] = set()
    checks = Checks(verify)
    for name, module in model.named_modules():
        if module in inside:
            continue
        for swap in _planned(name, module, save, wanted, checks, report):
            planned.append((module, swap))
            if not _drops_inside(module, swap):
                # what it computes, its children are not asked for
                inside.update(() if issubclass(swap.to, Sequential) else module.modules())
    for module, swap in planned:
        swap.apply(module)
    return report


def _planned(
    name: str, module: nn.Module, save: str, wanted: Wanted, checks: Checks, report: FuseReport
) -> Iterator[Swap]:
    """Yield how a module is swapped, if at all; add to the report what will be and what not."""
    if MARK in module.__dict__ or type(module).__module__.startswith("fusedckpt."):
        return
    matchers: dict[str, Callable[[nn.Module], Swap | str | None]] = {
        "norm": partial(norm_swap, found=checks.norms),
        "mlp": partial(mlp_swap, save=save, confirmed=checks.confirmed),
    }
    if isinstance(module, nn.Sequential):
        whole = _whole(module, save, checks) if wanted.mlp or wanted.linear else None
        if whole is None:
            yield from _sequential(name, module, save, wanted, checks, report)
            return
        matchers = {"mlp": lambda _: whole}
    if any(_is_lazy(layer) for layer in (module, *module.children())):
        return
    for kind, match in matchers.items():
        if not wanted.has(name, kind) and not (kind == "mlp" and wanted.has(name, "linear")):
            continue
        swap = match(module)
        if isinstance(swap, str):
            report.leave(name, kind, swap)
        elif swap is not None and wanted.has(name, swap.kind):
            obstacle, saved = _unfit(module, swap.attributes, *module.modules()), None
            if obstacle is None:
                obstacle, saved = checks.of(module, swap)
            if obstacle is not None:
                report.leave(name, swap.kind, obstacle)
                continue
            report.swap(name, swap.kind, swap.change, saved)
            yield swap
            return


def _whole(parent: nn.Sequential, save: str, checks: Checks) -> Swap | None:
    """Return how a Sequential is swapped that is one block which no run of its layers is."""
    kinds = [block.swap.kind for block in blocks_of(parent, save)]
    found = None if "mlp" in kinds else mlp_swap(parent, save, checks.confirmed)
    if not isinstance(found, Swap) or (kinds and found.kind == "linear"):
        return None
    return found


def _sequential(
    prefix: str,
    parent: nn.Sequential,
    save: str,
    wanted: Wanted,
    checks: Checks,
    report: FuseReport,
) -> Iterator[Swap]:
    save = within(save, ("inputs", "preact"))
    attributes = {"save": save}
    blocks = {_join(prefix, block.name): block for block in blocks_of(parent, save)}
    for name, reason in apart(parent).items():
        if wanted.has(_join(prefix, name), "linear"):
            report.leave(_join(prefix, name), "linear", reason)
    meant = {n: b for n, b in blocks.items() if wanted.has(n, b.swap.kind)}
    if not meant:
        return
    # one layer that no kernel takes, or a block that is not meant, keeps the Sequential as it is
    obstacle = (
        _own_forward(parent)
        or _unfit(parent, attributes)
        or next(
            filter(None, (unfit_layer(layer) for b in blocks.values() for layer in b.layers)), None
        )
    )
    if obstacle is None and len(meant) < len(blocks):
        obstacle = "another block of its Sequential is not to be fused"
    for name, block in meant.items():
        saved = None
        if obstacle is None:
            obstacle, saved = checks.of(nn.Sequential(*block.layers), block.swap)
        if obstacle is None:
            report.swap(name, block.swap.kind, block.swap.change, saved)
    if obstacle is None:
        is_plain = type(parent) is nn.Sequential
        to = Sequential if is_plain else subclass(Sequential, type(parent))
        yield Swap("mlp", "", to, attributes, ())
        return
    for name, block in meant.items():
        report.leave(name, block.swap.kind, obstacle)


def _drops_inside(module: nn.Module, swap: Swap) -> bool:
    """Whether a block drops as it is, so that its children run while training."""
    rates = getattr(swap.attributes.get("_fusedckpt_plan"), "rates", ())
    return any(getattr(child_at(module, path), name) > 0 for path, name in rates)


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse`: restore every original class, and return the model.

    Works after training, deepcopy, pickling and loading. Layers built as fusedckpt's stay.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: a fused module has changed its class since, by parametrization or sharding.
            Nothing is changed then.
    """
    _check_module("unfuse", model)
    swapped = [(name, m) for name, m in model.named_modules() if MARK in m.__dict__]
    for name, module in swapped:
        kind = type(module)
        if kind not in (LayerNorm, RMSNorm, Sequential) and not is_made(kind):
            where = name or "the model"
            raise ValueError(f"unfuse: {where} became a {kind.__name__}: undo that first")
    for _, module in swapped:
        original, attributes = module.__dict__.pop(MARK)
        for attribute in attributes:
            del module.__dict__[attribute]
        module.__class__ = original
    return model


def _check_module(name: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be an nn.Module, got {type(model).__name__}")


def _is_lazy(module: nn.Module) -> bool:
    """Whether a module's parameters have no shape yet."""
    return any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _own_forward(parent: nn.Sequential) -> str | None:
    kind = type(parent)
    if kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__:
        return None
    return f"{kind.__name__} is a subclass of nn.Sequential with a forward of its own"


def _unfit(module: nn.Module, attributes: dict[str, Any], *layers: nn.Module) -> str | None:
    """Return why ours cannot stand for this module, None if it can."""
    kind = type(module).__name__
    if "forward" in module.__dict__:
        return f"the forward of the {kind} was replaced"
    for attribute in attributes:
        if hasattr(module, attribute):
            return f"the {kind} has an attribute {attribute} already"
    return next(filter(None, map(unfit_layer, (module, *layers))), None)
