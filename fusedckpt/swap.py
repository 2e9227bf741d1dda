"""Swap the layers of a model in place for those that keep only their inputs, and back.

A swap changes a module's class and nothing else: the module object, its Parameters, hooks,
children and state_dict stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules import activation as activations

from fusedckpt import _check
from fusedckpt.kernels.activations import name_of
from fusedckpt.linear import Linear
from fusedckpt.mlp import MLP_LEVELS
from fusedckpt.norm import LayerNorm, RMSNorm
from fusedckpt.sequential import Run, Sequential, runs, watched

__all__ = ["FuseReport", "fuse", "unfuse"]

# what each norm becomes, and the attributes that it has then and had not before
_NORMS: dict[type[nn.Module], tuple[type[nn.Module], dict[str, Any]]] = {
    nn.RMSNorm: (RMSNorm, {"offset": 0.0, "cast": "torch"}),
    nn.LayerNorm: (LayerNorm, {}),
}
# where a swapped module remembers its original class and the attributes to delete
_MARK = "_fusedckpt_original"
# every activation of torch, so that those which cannot be fused are reported
_ACTIVATIONS = tuple(getattr(activations, name) for name in activations.__all__)


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` did: `swapped` maps a module's name to its change, `left` to the reason."""

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        changes = Counter(self.swapped.values())
        reasons = Counter(self.left.values())
        first = {reason: name or "(root)" for name, reason in reversed(self.left.items())}
        lines = [f"fused {len(self.swapped)} modules, left {len(self.left)}"]
        lines += [f"  {count:4d} x {change}" for change, count in changes.most_common()]
        for reason, count in reasons.most_common():
            others = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"  left {first[reason]}{others}: {reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Swap:
    """One change of class, not yet made."""

    module: nn.Module
    to: type[nn.Module]
    attributes: dict[str, Any]

    def apply(self) -> None:
        self.module.__dict__.update(self.attributes)
        self.module.__dict__[_MARK] = type(self.module), tuple(self.attributes)
        self.module.__class__ = self.to


def fuse(model: nn.Module, *, save: str = "inputs") -> FuseReport:
    """Swap, in place, the layers of `model` that keep more for backward than they need.

    nn.RMSNorm and nn.LayerNorm become fusedckpt's. An nn.Sequential becomes a fusedckpt.Sequential
    where that computes layers as one block: [norm,] linear, activation, linear; linear, activation;
    norm, linear. Its layers stay what they are. Parameters, hooks, module names and the state_dict
    stay; `unfuse` restores the classes. What is fused already stays as it is.

    Args:
        model: any module; itself a norm or a Sequential, too.
        save: what blocks with an activation keep, see `functional.mlp`.

    Returns:
        What was swapped, and what was left as it is and why: subclasses, parametrized or hooked
        layers, replaced forwards, parameters that are not dense local floating-point tensors, and
        activations with other than default parameters.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: `save` is no level of an MLP.
    """
    _check_module("fuse", model)
    _check.level("fuse", save, MLP_LEVELS)
    report = FuseReport()
    # all are planned before anything is touched
    swaps = [*_norm_swaps(model, report), *_sequential_swaps(model, save, report)]
    for swap in swaps:
        swap.apply()
    return report


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse`: restore every original class, and return the model.

    Works after training, deepcopy, pickling and loading. Layers built as fusedckpt's stay.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: a fused module has changed its class since, by parametrization or sharding.
            Nothing is changed then.
    """
    _check_module("unfuse", model)
    swapped = [(name, m) for name, m in model.named_modules() if _MARK in m.__dict__]
    for name, module in swapped:
        if type(module) not in (LayerNorm, RMSNorm, Sequential):
            where = name or "the model"
            raise ValueError(f"unfuse: {where} became a {type(module).__name__}: undo that first")
    for _, module in swapped:
        original, attributes = module.__dict__.pop(_MARK)
        for attribute in attributes:
            del module.__dict__[attribute]
        module.__class__ = original
    return model


def _check_module(name: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be an nn.Module, got {type(model).__name__}")


def _norm_swaps(model: nn.Module, report: FuseReport) -> Iterator[_Swap]:
    for name, module in model.named_modules():
        for original, (to, attributes) in _NORMS.items():
            if not isinstance(module, original) or isinstance(module, to):
                continue
            obstacle = _unfit(module, original, attributes)
            if obstacle is not None:
                report.left[name] = obstacle
                continue
            report.swapped[name] = f"nn.{original.__name__} -> {to.__name__}"
            yield _Swap(module, to, attributes)


def _sequential_swaps(model: nn.Module, save: str, report: FuseReport) -> Iterator[_Swap]:
    attributes = {"save": save}
    for prefix, parent in model.named_modules():
        if not isinstance(parent, nn.Sequential) or isinstance(parent, Sequential):
            continue
        names = [f"{prefix}.{slot}" if prefix else slot for slot in parent._modules]
        layers = list(parent._modules.values())
        blocks = [run for run in runs(layers) if run.kind != "layer"]
        # one layer that no kernel takes keeps the whole Sequential as it is
        obstacle = _unfit(parent, nn.Sequential, attributes) or next(
            filter(None, (_unfit_layer(layer) for run in blocks for layer in run.of(layers))), None
        )
        changes = report.swapped if obstacle is None else report.left
        for run in blocks:
            # a block goes by its linear, as its norm may be swapped too
            linear = run.start + (not isinstance(layers[run.start], nn.Linear))
            changes[names[linear]] = obstacle or _describe(run, layers)
        _report_pairs(report, names, layers, blocks)
        if blocks and obstacle is None:
            yield _Swap(parent, Sequential, attributes)


def _describe(run: Run, layers: list[Any]) -> str:
    parts = [name_of(layer) or f"nn.{type(layer).__name__}" for layer in run.of(layers)]
    return f"{' + '.join(parts)} -> {run.kind}"


def _report_pairs(
    report: FuseReport, names: list[str], layers: list[Any], blocks: list[Run]
) -> None:
    """Say why a linear and the activation after it form no block."""
    inside = {index for run in blocks for index in range(run.start, run.start + run.length)}
    for index, (linear, follower) in enumerate(pairwise(layers)):
        if index in inside or not isinstance(linear, nn.Linear) or isinstance(linear, Linear):
            continue
        if isinstance(follower, _ACTIVATIONS):
            report.left[names[index]] = _inseparable(linear, follower)


def _unfit(module: nn.Module, original: type[nn.Module], attributes: dict[str, Any]) -> str | None:
    """Return why ours cannot stand for this module, None if it can."""
    if type(module) is not original:
        return f"{type(module).__name__} is a subclass of nn.{original.__name__}"
    if "forward" in module.__dict__:
        return f"the forward of the {original.__name__} was replaced"
    for attribute in attributes:
        if hasattr(module, attribute):
            return f"the {original.__name__} has an attribute {attribute} already"
    return _unfit_layer(module)


def _unfit_layer(module: nn.Module) -> str | None:
    """Return why no kernel takes a module's own parameters, None if they do."""
    try:
        _check.tensors(type(module).__name__, dict(module.named_parameters(recurse=False)))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _inseparable(linear: nn.Linear, follower: nn.Module) -> str:
    if name_of(follower) is None:
        return f"{follower} is no activation that can be fused"
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} is a subclass of nn.Linear"
    assert watched(linear) or watched(follower)
    return "a hook watches it or its activation, or a forward was replaced"
