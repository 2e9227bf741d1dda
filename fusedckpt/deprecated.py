"""Names of the version before, which still work, and warn, for one version."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

# public names of fusedckpt, and their names now
RENAMED = {
    "Checkpoint": "checkpoint_module",
    "QuantisedWeight": "QuantizedWeight",
    "paths": "backends",
    "register_quantised": "register_quantized",
    "schedule": "explain",
}

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keyword arguments by their names of the version before: old="new".

    Raises:
        TypeError: a call passes an argument by both of its names.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{fn.__name__}: {old} is the former name of {new}, pass one")
                warn_of(f"{fn.__name__}({old}=)", f"{fn.__name__}({new}=)")
                kwargs[new] = kwargs.pop(old)
            return fn(*args, **kwargs)

        return call

    return decorate


def warn_of(old: str, new: str) -> None:
    """Warn the code that called the caller of this function."""
    message = f"{old} has become {new}; the old name goes in the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
