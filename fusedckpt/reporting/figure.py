"""How figures look, all alike."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["BLUE", "FAINT", "GREY", "INK", "RED", "STYLE", "drawing"]

# Okabe and Ito's, told apart with every kind of colour vision
BLUE, RED, GREY = "#0072b2", "#d55e00", "#8c8c8c"
INK, FAINT = "#222222", "#6b6b6b"
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


def drawing(module: str, caller: str) -> Any:
    """Return a module that draws; raise ImportError, naming the caller, without matplotlib."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{caller}: expected matplotlib to be installed, as pip install 'fusedckpt[bench]' "
            f"does: {error}"
        ) from error
