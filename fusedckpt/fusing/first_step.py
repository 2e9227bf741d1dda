"""Look into the first training step of a model for modules that are better run again in backward.

Their code does not show them: a scan in a loop of its own, attention in a helper that a table
chooses. `fuse(model, example_inputs=...)` finds them in a copy that runs; without inputs they wait,
and the first training call shows them. The step is the user's own, observed:

    model(x)                    its class has our forward until that call, see `Waits`
      a module that waits       its saved tensors are counted while it runs
      it saved much             it runs once more, as it will from now on, in the state before its
                                first run; if the results are the same, the second result is the
                                one that the step goes on with, and the first one's graph is freed
      it did not                it stays as it is

So loss, gradients, random states and buffers are those of a step without, and the step saves less
already. The second runs take the memory of one module at a time. The writes of its second run
are undone; a module of which that cannot be said stays, and the report names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, phases, private, tracker
from fusedckpt.autograd.private import pytree
from fusedckpt.checkpointing.call_state import modules_in
from fusedckpt.fusing.fuse_report import FuseReport, join_names
from fusedckpt.fusing.mixers import (
    Before,
    RunningModule,
    RunObserver,
    blocks_around,
    has_matrix,
    is_own,
    mixers_in_run,
    recomputing_swap,
    repeat_alike,
)
from fusedckpt.fusing.recipe_models import gain_of_call
from fusedckpt.fusing.recomputed_modules import LEARNED, Recomputed, repeat_obstacle
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.swap import Original, Swap, made_of, original_of, subclass, undo
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import NO_NOTES, NOTES, clear_notes, notes_of, set_notes
from fusedckpt.recipes.shared_channels import SharedChannels
from fusedckpt.recipes.shared_code import SharedCode
from fusedckpt.state.noted import is_collection

# reasons that a second run gives although it is taken
_INFORMING = "again", "unseen"


@dataclass(eq=False)
class Waiting:
    """The modules of a model that wait for their first training call."""

    # the level of the call of `fuse`
    save: str
    # prints the modules that are found
    report: FuseReport
    # the names of the modules, in order
    names: dict[str, None]
    # how the call of `fuse` lets inputs be kept
    store: str | None = None
    # why the last training call was not looked into, "" if none was made
    obstacle: str = ""

    def swap_of(
        self, module: nn.Module, kinds: frozenset[str], is_gathered: bool = False
    ) -> Swap | NotFused:
        """Return the swap of a module that runs again, and calls these kinds of functions."""
        swap = recomputing_swap(module, kinds, self.save, is_gathered)
        return swap.storing(self.store) if isinstance(swap, Swap) else swap


class PlaceInModel(NamedTuple):
    """The record in the notes of a module that waits, or of the model around."""

    waiting: Waiting
    # its name in the model
    name: str


# the observer of the step that runs
_observer: ContextVar[_StepObserver | None] = ContextVar("fusedckpt_first_step", default=None)
# whether steps are trials, which leave no trace
_on_trial: ContextVar[bool] = ContextVar("fusedckpt_on_trial", default=False)


class Waits(nn.Module):
    """Forward of a model, or of a module that waits: the first training call is looked into."""

    # a Trainer looks a model up by the name of its class
    _fusedckpt_prefix = ""

    @staticmethod
    def _fusedckpt_members(original: type[nn.Module]) -> dict[str, Any]:
        """Return a forward with the signature of the class's own."""

        # by its class, as other code may keep this function when the module waits no more
        @functools.wraps(original.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original.forward, self)
            if torch.compiler.is_compiling() or self.__dict__.get(NOTES, NO_NOTES).waits is None:
                return run(*args, **kwargs)
            return _call(self, run, args, kwargs)

        return {"forward": forward}


