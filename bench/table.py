"""`python -m bench table FILE`: the tables of a results file, for a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from bench import capacity_report, text
from bench.capacity_report import Capacity, capacities
from bench.env import origin
from bench.records import lines
from bench.results import MIB, Group, Row, groups
from bench.text import console, significant

__all__ = ["Settings", "markdown", "run", "settings", "source", "sources", "table"]

HEADS = (
    *("forward\nms", "backward\nms", "both\nms", "of\neager", "error", "saved\nB/token"),
    *("peak\nMiB", "backward\nMiB", "TFLOP/s", "GB/s", "of\nlimit"),
)
# of float32: what an error is held to where eager's own is nothing
EPS = 2**-23


@dataclass(frozen=True)
class Settings:
    """What to print, and how."""

    groups: tuple[Group, ...]
    markdown: bool
    capacities: tuple[Capacity, ...] = ()


def settings(file: Path, markdown: bool) -> Settings:
    """Read the file. Raises ValueError where there is nothing of ours, OSError as reading does."""
    found = lines(file)
    if not found:
        raise ValueError(f"{file}: nothing was measured")
    return Settings(tuple(groups(found)), markdown, tuple(capacities(found)))


def _ratio(row: Row, reference: Row) -> str:
    if row.both_ms is None or reference.both_ms is None:
        return "-"
    return f"{row.both_ms.over(reference.both_ms).median:.2f}x"


def _error(row: Row, reference: Row) -> str:
    """The error of the result that is worst beside eager's of the same result."""
    pairs = zip(row.errors, reference.errors, strict=False)
    ratios = [mine / (eagers or EPS) for mine, eagers in pairs]
    if not ratios:
        return "-"
    return f"{max(ratios):.{0 if max(ratios) >= 10 else 2}f}x"


def _rates(row: Row, group: Group) -> list[str]:
    """What the case needs at least, over the time it took: a recomputed FLOP counts for nothing."""
    if row.both_ms is None:
        return ["-", "-", "-"]
    seconds, load = row.both_ms.median / 1e3, group.load
    share = "-"
    if group.ceilings is not None:
        share = f"{group.ceilings.least_ms(load) / row.both_ms.median:.0%}"
    flops = significant(load.flops / seconds / 1e12) if load.flops else "-"
    return [flops, significant(load.nbytes / seconds / 1e9), share]


def cells(row: Row, group: Group) -> list[str]:
    """Return a line's cells, without its name."""
    times = [row.forward_ms, row.backward_ms, row.both_ms]
    peaks = [row.peak_bytes, row.backward_peak_bytes]
    saved = "-" if row.saved_bytes is None else f"{row.saved_bytes / group.tokens:,.0f}"
    return [
        *("-" if time is None else significant(time.median) for time in times),
        _ratio(row, group.rows[0]),
        _error(row, group.rows[0]),
        saved,
        *("-" if peak is None else significant(peak / MIB) for peak in peaks),
        *_rates(row, group),
    ]


def failures(group: Group) -> list[str]:
    """Why rows are missing; those of libraries that are not there share a line."""
    absent = [row.name for row in group.rows if row.failure == "not installed"]
    others = [row for row in group.rows if row.failure and row.name not in absent]
    lines = [f"{row.name}: {row.failure}" for row in others]
    return [*lines, *([f"not installed: {', '.join(absent)}"] if absent else [])]


def notes(group: Group) -> list[str]:
    """What a reader of the numbers must know besides."""
    timed = [row for row in group.rows if row.both_ms is not None]
    launched = [row.name for row in timed if not row.is_graph]
    found = failures(group)
    if len(launched) < len(timed):
        found += [f"launched, not replayed from a graph: {', '.join(launched)}"] * bool(launched)
    if 0 < group.checked_tokens < group.tokens:
        found.append(f"numbers checked at {group.checked_tokens} tokens")
    return found


def table(group: Group) -> Table:
    """One line per implementation that was measured; below, why the others were not."""
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    out.title_style, out.title_justify = "bold", "left"
    out.title = group.title
    out.add_column("implementation", style="bold", no_wrap=True)
    for head in HEADS:
        out.add_column(head, justify="right", no_wrap=True)
    for row in group.rows:
        if row.failure is None:
            out.add_row(row.name, *cells(row, group))
    if lines := notes(group):
        out.caption, out.caption_justify = escape("\n".join(lines)), "left"
    return out


def markdown(group: Group) -> str:
    """The same as a Markdown table."""
    heads = [head.replace("\n", " ") for head in HEADS]
    rows = ([row.name, *cells(row, group)] for row in group.rows if row.failure is None)
    return text.markdown(group.title, heads, rows, notes(group))


def source(group: Group) -> str:
    """Where a group's numbers come from, in a line."""
    if group.environment is None:
        return "unknown environment"
    found = origin(group.environment)
    if any(row.is_graph for row in group.rows):
        found += "; CUDA graphs"
    if group.ceilings is not None:
        tflops, gbytes = map(significant, group.ceilings)
        found += f"; a large matmul {tflops} TFLOP/s, a copy {gbytes} GB/s"
    return found


def sources(found: Sequence[Group]) -> list[str]:
    """Where groups come from, a line each, with the cases it is said of where they differ."""
    cases: dict[str, list[str]] = {}
    for group in found:
        cases.setdefault(source(group), []).append(group.case)
    if len(cases) == 1:
        return list(cases)
    return [f"{', '.join(names)}: {where}" for where, names in cases.items()]


def _parts(chosen: Settings) -> Iterator[tuple[str, Table | str]]:
    """Yield where each table comes from, and the table."""
    for group in chosen.groups:
        yield source(group), markdown(group) if chosen.markdown else table(group)
    for found in chosen.capacities:
        write = capacity_report.markdown if chosen.markdown else capacity_report.table
        yield origin(found.environment), write(found)


def run(chosen: Settings) -> int:
    """Print every table, and where it comes from when that changes."""
    out, before = console(), None
    for here, part in _parts(chosen):
        if here != before:
            out.print(here + "\n", markup=False, highlight=False, soft_wrap=True)
            before = here
        if isinstance(part, str):
            print(part + "\n")
        else:
            out.print(part)
    return 0
