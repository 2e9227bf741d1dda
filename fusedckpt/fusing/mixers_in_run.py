"""Find attention, mixers and modules that save much, in a run of the model on a batch.

Given a batch, a copy runs: it shares the parameters, and all else is its own, so that nothing that
a forward writes is left behind. The tensors that autograd would save are counted, and not kept.
Without, the first training step is observed, see `first_step`. Found are

- the innermost modules with weights that run where a function of attention or of a mixer is called,
  whatever code calls it;
- those whose own operations save more than MOST_TIMES_OUTPUT times their inputs and their result,
  if a second run of them gives the same.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fusedckpt.autograd.dispatch import is_plain
from fusedckpt.autograd.private import pytree, remove_global_hook, storage_key
from fusedckpt.checkpointing.attention import NAME, watching_functions
from fusedckpt.checkpointing.regions import MOST_TIMES_OUTPUT
from fusedckpt.checkpointing.scans import CONVOLUTION, SCAN
from fusedckpt.checkpointing.written_buffers import COPIED_NBYTES
from fusedckpt.fusing.call_state import CallState, modules_in
from fusedckpt.fusing.mixers_in_code import innermost
from fusedckpt.fusing.replica import undisturbed
from fusedckpt.fusing.written_tensors import writes
from fusedckpt.memory import nbytes_of
from fusedckpt.state import rng

# modules with one of these are not run again as a whole
_NOT_RERUN = (nn.ModuleList, nn.Embedding, nn.Conv2d, nn.Conv3d)


class MixersInRun(NamedTuple):
    """The result of a run of a copy of a model."""

    # by the name of a module to run again, kinds of functions; none where no function marks it
    kinds: dict[str, frozenset[str]]
    # by the name of a module, the bytes that its own functions saved
    own_bytes: dict[str, int]


def mixers_in_run(
    model: nn.Module, args: Any, kwargs: Any, swapped: Collection[nn.Module] = ()
) -> MixersInRun | str:
    """Return the modules to run again, by name; or why the run failed.

    args, kwargs: the model's arguments; swapped: its modules that will save little anyway.
    """
    try:
        copied = copy.deepcopy(model, shared_in_copies(model))
    except Exception as error:
        return f"a copy of the model raised {type(error).__name__}: {error}"
    states = rng.states_in(model)
    names = {module: name for name, module in copied.named_modules()}
    observer = _CopyObserver({m for m, n in names.items() if model.get_submodule(n) in swapped})
    try:
        observer.run(copied.train(), args, kwargs)
    except Exception as error:
        return f"the model raised {type(error).__name__}: {error}"
    finally:
        states.restore()
    heavy = {module: set[str]() for module in observer.heavy}
    kinds_by_module = {**heavy, **observer.kinds}
    kinds_by_name = {names[m]: frozenset(k) for m, k in kinds_by_module.items() if m in names}
    return MixersInRun(innermost(kinds_by_name), observer.own_bytes(names))


def shared_in_copies(model: nn.Module) -> dict[int, Any]:
    """Return the objects that a copy of a model shares with it, as a memo of `deepcopy`."""
    # generators too: their states are put back
    shared = {id(x): x for x in (*model.parameters(), *rng.generators_in(model))}
    for parameter in _may_be_written(model):
        shared.pop(id(parameter), None)
    return shared


def _may_be_written(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of modules with code that writes to tensors, and of their layers."""
    for module in model.modules():
        if writes(type(module)):
            for part in (module, *module.children()):
                yield from part.parameters(recurse=False)