def find_waiting(model: nn.Module, search: Search, former: Collection[str] = ()) -> None:
    """Let the modules wait of which only a run can say whether they save much.

    former: names of modules that waited before.
    """
    undecided = {name: search.has(name, "attention") for name in _names_of_undecided(search)}
    names = {name: None for name, is_asked in undecided.items() if is_asked or name in former}
    if search.save == "inputs":
        names.update(
            (name, None) for name in blocks_around(search) if search.has(name, "attention")
        )
    has_channels = any(issubclass(swap.new_class, SharedChannels) for _, swap in search.swaps)
    if not (names or has_channels):
        # of a net of channels the call tells what recipes would bring
        return
    waiting = Waiting(search.save, search.report, names, search.store)
    inside = set[nn.Module]()
    for name, module in search.modules.items():
        if module not in inside and name in names:
            inside.update(module.modules())
            _wait(module, PlaceInModel(waiting, name), search)
    for name, module in _called_as_wholes("", model):
        if name not in names:
            _wait(module, PlaceInModel(waiting, name), search)


def _names_of_undecided(search: Search) -> Iterator[str]:
    """Yield the names of modules of other code, outside of those that are swapped."""
    if search.save != "inputs":
        return
    taken = {m for m, swap in search.swaps if not issubclass(swap.new_class, SharedCode)}
    marked = (module for module in search.modules.values() if original_of(module) is not None)
    taken.update(m for m in marked if not isinstance(m, SharedCode) or _has_parts(m))
    # blocks; layers that share a recipe, and models with recipes, may hold more
    kinds = {module: type(module) for module in search.modules.values() if _has_parts(module)}
    kinds.update((module, swap.new_class) for module, swap in search.swaps if swap.parts)
    inside = {*search.inside}
    for module, kind in kinds.items():
        inside.update(module.modules() if issubclass(kind, Recomputed) else [module])
    for name, module in search.modules.items():
        if not name or module in inside or module in taken or not is_own(module):
            continue
        if not any(part in inside and has_matrix(part) for part in module.modules()):
            yield name


