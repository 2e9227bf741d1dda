"""Functions that Dynamo is to leave alone, also where it compiles what calls them."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._compile import _disable_dynamo

# what Dynamo runs frames by, which is there before Dynamo is; private to torch
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_act: Callable[..., None] | None = getattr(_frames, "set_code_exec_strategy", None)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo compile neither a function nor what it calls."""
    if _act is None:
        return _disable_dynamo(function)
    skip = _frames._FrameAction.SKIP
    _act(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function


def never_compile(*functions: Any) -> None:
    """Have Dynamo not compile functions by themselves, but what they call."""
    for function in functions:
        if _act is not None and isinstance(function, FunctionType):
            action = _frames._FrameAction
            _act(function.__code__, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
