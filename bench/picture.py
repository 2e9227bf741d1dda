"""What pictures share: a colour for each kind of implementation, title and footer."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from fusedckpt._figure import BLUE, FAINT, GREY, RED, STYLE

__all__ = ["CHECKPOINT", "EAGER", "OURS", "PLAN", "Family", "family", "save"]

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
    "torch.compile": COMPILE,
    "checkpoint": CHECKPOINT,
    "torch(": CHECKPOINT,
    "ours(": OURS,
    "fuse+ckpt": OURS,
    "fuse+plan": PLAN,
    "fuse": FUSED,
}


def family(name: str) -> Family:
    """Return who an implementation of `run`, `capacity` or `demo` belongs to."""
    return next((found for start, found in STARTS.items() if name.startswith(start)), OTHERS)


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
