"""The report of `fuse`: the modules that were swapped or left, and those that ran fused since.

`FusedCalls` sees a step's forward: which fused modules ran, how, and the bytes that other paths
cost.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.private import local_of
from fusedckpt.fusing import reasons
from fusedckpt.fusing.fused_mlps import rates_above_zero
from fusedckpt.fusing.swap import Part, original_of
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import CHECKPOINT, IN_ORDER, RECIPES, NotFused
from fusedckpt.layers.notes import has_note, notes_of
from fusedckpt.layers.sequential import Sequential, fused_runs
from fusedckpt.memory import SavedStorage

# the attribute of a model with recipes: why its last call saved none
RECIPES_OBSTACLE = "recipes_obstacle"
# classes that a report names where it found nothing
_MOST_CLASSES = 8
_KINDS = ("norm", "mlp", "experts", "linear", "attention", "head")


@dataclass(frozen=True)
class FuseReport:
    """The modules that `fuse` swapped, and those that it left, each by its name in the model."""

    # of modules swapped, the change
    swapped: dict[str, str] = field(default_factory=dict)
    # of modules left, why
    left: dict[str, NotFused] = field(default_factory=dict)
    # of both: "norm", "mlp", "experts", "linear", "attention" or "head"
    kinds: dict[str, str] = field(default_factory=dict)
    # of fused modules, the bytes per token saved for backward before and now, the input included,
    # measured on meta tensors; missing for attention, and where it cannot run on them
    saved: dict[str, tuple[float, float]] = field(default_factory=dict)
    # of modules fused before this call, the change
    already: dict[str, str] = field(default_factory=dict)
    # of modules left, the class
    classes: dict[str, str] = field(default_factory=dict)
    # of modules left, the bytes that their own functions, and layers without matrices, saved in the
    # run that was observed: the first training call, or `example_inputs`
    own_bytes: dict[str, int] = field(default_factory=dict, compare=False)
    # of linears, activations and their like that save less of their input, the change
    shared: dict[str, str] = field(default_factory=dict, compare=False)
    # how attention and mixers were found, where `fuse` was given a batch
    notes: list[str] = field(default_factory=list, compare=False)
    # after the first training step: the line on what recipes would bring, or a function that
    # measures it when the report is printed
    gain: list[Callable[[], str | None] | str | None] = field(
        default_factory=list, compare=False, repr=False
    )
    # how many modules of each class the model has, by the class's name
    seen: dict[str, int] = field(default_factory=dict, compare=False)
    # a weak reference to the model, if it is not a report that was copied
    _model: list[weakref.ref[nn.Module]] = field(default_factory=list, compare=False, repr=False)

    @property
    def fallbacks(self) -> dict[str, NotFused]:
        """Fused modules that ran their original forward: name -> the last reason.

        Counts calls with gradients since `fuse`; for blocks of a Sequential, their state now. Empty
        once the model is gone.
        """
        model = self._model_now()
        known = {**self.swapped, **self.already}
        placed = (
            [] if model is None else [part for part in placed_parts(model) if part.name in known]
        )
        now = {part.name: reason_now(part.module, part.inner) for part in placed}
        return {name: reason for name, reason in now.items() if reason is not None}

    @property
    def undecided(self) -> dict[str, NotFused]:
        """Modules that may save less after their first training call: name -> why not yet.

        That call shows whether a module saves so much that it is better run again in backward.
        """
        model = self._model_now()
        places = [] if model is None else [notes_of(m).waits for m in model.modules()]
        reasons_by_name = {}
        for waiting in dict.fromkeys(place.waiting for place in places if place is not None):
            obstacle = waiting.obstacle
            reason = NotFused("unseen call", obstacle) if obstacle else NotFused("waits")
            reasons_by_name |= dict.fromkeys(waiting.names, reason)
        return reasons_by_name

    def _model_now(self) -> nn.Module | None:
        """Return the model, None once it is gone."""
        return self._model[0]() if self._model else None

    def watch(self, model: nn.Module) -> None:
        """Keep a weak reference to the model, and forget the notes of earlier calls."""
        self._model[:] = [weakref.ref(model)]
        self.seen.update(Counter(type(module).__name__ for module in model.modules()))
        forget_notes(model)

    def __getstate__(self) -> dict[str, Any]:
        # a copy in another process has no model to look at
        return {**self.__dict__, "_model": [], "gain": []}

    def swap(self, name: str, part: Part) -> None:
        """Add a module that is swapped, though it may have been left as another kind."""
        self.left.pop(name, None)
        self.classes.pop(name, None)
        self.swapped[name] = part.change
        self._add(name, part)

    def run_again(self, name: str, part: Part) -> None:
        """Add a module that runs again in backward, with the modules inside that were left."""
        for inner in [n for n in self.left if n.startswith(f"{name}." if name else "")]:
            del self.left[inner], self.classes[inner], self.kinds[inner]
        self.swap(name, part)

    def keep(self, name: str, part: Part) -> None:
        """Add a module that was fused before."""
        self.already[name] = part.change
        self._add(name, part)

    def _add(self, name: str, part: Part) -> None:
        self.kinds[name] = part.kind
        if part.saved is not None:
            self.saved[name] = part.saved

    def leave(self, name: str, kind: str, reason: NotFused, class_name: str) -> None:
        """Add a module that is not swapped, or no longer, and why."""
        self.swapped.pop(name, None)
        self.left[name] = reason
        self.kinds[name] = kind
        self.classes[name] = class_name

    def __str__(self) -> str:
        before = f", {len(self.already)} fused before" if self.already else ""
        lines = [f"fused {len(self.swapped)} modules, left {len(self.left)}{before}"]
        if self.kinds:
            kinds = [kind for kind in _KINDS if kind in self.kinds.values()]
            width = max(6, *map(len, kinds))
            lines.append(f"  {'kind':{width}}  matched  swapped  left  saved bytes per token")
            lines += [f"  {kind:{width}}  {self._row(kind)}" for kind in kinds]
        for changes, when in ((self.swapped, ""), (self.already, " (before)")):
            by_kind = sorted(changes, key=lambda name: _KINDS.index(self.kinds[name]))
            counts = Counter(changes[name] for name in by_kind)
            lines += [f"  {count:4d} x {change}{when}" for change, count in counts.items()]
        counts = Counter(self.shared.values())
        lines += [f"  {count:4d} x {change}" for change, count in counts.items()]
        undecided = self.undecided
        left = {
            name: (self.classes[name], self._advice(reason, undecided.get(name)))
            for name, reason in self.left.items()
        }
        own = {name: (nbytes, 0) for name, nbytes in self.own_bytes.items() if name in left}
        lines += [f"  left {line}" for line in _grouped(left, own, "{:,} bytes saved")]
        lines += [f"  {line}" for line in self._undecided()]
        lines += [f"  {note}" for note in [*self.notes, *self._gain()]]
        return "\n".join([*lines, *self._unfused(), *self._hint()])

    def _advice(self, reason: NotFused, undecided: NotFused | None) -> str:
        """Return why a module is left, and its remedy: a run, else recipes, else a checkpoint."""
        if undecided is not None:
            # its first training call may find a way
            return f"{reason}; {undecided}: {undecided.remedy}"
        model = self._model_now()
        has_recipes = model is not None and has_note(model, RECIPES_OBSTACLE)
        if reason.remedy == RECIPES and has_recipes:
            return f"{reason}; its result is made again in backward"
        if reason.remedy == IN_ORDER and has_recipes:
            return f"{reason}; {CHECKPOINT}"
        return _advised(reason)

    def _gain(self) -> Iterator[str]:
        """Yield the line on the gain by recipes in the first training call."""
        model = self._model_now()
        if not self.gain or model is None or has_note(model, RECIPES_OBSTACLE):
            return
        gain = self.gain[0]
        if gain is not None and not isinstance(gain, str):
            gain = self.gain[0] = gain()
        if gain is not None:
            yield gain

    def _undecided(self) -> Iterator[str]:
        """Yield lines on the modules that wait for their first training call."""
        model = self._model_now()
        undecided = {n: reason for n, reason in self.undecided.items() if n not in self.left}
        if model is None or not undecided:
            return
        kinds = {name: type(model.get_submodule(name)).__name__ for name in undecided}
        groups = {name: (kinds[name], _advised(reason)) for name, reason in undecided.items()}
        yield from (f"undecided {line}" for line in _grouped(groups, {}))

    def _hint(self) -> Iterator[str]:
        """Yield the classes where nothing was found, and the call that measures a step."""
        model = self._model_now()
        has_recipes = model is not None and has_note(model, RECIPES_OBSTACLE)
        if has_recipes:
            obstacle = notes_of(model).recipes_obstacle
            yield "recipes: results of cheap functions are made again in backward" + (
                f"; not in the last call: {obstacle}" if obstacle else ""
            )
        if not self.kinds and not self.shared:
            yield "found no norm, MLP, attention, experts, or linear with an activation"
            counts = sorted(self.seen.items(), key=lambda pair: -pair[1])
            others = len(counts) - _MOST_CLASSES
            more = f" and {others} other classes" if others > 0 else ""
            named = ", ".join(f"{count} x {name}" for name, count in counts[:_MOST_CLASSES])
            yield f"looked at {named}{more}"
            if not has_recipes:
                yield "recompute_elementwise=True also recomputes activations, sums, other norms"
        measures = "print(fusedckpt.report(model, **batch)) measures what a step saves, and where"
        if not has_recipes:
            yield f"{measures}, also with recompute_elementwise=True"
        elif self.kinds or self.shared:
            yield measures

    def _unfused(self) -> Iterator[str]:
        """Yield lines on the modules that did not run fused, and on the bytes that this costs."""
        known = {**self.swapped, **self.already}
        reasons_now = self.fallbacks
        model = self._model_now()
        ahead = {
            name: reason
            for name, reason in (() if model is None else _dropping(model))
            if name in known.keys() - reasons_now.keys()
        }
        # the module is recomputed, with its attention or scan
        whole = {name: reason for name, reason in reasons_now.items() if reason.key == "again"}
        apart = {name: reason for name, reason in reasons_now.items() if name not in whole}
        for reason_by_name, title in (
            (apart, "not run fused"),
            (whole, "recomputed as a whole"),
            (ahead, "not run fused in training"),
        ):
            if reason_by_name:
                yield f"{title}: {len(reason_by_name)} of {len(known)}"
            groups = {name: (known[name], _advised(r)) for name, r in reason_by_name.items()}
            yield from (f"  {line}" for line in _grouped(groups, {**self.saved}))

    def _row(self, kind: str) -> str:
        names = [name for name, kind_of_name in self.kinds.items() if kind_of_name == kind]
        swapped, left = (sum(name in part for name in names) for part in (self.swapped, self.left))
        pairs = [self.saved[name] for name in names if name in self.saved]
        before, after = (round(sum(pair[i] for pair in pairs)) for i in (0, 1))
        saved = f"{before:,} -> {after:,}" if pairs else "-"
        return f"{len(names):7d}  {swapped:7d}  {left:4d}  {saved}"


def _advised(reason: NotFused) -> str:
    """Return a reason's clause, and the one thing to do about it."""
    return f"{reason}; {reason.remedy}"


