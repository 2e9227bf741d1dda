"""Parts of figures: a color per kind of implementation, bars, dots with their names."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from bench.tables import significant
from fusedckpt.reporting.figure import BLUE, FAINT, GREY, INK, RED, STYLE

# inches: as wide as READMEs show pictures, so that letters are as large as those of the text
WIDTH = 10.0
GRID = "#ececec"
Points = Sequence[tuple[float, float]]


class Family(NamedTuple):
    """A text in the legend and the color beside it."""

    label: str
    color: str


# told apart with every kind of color vision (Okabe and Ito), and in print
OURS = Family("fusedckpt.checkpoint", "#56b4e9")
# by how a name starts, the first that fits; all else are other libraries
_FAMILIES = (
    (("eager", "plain"), Family("eager", GREY)),
    (("torch.compile", "compile"), Family("torch.compile", RED)),
    (("checkpoint", "torch", "selective"), Family("torch.utils.checkpoint", "#e69f00")),
    (("ours(", "fuse+ckpt"), OURS),
    (("fuse+plan", "fused, plan", "plan"), Family("fusedckpt.plan", "#cc79a7")),
    (("fuse preact",), Family("fusedckpt, keeping GEMM outputs", OURS.color)),
    (("fuse approximate",), Family("fusedckpt, approximate", "#009e73")),
    (("approximate",), Family("approximate", "#cc79a7")),
    (("fuse",), Family("fusedckpt", BLUE)),
    (("",), Family("other libraries", "#009e73")),
)


def family(name: str) -> Family:
    """Return the family of an implementation or of a way of training."""
    return next(member for starts, member in _FAMILIES if name.startswith(starts))


def color_of(name: str) -> str:
    """Return the color of a name's family."""
    return family(name).color


def save(
    path: Path, height: float, head: str, lines: Iterable[str], draw: Callable[[Figure], None]
) -> None:
    """Draw below a title, over lines that say where the numbers come from."""
    wrapped = [part for line in lines for part in textwrap.wrap(line, int(17 * WIDTH))]
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
    color: Callable[[str], str] = color_of,
) -> None:
    """Draw panels beside one another, a bar a name."""
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        _lying(axes, names, panel, color)


def _lying(axes: Axes, names: Sequence[str], panel: Panel, color: Callable[[str], str]) -> None:
    ends = [0.0] * len(names)
    for part, shade in zip(panel.parts, (1.0, 0.45), strict=False):
        widths = [max(0.0, end - start) for start, end in zip(ends, part, strict=True)]
        colors = [(color(name), shade) for name in names]
        axes.barh(range(len(names)), widths, 0.72, left=ends, color=colors)
        ends = [max(pair) for pair in zip(ends, part, strict=True)]
    for place, end in enumerate(ends):
        text = significant(end) if panel.texts is None else panel.texts[place]
        edge = end
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


def _joined(names: Sequence[str]) -> str:
    """Write names in few words: those that begin alike share their first word."""
    by_first_word: dict[str, list[str]] = {}
    for name in names:
        first, space, rest = name.partition(" ")
        by_first_word.setdefault(first + space, []).append(rest)
    parts = [first + ", ".join(rests) for first, rests in by_first_word.items()]
    return "\n".join(textwrap.wrap("; ".join(parts), 34))


def _bundled(places: Points, gap: float) -> list[list[int]]:
    """Return the points, upwards, in bundles that lie within `gap` of their first."""
    bundles: list[list[int]] = []
    for index in sorted(range(len(places)), key=lambda index: places[index][::-1]):
        x, y = places[index]
        for bundle in bundles:
            if abs(places[bundle[0]][0] - x) < gap / 2 and y - places[bundle[0]][1] < gap:
                bundle.append(index)
                break
        else:
            bundles.append([index])
    return bundles


def lines_cross(a: tuple[float, float], end_a: float, b: tuple[float, float], end_b: float) -> bool:
    """Whether straight lines from two points to heights at 1 cross."""
    if a[0] > b[0]:
        a, end_a, b, end_b = b, end_b, a, end_a
    # the height of the first line above the second point
    above = a[1] + (end_a - a[1]) * (b[0] - a[0]) / (1.03 - a[0]) - b[1]
    return above * (end_a - end_b) < 0


def name_points(axes: Axes, points: Points, names: Sequence[str], line: float = 0.058) -> None:
    """Write names right of the axes, each with a line to its point, so that no lines cross.

    Points that lie on one another share a label; line: of the axes' height.
    """
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    places = [((x - left) / (right - left), (y - low) / (high - low)) for x, y in points]
    labels = [
        (places[bundle[0]], points[bundle[0]], _joined([names[index] for index in bundle]))
        for bundle in _bundled(places, line)
    ]
    ends = _ends(labels, line)
    # labels of lines that cross change places, which makes the lines shorter in all
    for _ in range(len(labels) ** 2):
        for i, j in combinations(range(len(labels)), 2):
            if lines_cross(labels[i][0], ends[i], labels[j][0], ends[j]):
                labels[i], labels[j] = labels[j], labels[i]
                ends = _ends(labels, line)
                break
        else:
            break
    arrow = {"arrowstyle": "-", "color": "#b5b5b5", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2}
    for (_, point, text), end in zip(labels, ends, strict=True):
        axes.annotate(
            text, point, (1.03, end), textcoords=axes.transAxes, va="center",
            arrowprops=arrow | {"relpos": (0, 0.5)}, fontsize=8, color=INK, zorder=1,
        )  # fmt: skip


def _ends(labels: Sequence[tuple[Any, Any, str]], line: float) -> list[float]:
    """Return the heights of labels in this order: near their points, apart by their lines."""
    sizes = [line * (text.count("\n") + 1) for *_, text in labels]
    steps = [(a + b) / 2 for a, b in pairwise(sizes)]
    # in a frame where labels that touch are level, the heights must only ascend
    least = [*accumulate(steps, initial=0.0)]
    level = [place[1] - low for (place, *_), low in zip(labels, least, strict=True)]
    up = [*accumulate(level, max)]
    down = [*accumulate(reversed(level), min)][::-1]
    middle = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
    # no lower than the axes, and no higher
    most = max(0.0, 1 - least[-1])
    return [max(0.0, min(m, most)) + low for m, low in zip(middle, least, strict=True)]


def trade(
    axes: Axes,
    points: Points,
    names: Sequence[str],
    head: str,
    ylabel: str,
    kinds: Sequence[str] = (),
) -> None:
    """Draw time against peak memory; outlined: nothing beats it in both. kinds: name colors."""
    front = [points[index] for index in pareto_front(points)]
    axes.step(*zip(*front, strict=True), where="post", color="#c9c9c9", zorder=0)
    for point, name in zip(points, kinds or names, strict=True):
        edge = INK if point in front else "none"
        look: dict[str, Any] = {"edgecolors": edge, "linewidths": 0.9, "zorder": 2}
        axes.scatter(*point, s=34, color=color_of(name), **look)
    axes.margins(0.12)
    axes.set(xlabel="peak (MiB)", ylabel=ylabel)
    axes.set_title(head)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    name_points(axes, points, names)


def pareto_front(points: Points) -> list[int]:
    """Return the indices of the points that no other beats in one and equals in the other."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front
