"""Calls of attention and of scans as regions, without a change of the model.

While a checkpoint runs that asks for regions named "attention", these are such regions:
F.scaled_dot_product_attention, the functions of transformers' attention interface, and those of
flash_attn; of regions named "scan", the functions of `scans`. In other threads they are plain
calls, as every region outside of a checkpoint is. Under torch.compile a policy saves the outputs of
attention's ops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import cache, partial, update_wrapper
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fusedckpt.autograd import private
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.checkpointing import scans
from fusedckpt.checkpointing.regions import CheckpointPhase, region, regions_seen

NAME = "attention"
# torch's function, which these call, is the region
_NO_REGIONS = ("sdpa", "paged|sdpa")
# of versions 2 and 3
_FLASH = ("flash_attn.flash_attn_interface", "flash_attn_interface")

# where a function is found, its name there, and its region
_Place = tuple[MutableMapping[str, Any], str, Any]
# those of torch.nn.functional
_TORCH: Any = vars(F)


_lock = threading.Lock()


class _Functions:
    """Functions that are regions while a checkpoint runs that asks for them."""

    def __init__(self, find: Callable[[], Iterator[_Place]]):
        self._find = find
        self._num_running = 0
        self._undo = ExitStack()

    @contextmanager
    def regions(self) -> Iterator[None]:
        """Let their names mean the regions meanwhile."""
        with _lock:
            for table, name, ours in () if self._num_running else [*self._find()]:
                self._undo.callback(_put_back, table, name, ours, table[name])
                table[name] = ours
            self._num_running += 1
        try:
            yield
        finally:
            with _lock:
                self._num_running -= 1
                if not self._num_running:
                    self._undo.close()


def _put_back(table: MutableMapping[str, Any], name: str, ours: Any, fn: Any) -> None:
    if table[name] is not ours:
        # replaced meanwhile
        return
    if not isinstance(table, dict):
        # an entry of its own, beside those of its class
        del table[name]
    if table.get(name) is not fn:
        table[name] = fn


def _cast(x: Any) -> Any:
    """Cast as autocast does, but outside of a region, which does not save its inputs."""
    is_cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    to = autocast_dtype(x.device) if is_cast else None
    return x if to is None else x.to(to)


def _attention() -> Iterator[_Place]:
    name = "scaled_dot_product_attention"
    fn = _TORCH[name]
    run = region(_TORCH[name], NAME)

    def ours(*args: Any, **kwargs: Any) -> Any:
        return run(*map(_cast, args), **{key: _cast(x) for key, x in kwargs.items()})

    yield _TORCH, name, update_wrapper(ours, fn)
    library = sys.modules.get("transformers.modeling_utils")
    interface: Any = getattr(library, "ALL_ATTENTION_FUNCTIONS", {})
    for name in interface:
        if name not in _NO_REGIONS:
            yield interface, name, _as_region(interface[name], NAME)
    for module in filter(None, map(sys.modules.get, _FLASH)):
        yield from _flash(module)


@cache
def _flash(module: Any) -> tuple[_Place, ...]:
    """Return the Functions of a module of flash_attn, which models import the functions of."""
    kinds = [(name, x) for name, x in vars(module).items() if isinstance(x, type)]
    functions = [(n, x) for n, x in kinds if issubclass(x, torch.autograd.Function)]
    return tuple((vars(module), n, _as_region(x, NAME)) for n, x in functions)


def _scans() -> Iterator[_Place]:
    for table, name, _ in scans.places(scans.SCAN):
        yield table, name, _as_region(table[name], scans.SCAN)


@cache
def _as_region(fn: Any, name: str) -> Any:
    """Return a function, or an autograd Function, as a region."""
    return _wrapped(fn, lambda run: region(run, name))


def _wrapped(fn: Any, wrap: Callable[[Any], Any]) -> Any:
    """Return a function, or an object like an autograd Function, with its calls wrapped."""
    if isinstance(fn, type):
        return SimpleNamespace(apply=wrap(fn.apply))  # type: ignore[attr-defined]
    return update_wrapper(wrap(fn), fn)


@contextmanager
def watching_functions(see: Callable[[str], None]) -> Iterator[None]:
    """Call `see` with the kind of each function of attention or of a mixer that is called."""

    def spying(kind: str, fn: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            see(kind)
            return fn(*args, **kwargs)

        return run

    def spies() -> Iterator[_Place]:
        for table, name, kind in scans.places(scans.SCAN, scans.CONVOLUTION):
            yield table, name, _wrapped(table[name], partial(spying, kind))
        for table, name, _ in _attention():
            yield table, name, _wrapped(table[name], partial(spying, NAME))

    with _Functions(spies).regions(), regions_seen(see):
        yield


# by the names of their regions
_FUNCTIONS = {NAME: _Functions(_attention), scans.SCAN: _Functions(_scans)}


def functions_called(phase: CheckpointPhase) -> AbstractContextManager[Any]:
    """Make calls of functions regions where a checkpoint's phase asks for them."""
    return _called(phase) if phase.patterns else nullcontext()


@contextmanager
def _called(phase: CheckpointPhase) -> Iterator[None]:
    with ExitStack() as stack:
        for name, functions in _FUNCTIONS.items():
            if phase.asks(name):
                stack.enter_context(functions.regions())
        yield


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
