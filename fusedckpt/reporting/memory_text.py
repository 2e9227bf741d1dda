"""A memory report as text: bytes by kind, and tables of modules and recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fusedckpt.fusing.fused_calls import FusedModule
from fusedckpt.memory import SavedStorage
from fusedckpt.reporting import recipe_groups
from fusedckpt.reporting.tables import Row, size, table

# whose module imports this one
MemoryReport: TypeAlias = Any

# modules shown; others are summed up
_MOST = 24
_MODULES = ("module", "saved", "share", "storages", "largest", "shared with")
_FUSED = ("fused modules", "ran", "modules", "saves more, up to", "first")


def text(report: MemoryReport) -> str:
    """Return lines of bytes by kind and the peak, and tables of modules and recipes."""
    lines = [f"Memory of one training step of {report.model} on {report.device}"]
    lines += [_line(kind, nbytes) for kind, nbytes in report.sizes.items() if nbytes is not None]
    if report.held:
        lines.append(_line("held otherwise", sum(report.held.values()), _held_by(report.held)))
    if report.offloaded_bytes or report.not_offloaded:
        reasons = [f"{count} inputs stay: {why}" for why, count in report.not_offloaded.items()]
        lines.append(_line("offloaded", report.offloaded_bytes, "; ".join(reasons)))
    peak = report.peak
    lines.append(_line("peak", peak.live_bytes, f"in {peak.phase}, in {peak.module}"))
    if report.left_graphs:
        lines.append(f"  {'graphs left in':20}{_listed(report.left_graphs)}, by a recompute")
    lines += ["", table(_MODULES, _module_rows(report.saved), numbers=(1, 2, 3))]
    if report.fused:
        lines += ["", table(_FUSED, _fused_rows(report.fused), numbers=(2, 3))]
    if report.recipes:
        rows = recipe_groups.report_rows_of(report.recipes)
        lines += ["", table(recipe_groups.HEADS, rows, numbers=(1, 2))]
    return "\n".join(lines)


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
    """Return a row of `_MODULES` for every module that saves something, the largest first."""
    owned: dict[str, list[SavedStorage]] = {}
    for storage in saved:
        owned.setdefault(storage.owner, []).append(storage)
    total = max(_nbytes(saved), 1)

    def row(name: str, storages: Sequence[SavedStorage], *details: str) -> Row:
        nbytes = _nbytes(storages)
        return (name, size(nbytes), f"{nbytes / total:.1%}", str(len(storages)), *details)

    rows = []
    names = sorted(owned, key=lambda name: -_nbytes(owned[name]))
    for name in names[:_MOST]:
        largest = max(owned[name], key=lambda storage: storage.nbytes)
        sharers = list(dict.fromkeys(other for s in owned[name] for other in s.sharers))
        shared = ", ".join(sharers[:2]) + (f" +{len(sharers) - 2}" if len(sharers) > 2 else "")
        rows.append(row(name, owned[name], f"{largest.dtype} {list(largest.shape)}", shared))
    if more := names[_MOST:]:
        storages = [storage for name in more for storage in owned[name]]
        rows.append(row(f"{len(more)} more", storages, "", ""))
    return rows


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
