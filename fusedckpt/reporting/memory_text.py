"""A memory report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedckpt.reporting.tables import Row, held_by, size, table

if TYPE_CHECKING:
    from fusedckpt.reporting.memory_report import FusedModule, MemoryReport

__all__ = ["text"]

# modules shown; the rest is summed
_MOST = 24
_FUSED = ("fused modules", "ran", "modules", "saves more, up to", "first")
_HEAD = ("module", "saved", "share", "storages", "largest", "shared with")


def text(report: MemoryReport) -> str:
    """Return what holds memory, when it peaks, and what every module keeps for backward."""
    title = f"Memory of one training step of {report.model} on {report.device}"
    rows = module_rows(report)
    lines = [title, *summary(report), "", table(_HEAD, rows, numbers=(1, 2, 3))]
    if report.fused:
        lines += ["", table(_FUSED, fused_rows(report), numbers=(2, 3))]
    return "\n".join(lines)


def summary(report: MemoryReport) -> list[str]:
    """Return one line for each kind of memory, and one for the peak."""
    peak = report.peak
    kinds = {
        "parameters": report.parameter_bytes,
        "gradients": report.gradient_bytes,
        "optimizer state": report.optimizer_bytes,
        "buffers": report.buffer_bytes,
        "inputs": report.input_bytes,
        "saved for backward": report.saved_bytes,
    }
    lines = [f"  {kind:20}{size(n):>12}" for kind, n in kinds.items() if n is not None]
    if where := held_by(report.held):
        lines.append(f"  {'held otherwise':20}{size(sum(report.held.values())):>12}  {where}")
    where = f"in {peak.phase}, in {peak.module}"
    return [*lines, f"  {'peak':20}{size(peak.live_bytes):>12}  {where}"]


def module_rows(report: MemoryReport) -> list[Row]:
    """Return a row of `_HEAD` for every module that keeps something, the largest first."""
    total = max(report.saved_bytes, 1)
    modules = report.saved_by_module
    rows = []
    for name in list(modules)[:_MOST]:
        kept = [storage for storage in report.saved if storage.owner == name]
        largest = max(kept, key=lambda storage: storage.nbytes)
        tensor = f"{largest.dtype} {list(largest.shape)}"
        sharers = list(dict.fromkeys(other for storage in kept for other in storage.sharers))
        shared = ", ".join(sharers[:2]) + (f" +{len(sharers) - 2}" if len(sharers) > 2 else "")
        share = f"{modules[name] / total:.1%}"
        rows.append((name, size(modules[name]), share, str(len(kept)), tensor, shared))
    rest = list(modules)[_MOST:]
    if rest:
        nbytes = sum(modules[name] for name in rest)
        count = sum(storage.owner in rest for storage in report.saved)
        share = f"{nbytes / total:.1%}"
        rows.append((f"{len(rest)} more", size(nbytes), share, str(count), "", ""))
    return rows


def fused_rows(report: MemoryReport) -> list[Row]:
    """Return a row of `_FUSED` for all fused modules that ran alike, what costs most first."""
    groups: dict[tuple[str, str], list[FusedModule]] = {}
    for module in report.fused:
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
