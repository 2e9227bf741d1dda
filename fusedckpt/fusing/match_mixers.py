"""Find attention and mixers: to run their forward again is better than to save it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fusedckpt.checkpointing.attention import NAME
from fusedckpt.checkpointing.scans import SCAN
from fusedckpt.fusing import reasons
from fusedckpt.fusing.matcher import swap_obstacle
from fusedckpt.fusing.mixers_in_code import mixers_in_code
from fusedckpt.fusing.mixers_in_run import mixers_in_run
from fusedckpt.fusing.recomputed_modules import Recomputed
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.swap import Part, Swap, original_of, subclass
from fusedckpt.layers.fallbacks import NotFused


def find_mixers(model: nn.Module, search: Search, batch: Any) -> None:
    """Find attention and mixers outside of swapped modules, which are not mostly an MLP."""
    known = {*search.inside, *(module for module, _ in search.swaps)}
    mlps = [module for module, swap in search.swaps if swap.kind == "mlp"]
    for name, kinds in _mixers(model, search, batch).items():
        module = search.modules[name]
        if module in known or original_of(module) is not None:
            continue
        # at other levels they are not swapped
        if not search.has(name, "attention") or search.save != "inputs":
            continue
        swap = recomputing_swap(module, kinds, search.save)
        if _is_mostly(module, mlps):
            swap = NotFused("around")
        if isinstance(swap, NotFused):
            search.report.leave(name, "attention", swap, type(module).__name__)
            continue
        search.report.run_again(name, swap.parts[""])
        search.swaps.append((module, swap))


def _is_mostly(module: nn.Module, mlps: Sequence[nn.Module]) -> bool:
    """Whether MLPs that are fused have half of a module's parameters or more.

    They would run again with it. A small one costs little, such as that of Swin V2's biases.
    """
    layers = set(module.modules())
    inner = {p for mlp in mlps if mlp in layers for p in mlp.parameters()}
    return 2 * sum(p.numel() for p in inner) >= sum(p.numel() for p in module.parameters()) > 0


def recomputing_swap(
    module: nn.Module, kinds: frozenset[str], save: str, is_gathered: bool = False
) -> Swap | NotFused:
    """Return the swap of a module that runs again, and calls these kinds of functions.

    is_gathered: whether it runs, so that FSDP2 has gathered its parameters.
    """
    kind = type(module)
    notes = {"little_gain": None, "save": save, "mixes": kinds, "writes": None}
    reason = reasons.of_storage(module)
    if is_gathered and reason == NotFused("fsdp"):
        reason = None
    reason = reason or swap_obstacle(module, {}, [])
    if reason is not None:
        return reason
    part = Part("attention", f"{kind.__name__} -> recomputed{_exceptions(kinds)}", None)
    return Swap("attention", part.change, subclass(Recomputed, kind), notes=notes, parts={"": part})


def _mixers(model: nn.Module, search: Search, batch: Any) -> dict[str, frozenset[str]]:
    """Return the names of attention modules and mixers, and kinds of functions that they call."""
    in_code = mixers_in_code(search.modules)
    if batch is None or not search.kinds["attention"]:
        return in_code
    # a layer that shares a recipe may be part of a module that saves much
    originals = ((m, original_of(m)) for m in search.modules.values())
    fused = (m for m, original in originals if original is not None and original.parts)
    swapped = {*search.inside, *fused, *(module for module, _ in search.swaps)}
    in_run = mixers_in_run(model, *arguments_of(batch), swapped)
    if isinstance(in_run, str):
        search.report.notes.append(f"attention and mixers were found by their code, as {in_run}")
        return in_code
    search.report.notes.append("attention and mixers were found by running the batch")
    search.report.own_bytes.update(in_run.own_bytes)
    return {**in_run.kinds, **_not_reached(in_code, in_run.kinds)}


def _not_reached(
    in_code: Mapping[str, frozenset[str]], in_run: Mapping[str, frozenset[str]]
) -> dict[str, frozenset[str]]:
    """Return the modules in parts of the model that the run did not reach."""

    def is_inside(inner: str, outer: str) -> bool:
        return f"{inner}.".startswith(f"{outer}.")

    return {
        name: kinds
        for name, kinds in in_code.items()
        if not any(is_inside(name, other) or is_inside(other, name) for other in in_run)
    }


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model: a dict of them, a tuple, or one tensor."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    return tuple(batch), {}


def _exceptions(kinds: frozenset[str]) -> str:
    """Return the words for the functions that do not run again."""
    names = ["attention itself"] * (NAME in kinds) + ["its scan"] * (SCAN in kinds)
    return f" but for {' and '.join(names)}" if names else ""
