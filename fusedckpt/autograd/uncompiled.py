"""Functions that Dynamo is to leave alone, also where it compiles what calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._compile import _disable_dynamo

# what Dynamo runs frames by, None where it is not at work; private to torch
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_callback: Callable[[], Any] = getattr(_eval_frame, "get_eval_frame_callback", lambda: True)
_codes: set[CodeType] = set()


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as torch's own disabling makes it, but at no cost where that is idle."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args) if _callback() is None else disabled(*args)

    never_compile(call)
    return call


def never_compile(*functions: Any) -> None:
    """Have Dynamo, once it is there, not compile these by themselves."""
    _codes.update(fn.__code__ for fn in functions if isinstance(fn, FunctionType))


def tell_dynamo() -> None:
    """Tell Dynamo what to leave alone, if it is there and does not know."""
    if _codes and (dynamo := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        while _codes:
            dynamo.skip_code(_codes.pop())