def _called_as_wholes(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model, of a list or dict of models each of them."""
    if type(module).forward is not nn.Module.forward:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _called_as_wholes(join_names(name, key), child)


def _wait(module: nn.Module, place: PlaceInModel, search: Search) -> None:
    """Add the swap by which a module waits, to another one that it may have."""
    for index, (swapped, swap) in enumerate(search.swaps):
        if swapped is module:
            new_class = subclass(Waits, swap.new_class)
            notes = {**swap.notes, "waits": place}
            search.swaps[index] = module, replace(swap, new_class=new_class, notes=notes)
            return
    search.swaps.append(
        (module, Swap("waits", "", subclass(Waits, type(module)), notes={"waits": place}))
    )


def stop_waiting(module: nn.Module) -> PlaceInModel | None:
    """Give a module that waits its class back; return its place, None if it does not wait."""
    place: PlaceInModel | None = notes_of(module).waits
    if place is None:
        return None
    clear_notes(module, "waits")
    original: Original = notes_of(module).original
    made = made_of(type(module))
    if made is not None and made[0] is Waits:
        module.__class__ = made[1]
    # else sharding made a class of it, and that class's forward is now the original one
    notes = tuple(field for field in original.notes if field != "waits")
    if notes or original.attributes or original.parts:
        set_notes(module, original=original._replace(notes=notes))
    else:
        clear_notes(module, "original")
    return place


@contextmanager
def stopped_waiting(model: nn.Module) -> Iterator[list[str]]:
    """Let no module of a model wait; on an error inside they wait as before. Yield their names."""
    before = [
        (m, type(m), notes.waits, notes.original)
        for m in model.modules()
        if (notes := notes_of(m)).waits is not None
    ]
    for module, *_ in before:
        stop_waiting(module)
    try:
        yield [name for _, _, place, _ in before for name in place.waiting.names]
    except BaseException:
        for module, kind, place, original in before:
            module.__class__ = kind
            set_notes(module, waits=place, original=original)
        raise


def learn_from(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Look into a call of a model that waits without a step: a copy runs on these arguments."""
    places = [(m, place) for m in model.modules() if (place := notes_of(m).waits) is not None]
    is_sharded = any(map(private.is_fsdp_module, model.modules()))
    if not (places and model.training) or is_sharded or _obstacle(model, args) is not None:
        return
    names = {module: name for name, module in model.named_modules()}
    with on_trial():
        mixers = mixers_in_run(model, args, kwargs, _swapped_in(model))
    if isinstance(mixers, str):
        for _, place in places:
            place.waiting.obstacle = mixers
        return
    for top, place in places:
        for module, full_name in _undecided_in(top, place).items():
            kinds = mixers.kinds.get(names[module])
            swap = None if kinds is None else place.waiting.swap_of(module, kinds)
            if isinstance(swap, Swap):
                stop_waiting(module)
                swap.apply(module)
                place.waiting.report.run_again(full_name, swap.parts[""])
            elif swap is not None:
                name = type(module).__name__
                place.waiting.report.leave(full_name, "attention", swap, name)
            place.waiting.names.pop(full_name, None)
        stop_waiting(top)


def _undecided_in(top: nn.Module, place: PlaceInModel) -> dict[nn.Module, str]:
    """Return the modules that wait in a module with this place, and their names in the model."""
    return {
        module: full_name
        for name, module in top.named_modules()
        if (full_name := join_names(place.name, name)) in place.waiting.names
    }


def _swapped_in(model: nn.Module) -> set[nn.Module]:
    """Return the modules that are swapped, and save little; a layer that shares may save much."""
    return {module for module in model.modules() if _has_parts(module)}


def _has_parts(module: nn.Module) -> bool:
    original = original_of(module)
    return original is not None and bool(original.parts)


@contextmanager
def on_trial() -> Iterator[None]:
    """Look into no step inside."""
    token = _on_trial.set(True)
    try:
        yield
    finally:
        _on_trial.reset(token)


def _call(module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a module that waits, and look into this call if it is a plain training call."""
    place: PlaceInModel = notes_of(module).waits
    if _observer.get() is not None or not (module.training and torch.is_grad_enabled()):
        return run(*args, **kwargs)
    ranks = private.ranks_of(module)
    obstacle = _obstacle(module, args)
    if obstacle is None:
        is_empty = _is_empty((args, kwargs))
        # another rank may have rows for a module that has none on this one
        if is_empty and ranks is None:
            return run(*args, **kwargs)
    else:
        place.waiting.obstacle = obstacle
        return run(*args, **kwargs)
    observer = _StepObserver(module, place)
    if is_empty:
        y = run(*args, **kwargs)
    else:
        with observer.observing():
            y = observer.run(run, args, kwargs)
    if ranks is not None:
        observer.agree(ranks)
    observer.end()
    if not place.name:
        place.waiting.report.gain[:] = [gain_of_call(module, args, kwargs)]
    return y


def _obstacle(module: nn.Module, args: Any) -> str | None:
    """Return why a training call cannot be looked into, None if it can."""
    if _on_trial.get() or private.is_replica(module):
        return "it was a trial run, or a call of a replica"
    if private.are_transforms_active() or dispatch.is_traced(args[0] if args else None):
        return "it was traced or transformed"
    if private.num_dispatch_modes() or (
        private.num_function_modes() and tracker.has_foreign_modes()
    ):
        return "a mode of other code was active"
    if phases.current() is not None:
        return "it was inside a checkpoint"
    if (reason := phases.hooks_obstacle()) is not None:
        return reason
    if any(p.is_meta for p in module.parameters()):
        return "its parameters were on the meta device"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph was being captured"
    return None


def _is_empty(inputs: Any) -> bool:
    """Whether there is nothing to see, as in a batch of which a rank got no rows."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


class _SavedInRun(NamedTuple):
    """A tensor that autograd saves in the step that is observed."""

    tensor: Tensor
    version: int


class _SecondRun(NamedTuple):
    """A second run of a module: the step continues with its result."""

    output: Any


# by these numbers ranks tell others their decision on a module
_TAKEN = 1
_LEFT = 2


def _code(decided: Swap | NotFused | None) -> int:
    return _TAKEN if isinstance(decided, Swap) else _LEFT


def _obstacle_of(module: nn.Module, args: Any, kwargs: Any) -> NotFused | None:
    """Return why a module is not run a second time, None if it may be."""
    values = *args, *kwargs.values()
    modules = modules_in(module, values)
    for inner in modules:
        if isinstance(inner, nn.SyncBatchNorm) or private.is_fsdp_module(inner):
            return NotFused("collective", type(inner).__name__)
    # of keywords no state was noted before the call
    for value in kwargs.values():
        if isinstance(value, nn.Module) or is_collection(value):
            key = "module" if isinstance(value, nn.Module) else "cache"
            return NotFused(key, type(value).__name__)
    return repeat_obstacle(modules, values)


class _StepObserver(RunObserver):
    """Observes a training step of a model, and swaps the modules that save much."""

    # fused layers may write over tensors that go through these hooks
    only_counts = True

    def __init__(self, top: nn.Module, place: PlaceInModel):
        self._top = top
        self._waiting = place.waiting
        self._report = place.waiting.report
        self._is_gathered = any(map(private.is_fsdp2_module, top.modules()))
        self._full_names = {m: join_names(place.name, n) for n, m in top.named_modules()}
        # by module, the names of those that may be swapped
        self._names = _undecided_in(top, place)
        super().__init__(_swapped_in(top))
        # the modules of which it is decided, and the swap, or why there is none
        self._decided: dict[nn.Module, Swap | NotFused | None] = {}
        # those that run again already, and were called
        self._called = set[nn.Module]()
        # tensors for a hook around, which counts; a graph that is freed does not count
        hooks = private.top_hooks()
        self._outer: Callable[[Tensor], Any] | None = None if hooks is None else hooks[0]
        self._held: list[Tensor] = []
        # by running module, how many were held before
        self._num_held: list[int] = []

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the step that runs inside."""
        token = _observer.set(self)
        try:
            with self.watching(self._top):
                yield
        finally:
            _observer.reset(token)
        if self._outer is not None:
            for tensor in self._held:
                self._outer(tensor)

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of the module that is called."""
        self.enter(self._top, args)
        y = forward(*args, **kwargs)
        again = self.leave(self._top, args, kwargs, y)
        return y if again is None else again

    def pack(self, tensor: Tensor) -> Any:
        """Count a tensor that is saved, and save it."""
        self._count(tensor)
        if self._outer is not None:
            self._held.append(tensor)
        # an output as it is would hold its own node
        return _SavedInRun(tensor.detach(), tensor._version)

    def note_remade(self, tensor: Tensor) -> None:
        """Count a tensor that a recipe stands for, so that recipes change no decision."""
        self._count(tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor; torch checks no version where there are hooks."""
        now = packed.tensor._version
        if now != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{packed.tensor.type()} {[*packed.tensor.shape]}] is at "
                f"version {now}; expected version {packed.version} instead"
            )
        return packed.tensor

    def enter(self, module: nn.Module, args: Any) -> None:
        """Note that a module begins to run, and how many tensors were saved before."""
        super().enter(module, args)
        if self._running and self._running[-1].module is module:
            self._num_held.append(len(self._held))
        if isinstance(module, Recomputed) and notes_of(module).match is None:
            self._called.add(module)

    def _asks(self, module: nn.Module) -> bool:
        if module not in self._names or module in self._decided:
            return False
        if not (module.training and torch.is_grad_enabled()):
            return False
        if phases.current() is not None:
            self._leave_as_it_is(module, NotFused("in checkpoint"))
            return False
        return True

    def _decide(self, running: RunningModule, args: Any, kwargs: Any, output: Any) -> Any:
        module = running.module
        before = running.before
        first = self._num_held.pop()
        if before is None or output is None:
            return None
        kinds = frozenset(self.kinds.get(module, ()))
        is_large = self.may_run_again(module) and self.saves_much(running, args, kwargs, output)
        # of several, one inside another, it is the innermost
        is_around = any(
            m in self._called or (m in self._decided and self._decided[m] is not None)
            for m in module.modules()
        )
        if is_around or not (kinds or is_large):
            self._decided[module] = None
            return None
        swap = self._waiting.swap_of(module, kinds, self._is_gathered)
        obstacle = swap if isinstance(swap, NotFused) else _obstacle_of(module, args, kwargs)
        if obstacle is not None or isinstance(swap, NotFused):
            assert obstacle is not None
            self._leave_as_it_is(module, obstacle)
            return None
        last = len(self._held)
        again = self._second_run(module, swap, before, args, kwargs, output)
        if isinstance(again, NotFused):
            del self._held[last:]
            self._leave_as_it_is(module, again)
            return None
        self._take(module, swap)
        del self._held[first:last]
        return again.output

    def _leave_as_it_is(self, module: nn.Module, reason: NotFused) -> None:
        self._decided[module] = reason
        self._report.leave(self._names[module], "attention", reason, type(module).__name__)

    def _take(self, module: nn.Module, swap: Swap) -> None:
        self._decided[module] = swap
        self._swapped = {*self._swapped, module}
        self._report.run_again(self._names[module], swap.parts[""])

    def _second_run(
        self,
        module: nn.Module,
        swap: Swap,
        before: Before,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> _SecondRun | NotFused:
        """Run a module as it will run from now on; the module is swapped if the result is equal."""
        stop_waiting(module)
        try:
            with self.unobserved(), before.restored():
                # as it was when it was called
                stop_waiting(module)
                swap.apply(module)
                again: Any = module.forward(*args, **kwargs)
                notes = {field: getattr(notes_of(module), field) for field in LEARNED}
                fallback = vars(module).get(fallbacks.NOTE)
        except torch.OutOfMemoryError:
            return NotFused("memory")
        except Exception as error:  # arbitrary code of others
            return NotFused("second", type(error).__name__)
        if fallback is not None and fallback[0] not in _INFORMING:
            return NotFused(*fallback)
        if not repeat_alike(again, output):
            return NotFused("twice")
        swap.apply(module)
        set_notes(module, **notes)
        if fallback is not None:
            fallbacks.note_fallback(module, fallback)
        return _SecondRun(again)

    def agree(self, ranks: private.Ranks) -> None:
        """Decide as all ranks do: one that leaves a module leaves it on all of them."""
        names = [*self._names.items()]
        if not names:
            return
        mine = [
            _code(self._decided.get(module)) if module in self._decided else 0
            for module, _ in names
        ]
        for (module, _), code in zip(names, ranks.most(mine), strict=True):
            decided = self._decided.get(module)
            if code == _LEFT and isinstance(decided, Swap):
                undo(module)
                self._leave_as_it_is(module, NotFused("ranks"))
            elif code == _TAKEN and decided is None:
                kinds = frozenset[str]()
                swap = self._waiting.swap_of(module, kinds)
                if isinstance(swap, Swap):
                    stop_waiting(module)
                    swap.apply(module)
                    self._take(module, swap)

    def end(self) -> None:
        """End the waiting of the modules that were called."""
        waiting = self._waiting
        self._report.own_bytes.update(self.own_bytes(self._full_names))
        inside = {inner for module in self._decided for inner in module.modules()}
        for module, name in self._names.items():
            if module in inside:
                waiting.names.pop(name, None)
                stop_waiting(module)
        stop_waiting(self._top)
        num_taken = sum(isinstance(decided, Swap) for decided in self._decided.values())
        note = f"observed the first training call: {num_taken} modules run again in backward"
        if num_taken or not any("first training call" in x for x in self._report.notes):
            self._report.notes.append(note)
        waiting.obstacle = ""