def _grouped(
    groups: dict[str, tuple[str, str]],
    costs: Mapping[str, tuple[float, float] | None],
    words: str = "up to {:,} bytes per token more",
) -> Iterator[str]:
    """Yield a line for every pair of a class or change and a reason, the most frequent first.

    costs: bytes that are saved, and bytes that could be, by name; words: for the sum of both.
    """
    for group, count in Counter(groups.values()).most_common():
        title, text = group
        names = [name for name in groups if groups[name] == group]
        others = f" and {count - 1} more" if count > 1 else ""
        pairs = (costs.get(name) for name in names)
        more = round(sum(pair[0] - pair[1] for pair in pairs if pair is not None))
        cost = f": {words.format(more)}" if more else ""
        yield f"{count} x {title}: {text} ({names[0] or 'root'}{others}){cost}"


class PlacedPart(NamedTuple):
    """A part of a swapped module, and its place in the model."""

    # its name in the model
    name: str
    # the swapped module
    module: nn.Module
    # the name of the part below that module
    inner: str
    part: Part


def placed_parts(model: nn.Module) -> Iterator[PlacedPart]:
    """Yield the parts of all swapped modules of a model."""
    for name, module in model.named_modules():
        original = original_of(module)
        for inner, part in original.parts.items() if original is not None else ():
            yield PlacedPart(join_names(name, inner), module, inner, part)


