"""Walk over a model's modules, and find the swaps of norms, MLPs, linears and experts.

A module that is none of these itself may hold one: a Sequential with blocks among its layers, or a
layer with a method that is an MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from fusedckpt.fusing import adapters, reasons
from fusedckpt.fusing.fuse_report import join
from fusedckpt.fusing.fused_mlps import FusedFeedForward, within
from fusedckpt.fusing.guards import child_at
from fusedckpt.fusing.lookalikes import looks_like
from fusedckpt.fusing.match_experts import holds as holds_experts
from fusedckpt.fusing.match_mlps import blocks_of, feed_forward_of
from fusedckpt.fusing.match_shared import may_share
from fusedckpt.fusing.matcher import Matcher, unfit
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.subclass import subclass
from fusedckpt.fusing.swap import MARK, Part, Swap
from fusedckpt.fusing.tail import tail_of, tail_swap
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.sequential import Sequential


class BlockFinder:
    """Finds modules that are one block, and the modules that these compute."""

    def __init__(self, search: Search, matcher: Matcher):
        self.search, self.report, self.matcher = search, search.report, matcher

    def find(self) -> None:
        """Look at every module, those inside a block excepted."""
        inside = self.search.inside
        for name, module in self.search.modules.items():
            if module in inside:
                continue
            swap = self._swap_of(name, module)
            attributes = vars(module) if swap is None else swap.attributes
            if swap is None and (swap := self._feed_forward(name, module)) is not None:
                inside.update(swap.own.children())
            if swap is not None:
                self.search.swaps.append((module, swap))
            inside.update(_computed_in(module, attributes))

    def _swap_of(self, name: str, module: nn.Module) -> Swap | None:
        """Return a module's swap, if any; report it, or why a module that looks like one is not."""
        wanted = self.search
        report = self.report
        if (original := module.__dict__.get(MARK)) is not None:
            for inner, part in original.parts.items():
                if wanted.has(join(name, inner), part.kind):
                    report.keep(join(name, inner), part)
        if MARK in vars(module) or type(module).__module__.startswith("fusedckpt."):
            return None
        if isinstance(module, ScriptModule):
            if wanted.has(name, "mlp") and any(True for _ in module.parameters()):
                report.leave(name, "mlp", NotFused("scripted"), module.original_name)
            return None
        if isinstance(module, nn.Sequential) and not self._is_one(module):
            return self._sequential(name, module)
        obstacles: dict[str, NotFused] = {}
        for kind in self._kinds(module):
            if not wanted.has(name, kind) and not (kind == "mlp" and wanted.has(name, "linear")):
                continue
            swap = self.matcher.of(module, kind)
            if isinstance(swap, NotFused):
                obstacles[kind] = swap
            elif swap is not None and wanted.has(name, swap.kind):
                report.swap(name, swap.parts[""])
                return swap
        # name it, if it is one that could have been
        is_experts = holds_experts(module)
        kind = "experts" if is_experts else looks_like(module) or next(iter(obstacles), None)
        if kind is not None and wanted.has(name, kind):
            reason = obstacles.get(kind) or (obstacles.get("mlp") if kind == "linear" else None)
            reason = reasons.of_module(module, kind, reason)
            report.leave(name, kind, reason, type(module).__name__)
        return None

    def _kinds(self, module: nn.Module) -> tuple[str, ...]:
        if adapters.is_lora(module):
            return ("linear",)
        if holds_experts(module):
            return ("experts",)
        return ("mlp",) if isinstance(module, nn.Sequential) else ("norm", "mlp")

    def _is_one(self, module: nn.Sequential) -> bool:
        kinds = self.search.kinds
        return (kinds["mlp"] or kinds["linear"]) and self.matcher.is_one_block(module)

    def _feed_forward(self, name: str, module: nn.Module) -> Swap | None:
        """Return the swap of a layer's method that is an MLP."""
        mlp = None if MARK in vars(module) else feed_forward_of(module)
        if mlp is None or not self.search.has(name, "mlp"):
            return None
        swap = self.matcher.of(mlp, "mlp")
        if not isinstance(swap, Swap) or swap.kind != "mlp":
            return None
        if unfit(module, swap.attributes, [module]) is not None:
            return None
        self.report.swap(name, swap.parts[""])
        match = swap.attributes["_fusedckpt_match"]
        match = match._replace(held=tuple(state for state in match.held if state.path))
        to = subclass(FusedFeedForward, type(module))
        return replace(
            swap, to=to, attributes={**swap.attributes, "_fusedckpt_match": match}, own=mlp
        )

    def _tail(self, prefix: str, parent: nn.Sequential) -> Swap | None:
        """Return the swap of a Sequential with an MLP of another kind behind its first layers."""
        tail_and_mlp, kind = tail_of(parent), type(parent)
        is_plain = (kind.forward, kind.__iter__) == (nn.Sequential.forward, nn.Sequential.__iter__)
        if tail_and_mlp is None or not is_plain or reasons.of_storage(parent) is not None:
            return None
        tail, mlp = tail_and_mlp
        name = join(prefix, tail.mlp[0])
        swap = self.matcher.of(mlp, "mlp") if self.search.has(name, "mlp") else None
        if not isinstance(swap, Swap) or swap.kind != "mlp":
            return None
        swap = tail_swap(parent, tail, swap)
        if unfit(parent, swap.attributes, [parent, *mlp.modules()]) is not None:
            return None
        self.report.swap(name, swap.parts[tail.mlp[0]])
        return swap

    def _sequential(self, prefix: str, parent: nn.Sequential) -> Swap | None:
        """Return the swap of a Sequential with blocks in it."""
        matcher = self.matcher
        report = self.report
        kind = type(parent)
        save = within(matcher.save, ("inputs", "preact"))
        attributes = {"save": save, "chunks": matcher.chunks}
        blocks = blocks_of(parent, save, matcher.chunks)
        fused = [layer for layers, _ in blocks.values() for layer in layers.values()]
        if not any(block.kind == "mlp" for _, block in blocks.values()):
            swap = self._tail(prefix, parent)
            if swap is not None:
                return swap
        for name, reason in reasons.apart(parent):
            is_meant = self.search.has(join(prefix, name), "linear")
            if is_meant and parent.get_submodule(name) not in fused:
                reason = reasons.of_storage(parent) or reason
                report.leave(join(prefix, name), "linear", reason, kind.__name__)
        meant = {
            n: pair for n, pair in blocks.items() if self.search.has(join(prefix, n), pair[1].kind)
        }
        # one layer that no kernel takes, or a block that is not meant, keeps it as it is
        obstacle = reasons.of_storage(parent) or unfit(parent, attributes, fused)
        if (kind.forward, kind.__iter__) != (nn.Sequential.forward, nn.Sequential.__iter__):
            obstacle = obstacle or NotFused("sequential")
        if len(meant) < len(blocks):
            obstacle = obstacle or NotFused("neighbour")
        parts: dict[str, Part] = {}
        for name, (layers, block) in meant.items():
            swap = obstacle or matcher.checked(nn.Sequential(*layers.values()), block)
            if isinstance(swap, NotFused):
                obstacle = swap
            else:
                parts[name] = swap.parts[""]
        for name, (_, block) in meant.items():
            if obstacle is not None:
                report.leave(join(prefix, name), block.kind, obstacle, kind.__name__)
            else:
                report.swap(join(prefix, name), parts[name])
        if obstacle is not None or not meant:
            return None
        # Sequentials inside that a block begins or ends in are not called
        inner = [name for layers, _ in meant.values() for name in layers if "." in name]
        opened = {name[:place] for name in inner for place, c in enumerate(name) if c == "."}
        self.search.inside.update(map(parent.get_submodule, opened))
        to = Sequential if kind is nn.Sequential else subclass(Sequential, kind)
        return Swap("mlp", "", to, attributes, parts=parts)


def _computed_in(module: nn.Module, attributes: dict[str, Any]) -> list[nn.Module]:
    """Return the modules that a module computes itself, which are then skipped.

    None where it may run its children.
    """
    match = attributes.get("_fusedckpt_match")
    rates = getattr(match, "rates", ())
    dropping = any(getattr(child_at(module, path), name, 0) > 0 for path, name in rates)
    # a linear and its activation may read a recipe, and be read by one
    shares = may_share(module, getattr(match, "block", None))
    if isinstance(module, ScriptModule):
        return [*module.modules()]
    if match is None or dropping or shares:
        return []
    tail = attributes.get("_fusedckpt_tail")
    layers = [module] if tail is None else [module._modules[name] for name in tail.mlp]
    return [inner for layer in layers if layer is not None for inner in layer.modules()]
