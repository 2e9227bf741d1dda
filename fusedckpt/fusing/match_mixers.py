"""Finds attention and mixers: to run their forward again is better than to save it."""

from __future__ import annotations

from typing import Any

from torch import nn

from fusedckpt.checkpointing.attention import NAME
from fusedckpt.checkpointing.scans import SCAN
from fusedckpt.fusing import reasons
from fusedckpt.fusing.matcher import swap_obstacle
from fusedckpt.fusing.mixers_in_code import mixers, united
from fusedckpt.fusing.mixers_in_run import mixers_of
from fusedckpt.fusing.recomputed_modules import LITTLE_GAIN, MIXES, SAVE, Recomputed
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.subclass import subclass
from fusedckpt.fusing.swap import MARK, Part, Swap


def find_mixers(model: nn.Module, search: Search, batch: Any) -> None:
    """Find attention and mixers that are not swapped otherwise, in a block, or around an MLP."""
    save, report = search.save, search.report
    kinds_by_name = mixers(search.modules)
    if batch is not None and search.kinds["attention"]:
        fused = (module for module in search.modules.values() if MARK in vars(module))
        swapped = {*search.inside, *fused, *(module for module, _ in search.swaps)}
        called = mixers_of(model, batch, swapped)
        if isinstance(called, str):
            report.notes.append(f"attention and mixers were found by their code, as {called}")
        else:
            kinds_by_name = united(called, kinds_by_name)
            report.notes.append("attention and mixers were found by running the batch")
    known = {*search.inside, *(module for module, _ in search.swaps)}
    mlps = {module for module, swap in search.swaps if swap.kind == "mlp"}
    for name, kinds in kinds_by_name.items():
        module = search.modules[name]
        if module in known or MARK in vars(module) or not mlps.isdisjoint(module.modules()):
            continue
        attributes = {LITTLE_GAIN: None, SAVE: save, MIXES: kinds}
        if not search.has(name, "attention") or save != "inputs":
            continue
        kind = type(module)
        reason = reasons.of_storage(module) or swap_obstacle(module, attributes, [])
        if reason is not None:
            report.leave(name, "attention", reason, kind.__name__)
            continue
        change = f"{kind.__name__} -> recomputed{_kept(kinds)}"
        part = Part("attention", change, None)
        new_class = subclass(Recomputed, kind)
        report.swap(name, part)
        search.swaps.append(
            (module, Swap("attention", change, new_class, attributes, parts={"": part}))
        )


def _kept(kinds: frozenset[str]) -> str:
    kept = ["attention itself"] * (NAME in kinds) + ["its scan"] * (SCAN in kinds)
    return f" but for {' and '.join(kept)}" if kept else ""