class RunObserver:
    """Sees the modules that run where functions are called, or tensors are saved."""

    def __init__(self, swapped: Collection[nn.Module]) -> None:
        self._swapped = swapped
        # by module, the kinds of functions that are called while it is the innermost with weights
        self.kinds: dict[nn.Module, set[str]] = {}
        self._running: list[RunningModule] = []
        # by module, the bytes that its own functions saved in its calls
        self._own_bytes = Counter[nn.Module]()
        # the storages of parameters and buffers, which are not counted
        self._parameters: set[int] = set()
        # the thread that is observed; None during a second run
        self._thread: int | None = threading.get_ident()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Observe the modules of a model that run inside."""
        members = [*model.parameters(), *model.buffers()]
        self._parameters = {storage_key(t.untyped_storage()) for t in members if _is_dense(t)}
        hooks = (
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave, with_kwargs=True, always_call=True),
        )
        counting = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        try:
            with counting, watching_functions(self._note_function):
                yield
        finally:
            for hook in hooks:
                remove_global_hook(hook)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Note that a module begins to run."""
        if threading.get_ident() == self._thread:
            self._running.append(self._begun(module, args))

    def _begun(self, module: nn.Module, args: Any) -> RunningModule:
        is_asked = self._asks(module)
        return RunningModule(module, {}, Before(module, args) if is_asked else None)

    def _asks(self, module: nn.Module) -> bool:
        """Whether it is to be decided of a module that begins to run."""
        raise NotImplementedError

    def own_bytes(self, names: Mapping[nn.Module, str]) -> dict[str, int]:
        """Return the bytes that modules' own functions saved, by the names of these modules."""
        return {names[m]: nbytes for m, nbytes in self._own_bytes.items() if m in names}

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> Any:
        """Decide about a module that has run; return another result for it, if there is one.

        torch passes neither keywords nor a result where the module raised.
        """
        if threading.get_ident() != self._thread or not self._running:
            return None
        if self._running[-1].module is not module:
            return None
        running = self._running.pop()
        self._own_bytes[module] += sum(nbytes for _, nbytes in running.saved.values())
        return self._decide(running, args, kwargs, output)

    def _decide(self, running: RunningModule, args: Any, kwargs: Any, output: Any) -> Any:
        raise NotImplementedError

    def pack(self, tensor: Tensor) -> Any:
        """Count a tensor that is saved; keep nothing."""
        self._count(tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor."""
        raise RuntimeError("the model runs a backward in its forward")

    def saves_much(self, running: RunningModule, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether a call saved more than MOST_TIMES_OUTPUT times its inputs and its result."""
        results = _tensors_in(output)
        saved = sum(nbytes for _, nbytes in running.saved.values())
        # a router's result is small, and so are its saved tensors
        largest = max(
            nbytes_of(filter(_is_dense, tensors))
            for tensors in (results, _tensors_in((args, kwargs)))
        )
        return bool(results) and saved > MOST_TIMES_OUTPUT * largest

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Observe nothing inside."""
        thread = self._thread
        self._thread = None
        try:
            yield
        finally:
            self._thread = thread

    def may_run_again(self, module: nn.Module) -> bool:
        """Whether a module is no layer of torch's, holds no block, and looks at no pictures."""
        if not is_own(module):
            return False
        blocks = (part in self._swapped and has_matrix(part) for part in module.modules())
        return not any(blocks) and not any(isinstance(m, _NOT_RERUN) for m in module.modules())

    def _count(self, tensor: Tensor) -> None:
        """Add a saved tensor to the innermost module with weights."""
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

    def _innermost(self) -> RunningModule | None:
        # a module without weights exists for the call alone
        with_weights = (r for r in reversed(self._running) if has_matrix(r.module))
        return next(with_weights, None)

    def _note_function(self, kind: str) -> None:
        if kind not in (NAME, SCAN, CONVOLUTION) or threading.get_ident() != self._thread:
            return
        running = self._innermost()
        if running is not None:
            self.kinds.setdefault(running.module, set()).add(kind)


class _CopyObserver(RunObserver):
    """Observes a run of a copy of the model."""

    def __init__(self, swapped: Collection[nn.Module]) -> None:
        super().__init__(swapped)
        # modules with own operations that save much
        self.heavy: set[nn.Module] = set()
        # modules whose operations do not, or that do not give the same in a second run
        self._light: set[nn.Module] = set()

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run a model on a batch."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with undisturbed(device), self.watching(model):
            model(*args, **kwargs)

    def _asks(self, module: nn.Module) -> bool:
        return module not in self._light and self.may_run_again(module)

    def _decide(self, running: RunningModule, args: Any, kwargs: Any, output: Any) -> None:
        module, _, before = running
        if before is None:
            return
        if self._is_heavy(running, before, args, kwargs, output):
            self.heavy.add(module)
        else:
            self.heavy.discard(module)
            self._light.add(module)

    def _is_heavy(
        self, running: RunningModule, before: Before, args: Any, kwargs: Any, output: Any
    ) -> bool:
        """Whether a call saved much, and a second run of it gives the same."""
        if not self.saves_much(running, args, kwargs, output):
            return False
        module = running.module
        with self.unobserved():
            try:
                with before.restored(), torch.no_grad():
                    again = type(module).forward(module, *args, **kwargs)
            except Exception:  # arbitrary code of others
                return False
        return repeat_alike(again, output)


class RunningModule(NamedTuple):
    """A module that runs."""

    module: nn.Module
    # the tensors that its own operations save, by storage: a weak reference, and bytes
    saved: dict[int, tuple[StorageWeakRef, int]]
    # the state before it ran, where it is to be decided of it
    before: Before | None


class Before:
    """The state before a call of a module."""

    def __init__(self, module: nn.Module, args: Sequence[Any]):
        self._module = module
        self._state = CallState(modules_in(module), args)
        self._random = rng.RandomStates(rng.everywhere())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring the state back meanwhile, after the call; a run inside changes none of it."""
        self._state.end()
        with self._random.restored(), self._state.restored():
            for module in self._module.modules():
                # they are put back with the others; kernels may write them uncounted
                buffers = {n: _copied(module, b) for n, b in module._buffers.items()}
                module._buffers.update(buffers)
            yield


def _copied(module: nn.Module, buffer: Tensor | None) -> Tensor | None:
    """Return a copy of a buffer of statistics, or of a small one; another one as it is."""
    is_statistic = type(module).__module__.startswith("torch.")
    if buffer is None or not (is_statistic or buffer.nbytes <= COPIED_NBYTES):
        return buffer
    return buffer.detach().clone()


def is_own(module: nn.Module) -> bool:
    """Whether a module with a weight is of no class of torch's or ours."""
    return not type(module).__module__.startswith(("torch.", "fusedckpt.")) and has_matrix(module)


def has_matrix(module: nn.Module) -> bool:
    """Whether a module, or one inside, has a weight of two dimensions or more."""
    return any(p.dim() > 1 for p in module.parameters())


def _is_dense(tensor: Tensor) -> bool:
    return is_plain(type(tensor)) and tensor.layout == torch.strided and not tensor.is_nested


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def repeat_alike(again: Any, before: Any) -> bool:
    """Whether the results of two runs of a module are the same tensors, up to rounding."""
    pairs = zip(_tensors_in(again), _tensors_in(before), strict=False)
    return len(_tensors_in(again)) == len(_tensors_in(before)) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in pairs
    )
