"""What pictures share: a colour for each kind of implementation, title and footer."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusedckpt.reporting.figure import BLUE, FAINT, GREY, INK, RED, STYLE

__all__ = ["OURS", "Family", "draw_clusters", "family", "save"]

# inches: as wide as READMEs show pictures, so that letters are as large as those of the text
WIDTH = 10.0


class Family(NamedTuple):
    """What a legend says and the colour beside it."""

    label: str
    colour: str


# told apart with every kind of colour vision (Okabe and Ito), and in print
EAGER = Family("eager", GREY)
COMPILE = Family("torch.compile", RED)
CHECKPOINT = Family("torch.utils.checkpoint", "#e69f00")
FUSED = Family("fusedckpt", BLUE)
OURS = Family("fusedckpt.checkpoint", "#56b4e9")
PLAN = Family("fusedckpt.plan", "#cc79a7")
OTHERS = Family("other libraries", "#009e73")

# by how a name starts, the first that fits; the rest are other libraries
STARTS = {
    "eager": EAGER,
    "plain": EAGER,
    "torch.compile": COMPILE,
    "checkpoint": CHECKPOINT,
    "torch": CHECKPOINT,
    "ours(": OURS,
    "fuse+ckpt": OURS,
    "fuse+plan": PLAN,
    "fused, plan": PLAN,
    "plan": PLAN,
    "fuse": FUSED,
}


def family(name: str) -> Family:
    """Return who an implementation of `run`, `capacity` or `demo` belongs to."""
    return next((found for start, found in STARTS.items() if name.startswith(start)), OTHERS)


def draw_clusters(
    axes: Axes,
    colours: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    write: Callable[[float, float, int], str],
    size: int,
) -> None:
    """Draw a cluster of bars per group, a bar per colour; write: (value, first value, index)."""
    step = 0.84 / len(colours)
    for index, colour in enumerate(colours):
        heights = [values[index] for values in groups.values()]
        centres = [group + (index - (len(colours) - 1) / 2) * step for group in range(len(groups))]
        bars = axes.bar(centres, heights, width=0.93 * step, color=colour)
        labels = [write(values[index], values[0], index) for values in groups.values()]
        axes.bar_label(bars, labels, padding=2, fontsize=size, color=INK, linespacing=1.25)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.margins(y=0.18)


def save(
    path: Path, height: float, head: str, sources: Iterable[str], draw: Callable[[Figure], None]
) -> None:
    """Draw below a title, over lines that say where the numbers come from."""
    lines = [line for source in sources for line in textwrap.wrap(source, int(17 * WIDTH))]
    with mpl.rc_context(STYLE):
        size = (WIDTH, height + 0.16 * len(lines))
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        draw(figure)
        figure.suptitle(head, x=0.01, ha="left", fontsize=13, fontweight="bold")
        text = "\n".join(lines)
        figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color=FAINT)
        figure.savefig(path)
