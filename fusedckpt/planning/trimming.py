"""Containers among the arguments of units, where these run without a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusedckpt.state.holders import nested, trimmer


def trimmers_of(args: Any, kwargs: Any) -> list[Callable[[], None]]:
    """Return functions that take from containers among arguments the items added from now on.

    A unit may add tensors of its own graph to a dict, which its segment holds: where no backward
    comes, they would hold each other.
    """
    return [trimmer(x) for value in (*args, *kwargs.values()) for x in nested(value)]
