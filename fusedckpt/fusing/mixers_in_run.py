"""Find attention, mixers and modules that save much, by running the model once on a batch.

A copy runs: it shares the parameters, and all else is its own, so that nothing that a forward
writes is left behind. The tensors that autograd would save are counted, and not kept. Found are

- the innermost modules with weights that run where a function of attention or of a mixer is called,
  whatever code calls it;
- those whose own operations save more than MOST times their inputs and their result, if a second
  run of them gives the same.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fusedckpt.autograd.dispatch import is_plain
from fusedckpt.autograd.private import pytree, remove_global_hook, storage_key
from fusedckpt.checkpointing.attention import NAME, watching_functions
from fusedckpt.checkpointing.regions import MOST
from fusedckpt.checkpointing.scans import CONVOLUTION, SCAN
from fusedckpt.fusing.mixers_in_code import innermost
from fusedckpt.fusing.replica import undisturbed
from fusedckpt.memory import nbytes_of
from fusedckpt.state import rng

# modules with one of these are not run again as a whole
_NOT_RERUN = (nn.ModuleList, nn.Embedding, nn.Conv2d, nn.Conv3d)


def mixers_in_run(
    model: nn.Module, batch: Any, swapped: Collection[nn.Module] = ()
) -> dict[str, frozenset[str]] | str:
    """Return the names of the modules to run again, and kinds of functions; or why it failed.

    batch: the model's arguments, a dict of them, a tuple, or one tensor; swapped: its modules that
    will save little anyway. Of a module that no function marks the kinds are empty.
    """
    try:
        # generators too: their states are put back
        shared = {id(x): x for x in (*model.parameters(), *_generators(model))}
        copied = copy.deepcopy(model, shared)
    except Exception as error:
        return f"a copy of the model raised {type(error).__name__}: {error}"
    states = rng.RandomStates(filter(None, map(rng.of_object, _generators(model))))
    names = {module: name for name, module in copied.named_modules()}
    observer = _RunObserver({m for m, n in names.items() if model.get_submodule(n) in swapped})
    try:
        observer.run(copied.train(), batch)
    except Exception as error:
        return f"the model raised {type(error).__name__}: {error}"
    finally:
        states.restore()
    heavy = {module: set[str]() for module in observer.heavy}
    kinds_by_module = {**heavy, **observer.kinds}
    return innermost(
        {names[m]: frozenset(kinds) for m, kinds in kinds_by_module.items() if m in names}
    )


def _generators(model: nn.Module) -> list[torch.Generator]:
    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Generator)]


class _RunObserver:
    """Sees the modules that run where functions are called, or tensors are saved."""

    def __init__(self, swapped: Collection[nn.Module]) -> None:
        self._swapped = swapped
        # by module, the kinds of functions that are called while it is the innermost with weights
        self.kinds: dict[nn.Module, set[str]] = {}
        # modules whose own operations save much
        self.heavy: set[nn.Module] = set()
        # modules whose operations do not, or that do not give the same in a second run
        self._light: set[nn.Module] = set()
        self._running: list[_RunningModule] = []
        # the storages of parameters and buffers, which are not counted
        self._parameters: set[int] = set()
        # the thread that is observed; None during a second run
        self._thread: int | None = threading.get_ident()

    def run(self, model: nn.Module, batch: Any) -> None:
        """Run a model on a batch."""
        args, kwargs = _arguments(batch)
        members = [*model.parameters(), *model.buffers()]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._parameters = {storage_key(t.untyped_storage()) for t in members if _is_dense(t)}
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        )
        counting = torch.autograd.graph.saved_tensors_hooks(self._count, _refuse_backward)
        try:
            with undisturbed(device), counting, watching_functions(self._note_function):
                model(*args, **kwargs)
        finally:
            for hook in hooks:
                remove_global_hook(hook)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(_RunningModule(module, rng.CPU.read(), {}))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or not self._running:
            return
        if self._running[-1].module is not module:
            return
        running = self._running.pop()
        if module in self._light or not self._may_run_again(module):
            return
        if self._is_heavy(running, args, kwargs, output):
            self.heavy.add(module)
        else:
            self.heavy.discard(module)
            self._light.add(module)

    def _is_heavy(self, running: _RunningModule, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether a call saved much, and a second run of it gives the same."""
        results = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        saved = sum(nbytes for _, nbytes in running.saved.values())
        # a router's result is small, and so are its saved tensors
        largest = max(nbytes_of(filter(_is_dense, tensors)) for tensors in (results, inputs))
        if not results or saved <= MOST * largest:
            return False
        thread = self._thread
        self._thread = None
        is_repeated = _repeats(results, running, args, kwargs)
        self._thread = thread
        return is_repeated

    def _may_run_again(self, module: nn.Module) -> bool:
        """Whether a module is no layer of torch's, holds no block, and looks at no pictures."""
        if type(module).__module__.startswith(("torch.", "fusedckpt.")) or not has_matrix(module):
            return False
        blocks = (part in self._swapped and has_matrix(part) for part in module.modules())
        return not any(blocks) and not any(isinstance(m, _NOT_RERUN) for m in module.modules())

    def _count(self, tensor: Tensor) -> None:
        """Add a saved tensor to the innermost module with weights; keep nothing."""
        if threading.get_ident() != self._thread or not _is_dense(tensor):
            return
        if any(running.module in self._swapped for running in self._running):
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        running = self._innermost()
        if running is not None and key not in self._parameters:
            # a weak reference keeps the address from being used for another storage
            running.saved[key] = StorageWeakRef(storage), storage.nbytes()

    def _innermost(self) -> _RunningModule | None:
        # a module without weights exists for the call alone
        with_weights = (r for r in reversed(self._running) if has_matrix(r.module))
        return next(with_weights, None)

    def _note_function(self, kind: str) -> None:
        if kind not in (NAME, SCAN, CONVOLUTION) or threading.get_ident() != self._thread:
            return
        running = self._innermost()
        if running is not None:
            self.kinds.setdefault(running.module, set()).add(kind)


class _RunningModule(NamedTuple):
    """A module that runs."""

    module: nn.Module
    # the state of the random numbers before it ran
    random_state: Tensor
    # the tensors that its own operations save, by storage: a weak reference, and bytes
    saved: dict[int, tuple[StorageWeakRef, int]]


def has_matrix(module: nn.Module) -> bool:
    """Whether a module, or one inside, has a weight of two dimensions or more."""
    return any(p.dim() > 1 for p in module.parameters())


def _refuse_backward(_: Any) -> Tensor:
    raise RuntimeError("the model runs a backward in its forward")


def _is_dense(tensor: Tensor) -> bool:
    return is_plain(type(tensor)) and tensor.layout == torch.strided and not tensor.is_nested


def _repeats(results: list[Tensor], running: _RunningModule, args: Any, kwargs: Any) -> bool:
    """Whether a second run of a module gives these results."""
    rng.CPU.write(running.random_state)
    module = running.module
    try:
        with torch.no_grad():
            leaves = pytree.tree_leaves(type(module).forward(module, *args, **kwargs))
    except Exception:  # arbitrary code of others
        return False
    again = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return len(again) == len(results) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(again, results, strict=True)
    )


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    return tuple(batch), {}
