"""Walk over a model's modules, and find the swaps of norms, MLPs, linears and experts.

A module that is none of these itself may hold one: a Sequential with runs that can be fused, or
a layer with a method that is an MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from fusedckpt.fusing import adapters, reasons
from fusedckpt.fusing.experts import has_experts_parameters
from fusedckpt.fusing.fuse_report import join_names
from fusedckpt.fusing.fused_mlps import FusedFeedForward, level_or_inputs, rates_above_zero
from fusedckpt.fusing.match_mlps import SwappedRun, feed_forward_of, swapped_runs
from fusedckpt.fusing.match_shared import may_share
from fusedckpt.fusing.matcher import Matcher
from fusedckpt.fusing.reasons import looks_like
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.swap import Part, Swap, original_of, subclass
from fusedckpt.fusing.tail import tail_of, tail_swap
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import notes_of
from fusedckpt.layers.sequential import Sequential


class SwapFinder:
    """The walk of one call of `fuse` over the modules of a model."""

    def __init__(self, search: Search, matcher: Matcher):
        self.search = search
        self.report = search.report
        self.matcher = matcher

    def find(self) -> None:
        """Add the swap of each module to the search, modules inside a swapped one excepted."""
        inside = self.search.inside
        for name, module in self.search.modules.items():
            if module in inside:
                continue
            swap = self._swap_of(name, module)
            notes = vars(notes_of(module)) if swap is None else swap.notes
            if swap is None and (swap := self._feed_forward_swap(name, module)) is not None:
                inside.update(swap.method_mlp.children())
            if swap is not None:
                self.search.swaps.append((module, swap))
            inside.update(_computed_in(module, notes))

    def _swap_of(self, name: str, module: nn.Module) -> Swap | None:
        """Return a module's swap, if any; report why a module that looks like an MLP has none."""
        if (original := original_of(module)) is not None:
            for inner, part in original.parts.items():
                if self.search.has(join_names(name, inner), part.kind):
                    self.report.keep(join_names(name, inner), part)
        if original is not None or type(module).__module__.startswith("fusedckpt."):
            return None
        if isinstance(module, ScriptModule):
            if self.search.has(name, "mlp") and any(True for _ in module.parameters()):
                self.report.leave(name, "mlp", NotFused("scripted"), module.original_name)
            return None
        if isinstance(module, nn.Sequential) and not self._is_swapped_whole(module):
            return self._sequential_swap(name, module)
        return self._whole_swap(name, module)

    def _whole_swap(self, name: str, module: nn.Module) -> Swap | None:
        """Return the swap of a module as a whole."""
        obstacles: dict[str, NotFused] = {}
        for kind in _kinds_to_try(module):
            is_asked = self.search.has(name, kind)
            # a module tried as an MLP may be one linear with its activation
            if not is_asked and not (kind == "mlp" and self.search.has(name, "linear")):
                continue
            swap = self.matcher.swap_of(module, kind)
            if isinstance(swap, NotFused):
                obstacles[kind] = swap
            elif swap is not None and self.search.has(name, swap.kind):
                self.report.swap(name, swap.parts[""])
                return swap
        self._report_lookalike(name, module, obstacles)
        return None

    def _report_lookalike(
        self, name: str, module: nn.Module, obstacles: dict[str, NotFused]
    ) -> None:
        """Report a module that looks like a fused layer, and why it is none."""
        if has_experts_parameters(module):
            kind = "experts"
        else:
            kind = looks_like(module) or next(iter(obstacles), None)
        if kind is None or not self.search.has(name, kind):
            return
        obstacle = obstacles.get(kind) or (obstacles.get("mlp") if kind == "linear" else None)
        reason = reasons.of_module(module, kind, obstacle)
        self.report.leave(name, kind, reason, type(module).__name__)

    def _is_swapped_whole(self, module: nn.Sequential) -> bool:
        kinds = self.search.kinds
        return (kinds["mlp"] or kinds["linear"]) and self.matcher.is_swapped_whole(module)

    def _feed_forward_swap(self, name: str, module: nn.Module) -> Swap | None:
        """Return the swap of a layer's method that is an MLP."""
        mlp = None if original_of(module) is not None else feed_forward_of(module)
        if mlp is None or not self.search.has(name, "mlp"):
            return None
        swap = self.matcher.swap_of(mlp, "mlp")
        if not isinstance(swap, Swap) or swap.kind != "mlp":
            return None
        if reasons.of_swap(module, swap.attributes, [module]) is not None:
            return None
        self.report.swap(name, swap.parts[""])
        match = swap.notes["match"]
        # the layer has more children and attributes than the MLP
        match = match._replace(guards=match.guards.without_root())
        return replace(
            swap,
            new_class=subclass(FusedFeedForward, type(module)),
            notes={**swap.notes, "match": match},
            method_mlp=mlp,
        )

    def _tail_swap(self, prefix: str, parent: nn.Sequential) -> Swap | None:
        """Return the swap of a Sequential with an MLP of another kind behind its first layers."""
        tail_and_mlp = tail_of(parent)
        if tail_and_mlp is None or _overrides_calls(type(parent)):
            return None
        if reasons.of_storage(parent) is not None:
            return None
        tail, mlp = tail_and_mlp
        name = join_names(prefix, tail.mlp[0])
        swap = self.matcher.swap_of(mlp, "mlp") if self.search.has(name, "mlp") else None
        if not isinstance(swap, Swap) or swap.kind != "mlp":
            return None
        swap = tail_swap(parent, tail, swap)
        if reasons.of_swap(parent, swap.attributes, [parent, *mlp.modules()]) is not None:
            return None
        self.report.swap(name, swap.parts[tail.mlp[0]])
        return swap

    def _sequential_swap(self, prefix: str, parent: nn.Sequential) -> Swap | None:
        """Return the swap of a Sequential with runs that can be fused."""
        save = level_or_inputs(self.matcher.save, ("inputs", "preact"))
        attributes = {"save": save, "chunks": self.matcher.chunks}
        found_runs = swapped_runs(parent, save, self.matcher.chunks)
        if not any(run.swap.kind == "mlp" for run in found_runs.values()):
            swap = self._tail_swap(prefix, parent)
            if swap is not None:
                return swap
        fused = [layer for run in found_runs.values() for layer in run.layers.values()]
        self._report_linears_apart(prefix, parent, fused)
        asked = {
            name: run
            for name, run in found_runs.items()
            if self.search.has(join_names(prefix, name), run.swap.kind)
        }
        # one run that cannot be fused, or is not asked for, leaves all runs as they are
        obstacle = reasons.of_storage(parent) or reasons.of_swap(parent, attributes, fused)
        if obstacle is None and _overrides_calls(type(parent)):
            obstacle = NotFused("sequential")
        if obstacle is None and len(asked) < len(found_runs):
            obstacle = NotFused("neighbor")
        parts: dict[str, Part] = {}
        for name, run in asked.items():
            if obstacle is not None:
                break
            swap = self.matcher.verified(nn.Sequential(*run.layers.values()), run.swap)
            if isinstance(swap, NotFused):
                obstacle = swap
            else:
                parts[name] = swap.parts[""]
        for name, run in asked.items():
            full_name = join_names(prefix, name)
            if obstacle is not None:
                self.report.leave(full_name, run.swap.kind, obstacle, type(parent).__name__)
            else:
                self.report.swap(full_name, parts[name])
        if obstacle is not None or not asked:
            return None
        self.search.inside.update(_entered(parent, asked.values()))
        is_plain = type(parent) is nn.Sequential
        new_class = Sequential if is_plain else subclass(Sequential, type(parent))
        return Swap("mlp", "", new_class, attributes, parts=parts)

    def _report_linears_apart(
        self, prefix: str, parent: nn.Sequential, fused: list[nn.Module]
    ) -> None:
        """Report the linears of a Sequential whose activation is in no run with them."""
        for name, reason in reasons.linears_apart(parent):
            is_asked = self.search.has(join_names(prefix, name), "linear")
            if is_asked and parent.get_submodule(name) not in fused:
                reason = reasons.of_storage(parent) or reason
                self.report.leave(join_names(prefix, name), "linear", reason, type(parent).__name__)


