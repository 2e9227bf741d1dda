"""A memory report as text: bytes by kind, and tables of modules and recipes."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from fusedckpt.fusing.fuse_report import FusedModule
from fusedckpt.fusing.recipe_models import words_of_gain
from fusedckpt.memory import SavedStorage
from fusedckpt.reporting import recipe_groups
from fusedckpt.reporting.tables import Row, size, table

# the class of `memory_report.py`, which imports this module
MemoryReport: TypeAlias = Any

# modules shown; others are summed up
_MOST_LINES = 24
_MODULES = ("module", "saved", "share", "storages", "largest", "shared with")
# of an estimate
UNKNOWN = (
    "nothing was allocated; not known: time, memory within kernels, the allocator's cache, the",
    "CUDA context; attention counts as torch's fused kernel saves it, other functions as on a CPU",
)
_FUSED = ("fused modules", "ran", "modules", "saves more, up to", "first")


def text_of_report(report: MemoryReport) -> str:
    """Return lines of bytes by kind and the peak, and tables of modules and recipes."""
    mode = "" if report.is_training else ", in eval mode"
    head = "Estimated memory" if report.is_estimate else "Memory"
    lines = [f"{head} of one training step of {report.model} on {report.device}{mode}"]
    lines += [_line(kind, nbytes) for kind, nbytes in report.sizes.items() if nbytes is not None]
    after = report.saved_bytes_with_recipes
    if after is not None and (gain := words_of_gain(report.saved_bytes, after)) is not None:
        lines.append(_line("  with recipes", after, f"fuse with {gain}"))
    if report.held:
        lines.append(_line("held otherwise", sum(report.held.values()), _held_by(report.held)))
    if report.offloaded_bytes or report.not_offloaded:
        reasons = [f"{count} inputs stay: {why}" for why, count in report.not_offloaded.items()]
        lines.append(_line("offloaded", report.offloaded_bytes, "; ".join(reasons)))
    peak = report.peak
    name = "peak, at least" if report.is_estimate else "peak"
    lines.append(_line(name, peak.live_bytes, f"in {peak.phase}, in {peak.module}"))
    if report.left_graphs:
        lines.append(f"  {'graphs left in':20}{_listed(report.left_graphs)}, by a recompute")
    lines += ["", table(_MODULES, _module_rows(report.saved), numbers=(1, 2, 3))]
    if report.fused:
        lines += ["", table(_FUSED, _fused_rows(report.fused), numbers=(2, 3))]
    if report.recipes:
        rows = recipe_groups.report_rows_of(report.recipes)
        lines += ["", table(recipe_groups.HEADS, rows, numbers=(1, 2))]
    if report.is_estimate:
        lines += ["", *UNKNOWN]
    return "\n".join(lines)


def compared(reports: Mapping[str, MemoryReport]) -> str:
    """Return a table of bytes by kind and peaks, with a column for each report by its name."""
    columns = [*reports.values()]
    rows = [
        (kind, *(size(report.sizes[kind]) for report in columns))
        for kind, nbytes in columns[0].sizes.items()
        if nbytes is not None
    ]
    name = "peak, at least" if columns[0].is_estimate else "peak"
    rows.append((name, *(size(report.peak_bytes) for report in columns)))
    return table(("", *reports), rows, numbers=range(1, len(columns) + 1))


def _held_by(held: Mapping[str, int]) -> str:
    """Write the bytes that live on outside saved tensors, by module, the largest first."""
    parts = [f"{size(nbytes)} in {name}" for name, nbytes in held.items()][:2]
    more = f", and {len(held) - 2} more" if len(held) > 2 else ""
    return f"outside saved tensors: {', '.join(parts)}{more}"


def _listed(names: Sequence[str]) -> str:
    """Write the first two of some names, and how many more there are."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _line(kind: str, nbytes: int, where: str = "") -> str:
    return f"  {kind:20}{size(nbytes):>12}  {where}".rstrip()


def _module_rows(saved: Sequence[SavedStorage]) -> list[Row]:
    """Return a row of `_MODULES` for every module that saves something, the largest first.

    The same modules of several layers have one row.
    """
    by_module: dict[str, list[SavedStorage]] = {}
    for storage in saved:
        by_module.setdefault(storage.owner, []).append(storage)
    parents = {name[: dot.start()] for name in by_module for dot in re.finditer(r"\.", name)}
    patterns = {name: _pattern(name, parents) for name in by_module}
    groups: dict[Any, list[str]] = {}
    for name, storages in by_module.items():
        sizes = tuple((x.nbytes, x.dtype, x.shape) for x in storages)
        groups.setdefault((patterns[name], sizes), []).append(name)
    total = max(_nbytes(saved), 1)

    def row(name: str, storages: Sequence[SavedStorage], *details: str) -> Row:
        nbytes = _nbytes(storages)
        return (name, size(nbytes), f"{nbytes / total:.1%}", str(len(storages)), *details)

    rows = []
    by_size = sorted(groups.values(), key=lambda names: -_nbytes(_storages_of(names, by_module)))
    for names in by_size[:_MOST_LINES]:
        storages = _storages_of(names, by_module)
        pattern = patterns[names[0]]
        name = f"{len(names)} x {pattern}" if len(names) > 1 else names[0]
        largest = max(storages, key=lambda storage: storage.nbytes)
        sharers = [other for storage in storages for other in storage.sharers]
        if len(names) > 1:
            sharers = [_pattern(other, parents) for other in sharers]
        sharers = [*dict.fromkeys(other for other in sharers if other != pattern)]
        shared = ", ".join(sharers[:2]) + (f" +{len(sharers) - 2}" if len(sharers) > 2 else "")
        rows.append(row(name, storages, f"{largest.dtype} {list(largest.shape)}", shared))
    if more := [name for names in by_size[_MOST_LINES:] for name in names]:
        rows.append(row(f"{len(more)} more", _storages_of(more, by_module), "", ""))
    return rows


def _pattern(name: str, parents: Container[str]) -> str:
    """Return the name of a module with "*" for the number of its layer, if it is in a layer.

    A module whose name ends with a number is a layer if it is among `parents`: the layers of an MLP
    that is an nn.Sequential are not alike.
    """
    text = f"{name}." if name in parents else name
    return re.sub(r"\b\d+\.", "*.", text, count=1).removesuffix(".")


def _storages_of(
    names: Iterable[str], by_module: Mapping[str, list[SavedStorage]]
) -> list[SavedStorage]:
    return [storage for name in names for storage in by_module[name]]


def _nbytes(storages: Sequence[SavedStorage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _fused_rows(fused: Sequence[FusedModule]) -> list[Row]:
    """Return a row of `_FUSED` for all fused modules that ran alike, the most costly first."""
    groups: dict[tuple[str, str], list[FusedModule]] = {}
    for module in fused:
        ran = module.reason or ("fused" if module.calls else "not called, or in compiled code")
        groups.setdefault((module.change, ran), []).append(module)
    rows = []
    for (change, ran), modules in groups.items():
        known = [module.extra_bytes for module in modules if module.extra_bytes is not None]
        unknown = modules[0].reason is not None and not known
        cost = "?" if unknown else size(sum(known)) if sum(known) else ""
        row = (change, ran, str(len(modules)), cost, modules[0].name or "(model)")
        rows.append((sum(known), row))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
