"""The look of all figures, and the file that they are written to."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's, told apart with every kind of color vision
BLUE = "#0072b2"
RED = "#d55e00"
GREY = "#8c8c8c"
# of text and lines
INK = "#222222"
FAINT = "#6b6b6b"
# the unit of bytes on axes
MIB = 2**20
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#b5b5b5",
    "axes.labelcolor": FAINT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
}


@contextmanager
def panel(path: str | Path, caller: str) -> Iterator[Any]:
    """Yield a figure and its axes, and write it as `panels` does."""
    with panels(path, caller, count=1) as (figure, axes):
        yield figure, axes


@contextmanager
def panels(
    path: str | Path, caller: str, rect: Any = None, count: int = 2, **options: Any
) -> Iterator[Any]:
    """Yield a figure and two axes side by side, and write it in the format of the path's suffix.

    rect: the part of the figure that the axes take. count: the number of axes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: it has no such format.
    """
    try:
        mpl = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
        engines = importlib.import_module("matplotlib.layout_engine")
    except ImportError as error:
        raise ImportError(
            f"{caller}: expected matplotlib to be installed, as pip install 'fusedckpt[bench]' "
            f"does: {error}"
        ) from error
    with mpl.rc_context(STYLE):
        layout = engines.ConstrainedLayoutEngine(rect=rect or (0, 0, 1, 1), wspace=0.05)
        figure = figures.Figure(figsize=(13, 5), dpi=160, layout=layout)
        suffix = Path(path).suffix.removeprefix(".").lower()
        if suffix and suffix not in figure.canvas.get_supported_filetypes():
            raise ValueError(f"{caller}: expected a file such as memory.png or .svg, got {path}")
        yield figure, figure.subplots(1, count, **options)
        figure.savefig(path)
