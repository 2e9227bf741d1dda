"""Swap the layers of a model in place for those that keep only their inputs, and back.

A swap changes a module's class and nothing else: the module object, its Parameters, hooks,
children and state_dict stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fusedckpt.autograd import fallbacks, levels
from fusedckpt.autograd.levels import LEVELS
from fusedckpt.fusing import left, reasons, running
from fusedckpt.fusing.fuse_report import FuseReport
from fusedckpt.fusing.held import MARK, Original, Part, child_at
from fusedckpt.fusing.match_sequentials import blocks_of
from fusedckpt.fusing.matcher import Matcher, unfit
from fusedckpt.fusing.running import join
from fusedckpt.fusing.swapped import Swap, is_made, subclass, within
from fusedckpt.fusing.wanted import Names, Wanted, patterns
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.sequential import Sequential

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
            that differs stays and is named. Forwards of unknown classes are recorded on tensors
            without values in any case. Nothing of the model is run with its own weights, and
            neither its gradients, its buffers nor the random state change.

    Returns:
        What was swapped, what was fused before, what was left as it is and why, and what one token
        of training keeps. Printed after a step it tells, too, what did not run fused, and why.

    Raises:
        TypeError: `model` is no nn.Module, or names or `save` are no strings.
        ValueError: `save` is no level, or a pattern of `only` matches nothing.
        An error leaves the model as it was.
    """
    _check_module("fuse", model)
    levels.check("fuse", save, LEVELS)
    wanted = Wanted(patterns("only", only), patterns("skip", skip), norm, mlp, linear)
    report = FuseReport()
    report.watch(model)
    modules = dict(model.named_modules())
    # all are planned before anything is touched
    planned: list[tuple[nn.Module, Swap]] = []
    inside: set[nn.Module] = set()
    matcher = Matcher(save, verify)
    for name, module in modules.items():
        if module in inside:
            continue
        swaps = [*_planned(name, module, wanted, matcher, report)]
        planned += [(module, swap) for swap in swaps]
        made = [module.__dict__, *(swap.attributes for swap in swaps)]
        if any(_computes_inside(module, attributes.get("_fusedckpt_plan")) for attributes in made):
            inside.update(module.modules())
    wanted.check(modules, report.kinds)
    running.forget(model)
    for module, swap in planned:
        swap.apply(module)
    return report


def _planned(
    name: str, module: nn.Module, wanted: Wanted, matcher: Matcher, report: FuseReport
) -> Iterator[Swap]:
    """Yield how a module is swapped, if at all; add to the report what will be and what not."""
    if (original := module.__dict__.get(MARK)) is not None:
        for inner, part in original.parts.items():
            if wanted.has(join(name, inner), part.kind):
                report.keep(join(name, inner), part)
        return
    if type(module).__module__.startswith("fusedckpt."):
        return
    kinds = ["norm", "mlp"]
    if isinstance(module, nn.Sequential):
        if not ((wanted.mlp or wanted.linear) and matcher.is_one_block(module)):
            yield from _sequential(name, module, wanted, matcher, report)
            return
        kinds = ["mlp"]
    reasons: dict[str, str] = {}
    for kind in kinds:
        if not wanted.has(name, kind) and not (kind == "mlp" and wanted.has(name, "linear")):
            continue
        found = matcher.of(module, kind)
        if isinstance(found, str):
            reasons[kind] = found
        elif found is not None and wanted.has(name, found.kind):
            report.swap(name, found.parts[""])
            yield found
            return
    _leave(name, module, reasons, wanted, report)


def _computes_inside(module: nn.Module, plan: Any) -> bool:
    """Whether a plan computes what a module's children would, so that they are not asked for.

    Those of a block that drops as it is run while training.
    """
    if plan is None:
        return False
    rates = getattr(plan, "rates", ())
    return not any(getattr(child_at(module, path), name, 0) > 0 for path, name in rates)


def _leave(
    name: str, module: nn.Module, found: dict[str, str], wanted: Wanted, report: FuseReport
) -> None:
    """Name a module that was not swapped, if it is one that could have been."""
    kind = left.holds(module) or next(iter(found), None)
    if kind is not None and wanted.has(name, kind):
        reason = left.reason_of(module, found.get("norm" if kind == "norm" else "mlp"))
        report.leave(name, kind, reason, type(module).__name__)


def _sequential(
    prefix: str, parent: nn.Sequential, wanted: Wanted, matcher: Matcher, report: FuseReport
) -> Iterator[Swap]:
    save, kind = within(matcher.save, ("inputs", "preact")), type(parent).__name__
    attributes = {"save": save}
    blocks = {block.name: block for block in blocks_of(parent, save)}
    fused = [layer for block in blocks.values() for layer in block.layers]
    for name, reason in left.apart(parent):
        linear = parent.get_submodule(name)
        if linear not in fused and wanted.has(join(prefix, name), "linear"):
            reason = reasons.of_storage(parent) or reasons.of_class(name, linear) or reason
            report.leave(join(prefix, name), "linear", reason, kind)
    meant = {n: b for n, b in blocks.items() if wanted.has(join(prefix, n), b.swap.kind)}
    if not meant:
        return
    # one layer that no kernel takes, or a block that is not meant, keeps the Sequential as it is
    obstacle = (
        reasons.of_storage(parent) or _own_forward(parent) or unfit(parent, attributes, *fused)
    )
    if obstacle is None and len(meant) < len(blocks):
        obstacle = "another block of its Sequential is not to be fused"
    parts: dict[str, Part] = {}
    for name, block in meant.items():
        found = obstacle or matcher.checked(nn.Sequential(*block.layers), block.swap)
        if isinstance(found, str):
            obstacle = found
        else:
            parts[name] = found.parts[""]
            report.swap(join(prefix, name), parts[name])
    if obstacle is None:
        is_plain = type(parent) is nn.Sequential
        to = Sequential if is_plain else subclass(Sequential, type(parent))
        yield Swap("mlp", "", to, attributes, (), parts=parts)
        return
    for name, block in meant.items():
        report.leave(join(prefix, name), block.swap.kind, obstacle, kind)


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
        original: Original = module.__dict__.pop(MARK)
        fallbacks.taken(module)
        for attribute in original.attributes:
            del module.__dict__[attribute]
        module.__class__ = original.kind
    return model


def _check_module(name: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be an nn.Module, got {type(model).__name__}")


def _own_forward(parent: nn.Sequential) -> str | None:
    kind = type(parent)
    if kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__:
        return None
    return f"{kind.__name__} is a subclass of nn.Sequential with a forward of its own"
