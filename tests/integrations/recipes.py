"""The recipes of the page on integrations, as they stand there."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "fusedckpt/integrations/README.md"


def recipe(mark: str) -> str:
    """Return the one block of Python code of the page that has a mark in it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if mark in block]
    return found