def reason_now(module: nn.Module, inner: str) -> NotFused | None:
    """Return why a part of a swapped module ran its original forward last, None if it ran fused."""
    note = module.__dict__.get(fallbacks.NOTE)
    if dispatch.DISABLED:
        return NotFused("disabled")
    if note is not None:
        return reasons.of_call(module, note)
    if not isinstance(module, Sequential):
        return None
    # a Sequential cuts its layers anew where one has changed
    if inner in fused_runs(module):
        return None
    return dict(reasons.linears_apart(module)).get(inner, NotFused("apart now", inner))


def _dropping(model: nn.Module) -> Iterator[tuple[str, NotFused]]:
    """Yield the modules that a dropout's rate will keep from running fused in training, and why."""
    for name, module, _, _ in placed_parts(model):
        if getattr(module, "save", "") == "inputs":
            # recomputed with its masks
            continue
        for path, attribute in rates_above_zero(module, notes_of(module).match):
            yield name, NotFused("dropout", ".".join(path) or attribute)


def forget_notes(model: nn.Module) -> None:
    """Forget the notes of earlier calls."""
    for module in model.modules():
        fallbacks.take_fallback(module)


def join_names(prefix: str, name: str) -> str:
    """Return the full name of the module `name` inside `prefix`; either may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


@dataclass(frozen=True)
class FusedModule:
    """A fused module in one step."""

    # its name in the model
    name: str
    # its text in the report of `fuse`
    change: str
    # how often its forward was called; 0 in torch.compile'd code, too, which is not looked into
    calls: int
    # why it ran as its class would in the last such call, None if all ran fused
    reason: str | None
    # the bytes that it saves more for that, at most; None if unknown
    extra_bytes: int | None


class FusedCalls:
    """Sees the calls of fused modules in a forward."""

    def __init__(self, model: nn.Module):
        self._parts = list(placed_parts(model))
        self._inner: dict[nn.Module, list[str]] = {}
        for part in self._parts:
            self._inner.setdefault(part.module, []).append(part.inner)
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: Counter[nn.Module] = Counter()
        self._tokens: dict[nn.Module, int] = {}
        self._reasons: dict[tuple[nn.Module, str], NotFused] = {}
        forget_notes(model)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow every module call made inside."""
        hook = register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            hook.remove()
        # compiled code leaves notes, too
        for module in self._inner:
            self._note(module)

    def modules(self, saved: Iterable[SavedStorage]) -> tuple[FusedModule, ...]:
        """Return every fused module, given the storages that the step saved."""
        storages = list(saved)
        modules = []
        for name, module, inner, part in self._parts:
            reason = self._reasons.get((module, inner))
            tokens = self._tokens.get(module)
            extra_bytes = 0 if reason is None else None
            if reason is not None and tokens is not None and part.saved is not None:
                before, after = part.saved
                # a checkpoint around it may drop storages
                saved_by_it = _saved_by(self._names[module], storages)
                extra_bytes = min(round(tokens * (before - after)), saved_by_it)
            modules.append(
                FusedModule(
                    name,
                    part.change,
                    self._calls[module],
                    reason=None if reason is None else str(reason),
                    extra_bytes=extra_bytes,
                )
            )
        return tuple(modules)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._inner:
            return
        self._calls[module] += 1
        if self._note(module) and isinstance(output, Tensor):
            self._tokens[module] = self._tokens.get(module, 0) + _tokens(output)

    def _note(self, module: nn.Module) -> bool:
        """Note why parts of a module did not run fused; return whether any did not."""
        reasons_now = {inner: reason_now(module, inner) for inner in self._inner[module]}
        fallbacks.take_fallback(module)
        reasons_by_part = {
            (module, inner): reason for inner, reason in reasons_now.items() if reason is not None
        }
        self._reasons.update(reasons_by_part)
        return bool(reasons_by_part)


def _saved_by(name: str, storages: list[SavedStorage]) -> int:
    """Return the bytes that a module and those in it saved."""
    inside = [s for s in storages if not name or f"{s.owner}.".startswith(f"{name}.")]
    return sum(storage.nbytes for storage in inside)


def _tokens(output: Tensor) -> int:
    """Return how many rows this process has of a module's output, a tensor of any class."""
    local = local_of(output)
    if local.is_nested:
        return local.values().shape[0] if local.layout == torch.jagged else 0
    return math.prod(local.shape[:-1])