def _kinds_to_try(module: nn.Module) -> tuple[str, ...]:
    """Return the kinds of found_runs that a module may be as a whole."""
    if adapters.is_lora(module):
        return ("linear",)
    if has_experts_parameters(module):
        return ("experts",)
    return ("mlp",) if isinstance(module, nn.Sequential) else ("norm", "mlp")


def _overrides_calls(kind: type[nn.Sequential]) -> bool:
    """Whether a subclass of nn.Sequential may not call its layers one after the other."""
    return (kind.forward, kind.__iter__) != (nn.Sequential.forward, nn.Sequential.__iter__)


def _entered(parent: nn.Sequential, found_runs: Iterable[SwappedRun]) -> Iterator[nn.Module]:
    """Yield the Sequentials inside in which a run begins or ends: these are not called."""
    names = {name for run in found_runs for name in run.layers if "." in name}
    outer = {name[:place] for name in names for place, c in enumerate(name) if c == "."}
    return map(parent.get_submodule, outer)


def _computed_in(module: nn.Module, notes: dict[str, Any]) -> list[nn.Module]:
    """Return the modules that a module computes itself, which are then skipped.

    None where it may run its children.
    """
    match = notes.get("match")
    is_dropping = any(True for _ in rates_above_zero(module, match))
    # a linear and its activation may read a recipe, and be read by one
    shares = may_share(module, getattr(match, "pattern", None))
    if isinstance(module, ScriptModule):
        return [*module.modules()]
    if match is None or is_dropping or shares:
        return []
    tail = notes.get("tail")
    layers = [module] if tail is None else [module._modules[name] for name in tail.mlp]
    return [inner for layer in layers if layer is not None for inner in layer.modules()]
