"""Parts that figures share: a colour per kind of implementation, bars, names, title and footer."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from bench.tables import significant
from fusedckpt.reporting.figure import BLUE, FAINT, GREY, INK, RED, STYLE

# inches: as wide as READMEs show pictures, so that letters are as large as those of the text
WIDTH = 10.0
Points = Sequence[tuple[float, float]]


class Family(NamedTuple):
    """A text in the legend and the colour beside it."""

    label: str
    colour: str


# told apart with every kind of colour vision (Okabe and Ito), and in print
OURS, _PLAN = Family("fusedckpt.checkpoint", "#56b4e9"), Family("fusedckpt.plan", "#cc79a7")
_CHECKPOINT = Family("torch.utils.checkpoint", "#e69f00")
# by how a name starts, the first that fits; the rest are other libraries
_FAMILIES = (
    (("eager", "plain"), Family("eager", GREY)),
    (("torch.compile",), Family("torch.compile", RED)),
    (("checkpoint", "torch"), _CHECKPOINT),
    (("ours(", "fuse+ckpt"), OURS),
    (("fuse+plan", "fused, plan", "plan"), _PLAN),
    (("fuse preact",), Family("fusedckpt, keeping GEMM outputs", OURS.colour)),
    (("fuse",), Family("fusedckpt", BLUE)),
    (("",), Family("other libraries", "#009e73")),
)


def family(name: str) -> Family:
    """Return the family of an implementation or of a way of training."""
    return next(found for starts, found in _FAMILIES if name.startswith(starts))


def colour_of(name: str) -> str:
    """Return the colour of a name's family."""
    return family(name).colour


def save(
    path: Path, height: float, head: str, lines: Iterable[str], draw: Callable[[Figure], None]
) -> None:
    """Draw below a title, over lines that say where the numbers come from."""
    wrapped = [line for one in lines for line in textwrap.wrap(one, int(17 * WIDTH))]
    with mpl.rc_context(STYLE):
        size = (WIDTH, height + 0.16 * len(wrapped))
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        draw(figure)
        figure.suptitle(head, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=7.5, color=FAINT)
        figure.savefig(path)


class Panel(NamedTuple):
    """Bars that lie: from the end of one part to that of the next, fainter; then the spread."""

    head: str
    parts: Sequence[Sequence[float]]
    texts: Sequence[str] | None = None
    spread: Sequence[Sequence[float]] | None = None


def lying(
    figure: Figure | SubFigure,
    names: Sequence[str],
    panels: Sequence[Panel],
    colour: Callable[[str], str] = colour_of,
) -> None:
    """Draw panels beside one another, a bar a name."""
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        _lying(axes, names, panel, colour)


def _lying(axes: Axes, names: Sequence[str], panel: Panel, colour: Callable[[str], str]) -> None:
    ends = [0.0] * len(names)
    for part, shade in zip(panel.parts, (1.0, 0.45), strict=False):
        widths = [max(0.0, end - start) for start, end in zip(ends, part, strict=True)]
        colours = [(colour(name), shade) for name in names]
        axes.barh(range(len(names)), widths, 0.72, left=ends, color=colours)
        ends = [max(pair) for pair in zip(ends, part, strict=True)]
    for place, end in enumerate(ends):
        text, edge = significant(end) if panel.texts is None else panel.texts[place], end
        if panel.spread is not None:
            axes.plot(panel.spread[place], (place, place), color=INK, linewidth=0.9)
            edge = max(end, panel.spread[place][1])
        where: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(text, (edge, place), (4, 0), fontsize=8.5, color=INK, **where)
    axes.set_title(panel.head)
    axes.margins(x=0.2)
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def clusters(
    axes: Axes,
    colours: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    write: Callable[[float, float, int], str],
    size: int,
) -> None:
    """Draw a cluster of bars per name, a bar per colour; write: (value, first value, index)."""
    step = 0.84 / len(colours)
    for index, colour in enumerate(colours):
        heights = [values[index] for values in groups.values()]
        centres = [at + (index - (len(colours) - 1) / 2) * step for at in range(len(groups))]
        bars = axes.bar(centres, heights, width=0.93 * step, color=colour)
        labels = [write(values[index], values[0], index) for values in groups.values()]
        axes.bar_label(bars, labels, padding=2, fontsize=size, color=INK, linespacing=1.25)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.margins(y=0.18)


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """Return ascending values moved no further than it takes to lie `gap` apart."""
    right, left = list(values), list(values)
    for index in range(1, len(values)):
        right[index] = max(right[index], right[index - 1] + gap)
        left[-1 - index] = min(left[-1 - index], left[-index] - gap)
    return [sum(pair) / 2 for pair in zip(right, left, strict=True)]


def name_points(axes: Axes, points: Points, names: Sequence[str], gap: float = 0.058) -> None:
    """Write names right of the axes, each with a line to its point; gap: of the axes' height."""
    (low, high), order = axes.get_ylim(), sorted(range(len(points)), key=lambda i: points[i][::-1])
    heights = [(points[index][1] - low) / (high - low) for index in order]
    arrow = {"arrowstyle": "-", "color": "#b5b5b5", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2}
    for place, (index, height) in enumerate(zip(order, _apart(heights, gap), strict=True)):
        # no lower than the axes, and no higher
        inside = max(gap * place, min(height, 1 - gap * (len(names) - 1 - place)))
        axes.annotate(
            names[index], points[index], (1.03, inside), textcoords=axes.transAxes,
            arrowprops=arrow | {"relpos": (0, 0.5)}, fontsize=8, va="center", color=INK, zorder=1,
        )  # fmt: skip
