"""A memory report as text: what holds memory, when it peaks, and what every module saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedckpt.memory import SavedStorage
from fusedckpt.reporting.fused_calls import FusedModule
from fusedckpt.reporting.tables import Row, held_by, size, table
from fusedckpt.reporting.timeline import Moment

__all__ = ["text"]

# modules shown; the rest is summed
_MOST = 24
_MODULES = ("module", "saved", "share", "storages", "largest", "shared with")
_FUSED = ("fused modules", "ran", "modules", "saves more, up to", "first")


def text(
    *,
    title: str,
    sizes: Mapping[str, int | None],
    held: Mapping[str, int],
    peak: Moment,
    saved: Sequence[SavedStorage],
    fused: Sequence[FusedModule],
) -> str:
    """Return one line for each kind of memory and for the peak, and tables of modules."""
    lines = [title, *(_line(kind, n) for kind, n in sizes.items() if n is not None)]
    if where := held_by(held):
        lines.append(_line("held otherwise", sum(held.values()), where))
    lines.append(_line("peak", peak.live_bytes, f"in {peak.phase}, in {peak.module}"))
    lines += ["", table(_MODULES, _module_rows(saved), numbers=(1, 2, 3))]
    if fused:
        lines += ["", table(_FUSED, _fused_rows(fused), numbers=(2, 3))]
    return "\n".join(lines)


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
    if rest := names[_MOST:]:
        storages = [storage for name in rest for storage in owned[name]]
        rows.append(row(f"{len(rest)} more", storages, "", ""))
    return rows


def _nbytes(storages: Sequence[SavedStorage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _fused_rows(fused: Sequence[FusedModule]) -> list[Row]:
    """Return a row of `_FUSED` for all fused modules that ran alike, what costs most first."""
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
