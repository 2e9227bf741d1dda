"""Checks of one argument; every error names function, argument, expected value and given one.

numpy's integers, floats and bools count as Python's. A bool is no number, a tensor no number or
flag, and a number is finite.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any, NoReturn

import numpy as np
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = 2**63 - 1


def wrong_type(name: str, key: str, expected: str, given: Any) -> NoReturn:
    """Raise the TypeError of an argument."""
    raise TypeError(f"{name}: {key} must be {expected}, got {type(given).__name__}")


def wrong_value(name: str, key: str, expected: str, given: Any) -> NoReturn:
    """Raise the ValueError of an argument."""
    raise ValueError(f"{name}: {key} must be {expected}, got {given!r}")


def number(name: str, key: str, given: Any, least: float = -math.inf) -> None:
    """Refuse a value that is no finite real number, or a smaller one than `least`."""
    if type(given) is float:
        value = given
    elif isinstance(given, (float, int, np.floating, np.integer)) and not isinstance(given, bool):
        try:
            value = float(given)
        except OverflowError:
            value = math.inf
    else:
        wrong_type(name, key, "a number", given)
    if not (least <= value and -math.inf < value < math.inf):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        wrong_value(name, key, f"a finite number{bound}", given)


def probability(name: str, key: str, given: Any) -> None:
    """Refuse a value that is no probability."""
    number(name, key, given, 0)
    if given > 1:
        wrong_value(name, key, "a probability", given)


def integer(name: str, key: str, given: Any, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer, which is from `least` to `most`."""
    value = given
    if type(given) is not int and not isinstance(given, torch.SymInt):
        try:
            value = None if isinstance(given, bool) else operator.index(given)
        except (TypeError, RuntimeError):
            # RuntimeError: a tensor on meta
            value = None
        if value is None:
            wrong_type(name, key, "an integer", given)
    if not least <= value <= most:
        wrong_value(name, key, f"an integer from {least} to {most}", given)
    return value


def flag(name: str, key: str, given: Any) -> bool:
    """Return a flag: True, False, or 1 or 0 for them."""
    if given is not True and given is not False:
        if not isinstance(given, (int, np.integer, np.bool_)):
            wrong_type(name, key, "True or False", given)
        if given not in (0, 1):
            wrong_value(name, key, "True or False", given)
    return bool(given)


def choice(name: str, key: str, given: Any, choices: Collection[str]) -> None:
    """Refuse a value that is none of these strings."""
    if not isinstance(given, str):
        wrong_type(name, key, f"one of {', '.join(choices)}", given)
    if given not in choices:
        wrong_value(name, key, f"one of {', '.join(choices)}", given)


def device(name: str, given: Any, key: str = "device") -> None:
    """Refuse a value that torch.device refuses."""
    try:
        torch.device(given)
    except TypeError:
        wrong_type(name, key, "a torch.device or what names one", given)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name}: {key} must be one of torch's, got {given!r} ({reason})"
        ) from None


def dtype(name: str, given: Any, key: str = "dtype") -> None:
    """Refuse a dtype that no layer computes in."""
    if not isinstance(given, torch.dtype):
        wrong_type(name, key, "a torch.dtype", given)
    if given not in DTYPES:
        wrong_value(name, key, f"one of {', '.join(map(str, DTYPES))}", given)
