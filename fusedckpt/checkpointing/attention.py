"""Calls of attention as regions, without a change of the model.

While a checkpoint runs that asks for regions named "attention", F.scaled_dot_product_attention and
the functions of transformers' attention interface are such regions. Other threads call them as
ever, as a region outside of a checkpoint is a plain call. Under torch.compile a policy saves the
outputs of attention's ops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fusedckpt.autograd import private
from fusedckpt.checkpointing.regions import Keeper, region

NAME = "attention"
# torch's function, which these call, is the region
_NO_REGIONS = ("sdpa", "paged|sdpa")

_lock = threading.Lock()
_num_running = 0
# where a function was found, its name there, and the function and its region
_wrapped: list[tuple[MutableMapping[str, Any], str, Any, Any]] = []


def attention_called(keeper: Keeper) -> AbstractContextManager[None]:
    """Make calls of attention regions where a checkpoint's phase asks for them."""
    return _regions() if keeper.asks(NAME) else nullcontext()


@contextmanager
def _regions() -> Iterator[None]:
    global _num_running
    with _lock:
        if not _num_running:
            _wrap()
        _num_running += 1
    try:
        yield
    finally:
        with _lock:
            _num_running -= 1
            if not _num_running:
                _unwrap()


def _wrap() -> None:
    library = sys.modules.get("transformers.modeling_utils")
    interface: Any = getattr(library, "ALL_ATTENTION_FUNCTIONS", {})
    places: list[Any] = [(vars(F), "scaled_dot_product_attention")]
    places += [(interface, name) for name in interface if name not in _NO_REGIONS]
    for table, name in places:
        fn = table[name]
        table[name] = ours = update_wrapper(region(fn, NAME), fn)
        _wrapped.append((table, name, fn, ours))


def _unwrap() -> None:
    while _wrapped:
        table, name, fn, ours = _wrapped.pop()
        if table[name] is not ours:
            # replaced meanwhile
            continue
        if not isinstance(table, dict):
            # an entry of its own, beside those of its class
            del table[name]
        if table.get(name) is not fn:
            table[name] = fn


# torch.compile cannot trace fnmatch
@private.constant_result
def is_asked(patterns: Collection[str]) -> bool:
    """Whether patterns of regions' names mean attention."""
    return any(fnmatchcase(NAME, pattern) for pattern in patterns)


_ATEN = torch.ops.aten
_OPS = {
    getattr(_ATEN, name).default
    for name in dir(_ATEN)
    if name.startswith("_scaled_dot_product_") and not name.endswith("_backward")
}


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = op in _OPS or getattr(op, "__name__", "") == "flex_attention"
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


# made here, as a function made while torch.compile traces is none that it can call then
SAVED_CONTEXTS: Any = partial(_contexts)
# by this torch.compile finds graphs in its cache
SAVED_CONTEXTS.cache_hash = "fusedckpt attention 1"
