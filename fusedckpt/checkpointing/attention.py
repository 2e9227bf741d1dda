"""Calls of attention and of scans as regions, without a change of the model.

While a checkpoint runs that asks for regions named "attention", these are such regions:
F.scaled_dot_product_attention, torch's varlen_attn, the functions of transformers' attention
interface, and those of flash_attn; of regions named "scan", the functions of `scans`. In other
threads they are plain calls, as every region outside of a checkpoint is. Under torch.compile a
policy saves the outputs of attention's ops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache, partial, update_wrapper
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fusedckpt.autograd import private
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.checkpointing import scans
from fusedckpt.checkpointing.regions import CheckpointPhase, is_among, region, regions_seen
from fusedckpt.checkpointing.surroundings import NOTHING

NAME = "attention"
# torch's function, which these call, is the region
_NO_REGIONS = ("sdpa", "paged|sdpa")
# of versions 2 and 3
_FLASH = ("flash_attn.flash_attn_interface", "flash_attn_interface")

# those of torch.nn.functional
_TORCH: Any = vars(F)
_lock = threading.Lock()


class _Place(NamedTuple):
    """Where code finds a function, and its region."""

    # a dict, or a mapping of another class
    table: MutableMapping[str, Any]
    # its name there
    name: str
    # the function
    fn: Any
    # the region that takes its place
    region: Any
    # the dict of a class where the function is found as long as the table has no such name
    below: dict[str, Any] | None = None


class _Functions:
    """Functions that are regions while a checkpoint runs that asks for them.

    find: returns them. They are found once, and again where one of them was replaced, or modules or
    functions of attention were added.
    """

    def __init__(self, find: Callable[[], Iterable[_Place]]):
        self._find = find
        self._num_running = 0
        self._places: list[_Place] | None = None
        self._counts: Any = None

    def _are_current(self, counts: Any) -> bool:
        """Whether the functions are still found where they were found, and no others."""
        if self._places is None or counts != self._counts:
            return False
        for table, name, fn, _, below in self._places:
            if (table.get(name) if below is None else below.get(name)) is not fn:
                return False
            if below is not None and name in table:
                return False
        return True

    def _current(self) -> list[_Place]:
        counts = len(sys.modules), next(reversed(sys.modules)), _num_attention()
        if not self._are_current(counts):
            self._places = [*self._find()]
            self._counts = counts
        return self._places or []

    def __enter__(self) -> None:
        with _lock:
            if not self._num_running:
                for table, name, _, ours, _ in self._current():
                    table[name] = ours
            self._num_running += 1

    def __exit__(self, *_: Any) -> None:
        with _lock:
            self._num_running -= 1
            if not self._num_running:
                for table, name, fn, ours, below in reversed(self._places or ()):
                    if table.get(name) is not ours:
                        # replaced meanwhile
                        continue
                    if below is not None or not isinstance(table, dict):
                        # an entry of its own, beside those of its class
                        del table[name]
                    if below is None and table.get(name) is not fn:
                        table[name] = fn


def _cast(x: Any) -> Any:
    """Cast as autocast does, but outside of a region, which does not save its inputs."""
    is_cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    to = autocast_dtype(x.device) if is_cast else None
    return x if to is None else x.to(to)


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask of booleans as numbers that are added to scores, as torch makes them inside.

    Made there, once in each layer, it would stay saved: values of all pairs of tokens.
    """
    numbers = torch.zeros_like(mask, dtype=query.dtype)
    return numbers.masked_fill_(mask.logical_not(), float("-inf"))


@cache
def _attention_of_torch(fn: Any) -> Any:
    run = region(fn, NAME)

    def ours(*args: Any, **kwargs: Any) -> Any:
        if private.is_any_autocast_on():
            args = (*map(_cast, args),)
            kwargs = {key: _cast(x) for key, x in kwargs.items()}
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            added = _added(mask, args[0] if args else kwargs["query"])
            if len(args) > 3:
                args = *args[:3], added, *args[4:]
            else:
                kwargs["attn_mask"] = added
        return run(*args, **kwargs)

    return update_wrapper(ours, fn)


def _attention() -> Iterator[_Place]:
    name = "scaled_dot_product_attention"
    yield _Place(_TORCH, name, _TORCH[name], _attention_of_torch(_TORCH[name]))
    table, below = _interface()
    for name in {**(below or {}), **table}:
        fn = table[name] if name in table or below is None else below[name]
        if name not in _NO_REGIONS:
            yield _Place(table, name, fn, _as_region(fn, NAME), None if name in table else below)
    for module in filter(None, map(sys.modules.get, _FLASH)):
        for name, fn in [*vars(module).items()]:
            # its Functions, as models import its functions by name
            if isinstance(fn, type) and issubclass(fn, torch.autograd.Function):
                yield _Place(vars(module), name, fn, _as_region(fn, NAME))
    if "torch.nn.attention.varlen" in sys.modules:
        # the op that varlen_attn calls, for the same reason
        ops = torch.ops.torch_attn
        if (op := getattr(ops, private.VARLEN_ATTENTION, None)) is not None:
            yield _Place(vars(ops), private.VARLEN_ATTENTION, op, _as_region(op, NAME))


def _interface() -> tuple[MutableMapping[str, Any], dict[str, Any] | None]:
    """Return transformers' table of attention, and the one of its class, which is below it."""
    library = sys.modules.get("transformers.modeling_utils")
    interface: Any = getattr(library, "ALL_ATTENTION_FUNCTIONS", {})
    table: Any = getattr(interface, "_local_mapping", None)
    below: Any = getattr(type(interface), "_global_mapping", None)
    # dicts, where they are known: its own methods are slow
    are_dicts = type(table) is dict and type(below) is dict
    return (table, below) if are_dicts else (interface, None)


def _num_attention() -> int:
    table, below = _interface()
    return len(table) + len(below or ())


def _scans() -> Iterator[_Place]:
    for table, name, _ in scans.places(scans.SCAN):
        yield _Place(table, name, table[name], _as_region(table[name], scans.SCAN))


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
            yield _Place(table, name, table[name], _wrapped(table[name], partial(spying, kind)))
        for place in _attention():
            yield place._replace(region=_wrapped(place.fn, partial(spying, NAME)))

    with _Functions(spies), regions_seen(see):
        yield


# by the names of their regions
_FUNCTIONS = {NAME: _Functions(_attention), scans.SCAN: _Functions(_scans)}


def functions_called(phase: CheckpointPhase) -> AbstractContextManager[Any]:
    """Make calls of functions regions where a checkpoint's phase asks for them."""
    if not phase.patterns:
        return NOTHING
    return _functions_of(tuple(filter(phase.asks, _FUNCTIONS)))


@lru_cache
def _functions_of(names: tuple[str, ...]) -> AbstractContextManager[Any]:
    return _Together([_FUNCTIONS[name] for name in names])


class _Together:
    """Enters several of `_Functions`."""

    def __init__(self, functions: list[_Functions]):
        self._functions = functions

    def __enter__(self) -> None:
        for functions in self._functions:
            functions.__enter__()

    def __exit__(self, *_: Any) -> None:
        for functions in self._functions:
            functions.__exit__()


# torch.compile cannot trace fnmatch
@private.constant_result
def is_asked(patterns: tuple[str, ...]) -> bool:
    """Whether patterns of regions' names mean attention."""
    return is_among(NAME, patterns)


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
