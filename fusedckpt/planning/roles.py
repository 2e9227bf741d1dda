"""How a module of someone's model is made to run under a plan: by a class that asks its role.

The module's class becomes a subclass, so that its parameters, hooks, names, state_dict, isinstance
and attributes stay; `release` puts the class back.

FSDP2's `fully_shard(module)` makes a subclass too, before or after, and gathers parameters in hooks
of the module's call. A segment's recompute calls forwards without their hooks, and so gathers them
itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fusedckpt.autograd.levels import LEVELS, saving
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import backward_id
from fusedckpt.checkpointing.call_sequence import CallSequence, MultiCallSegment
from fusedckpt.checkpointing.calls import Options
from fusedckpt.checkpointing.entry import checkpoint
from fusedckpt.checkpointing.segment import is_plain_call
from fusedckpt.fusing.fused_heads import FusedHead
from fusedckpt.fusing.recipe_models import without_recipes
from fusedckpt.fusing.swap import made_of, subclass
from fusedckpt.layers.notes import ModuleNotes, clear_notes, notes_of, set_notes
from fusedckpt.planning.products import keeps_products

# the attribute of a module with its role
# the attribute with a forward that was set on the module and not on its class
# the options of a plan's segments
NO_OPTIONS = Options()

# the level of a module without fused layers
UNCHANGED = "plain"
# the level that saves outputs of matrix products, and recomputes the others
PRODUCTS = "products"
# the level that saves attention's output, and recomputes the others
ATTENTION = "attention"
# the level of a unit in a model that is fused with recipes, without these recipes
NO_RECIPES = "no recipes"
# the level that saves the inputs of fused layers in nine bits a value, for plan(store="int8")
ROUNDED = "inputs, int8"
# the levels that a plan may have beside those of fused layers
OWN_LEVELS = UNCHANGED, PRODUCTS, ATTENTION, NO_RECIPES, ROUNDED
# the tensors that layers save in a segment's recompute: the segment's hooks keep norms from sharing
# them. Measured, and in no plan
INSIDE = "inside"

# a function that runs in place of a module's forward: gets that forward, its args and its kwargs
Role: TypeAlias = Callable[[Callable[..., Any], Any, Any], Any]


class Planned(nn.Module):
    """The methods of a module that runs in a role."""

    # it prints, and is found by name, as the class that it was
    _fusedckpt_prefix = ""
    # `unfuse` refuses it: its role would stay
    _fusedckpt_is_role = True
    _fusedckpt: ModuleNotes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in its role."""
        return self._in_role(self._fusedckpt.own_forward or super().forward, args, kwargs)

    def _in_role(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if _is_sharded(self):
            forward = _GatheringForward(self, forward)
        return self._fusedckpt.role(forward, args, kwargs)


class PlannedHead(Planned):
    """The methods of a head that computes its loss: the loss runs in its role."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits."""
        return (self._fusedckpt.own_forward or super(Planned, self).forward)(*args, **kwargs)

    def _fusedckpt_loss(self, run: Callable[..., Any], *args: Any) -> Any:
        return self._in_role(run, args, {})


# a forward that is set on the module, and calls its class's, must not call these again
for _kind in (Planned, PlannedHead):
    _kind.forward.is_role = True  # type: ignore[attr-defined]


@cache
def _unplanned(kind: Any) -> Any:
    """Return the class that a planned one was made of, also where a subclass was made since."""
    ours, original = made_of(kind) or (None, None)
    if ours is not None and issubclass(ours, Planned):
        return original
    bases = tuple(
        _unplanned(base) if issubclass(base, Planned) else base for base in kind.__bases__
    )
    inside = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return type(kind.__name__, bases, inside)


def assign(module: nn.Module, role: Role) -> None:
    """Let `module` run in `role`."""
    kind = type(module)
    module.__class__ = subclass(PlannedHead if issubclass(kind, FusedHead) else Planned, kind)
    set_notes(module, role=role)
    if "forward" in module.__dict__:
        set_notes(module, own_forward=module.__dict__.pop("forward"))


def release(module: nn.Module) -> None:
    """Undo `assign`."""
    module.__class__ = _unplanned(type(module))
    own_forward = notes_of(module).own_forward
    if own_forward is not None:
        module.__dict__["forward"] = own_forward
    clear_notes(module, "role", "own_forward")


@contextmanager
def assigned(roles: Mapping[nn.Module, Role]) -> Iterator[None]:
    """Let modules run in roles meanwhile."""
    with ExitStack() as undo:
        for module, role in roles.items():
            assign(module, role)
            undo.callback(release, module)
        yield


def is_assigned(module: nn.Module) -> bool:
    """Whether a module runs in a role."""
    return isinstance(module, Planned)


def _is_sharded(module: nn.Module) -> bool:
    # a program that has not imported it has sharded nothing
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


class _GatheringForward:
    """A sharded module's forward; in backward it gathers parameters where no hook has."""

    def __init__(self, module: Any, forward: Callable[..., Any]):
        self.__self__ = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if backward_id() == -1:
            return self._forward(*args, **kwargs)
        module = self.__self__
        before = [*module.parameters()]
        module.unshard()
        gathered = any(a is not b for a, b in zip(before, module.parameters(), strict=True))
        try:
            return self._forward(*args, **kwargs)
        finally:
            # FSDP's own hook gives back parameters that it gathered for a module's backward
            if gathered:
                module.reshard()


def run_at(level: str) -> Role:
    """Return the role of a unit that saves a level: one of OWN_LEVELS, INSIDE, or LEVELS."""
    contexts = functools.partial(create_selective_checkpoint_contexts, keeps_products)
    checkpointed: dict[str, Role] = {
        PRODUCTS: functools.partial(_recompute, {"context_fn": contexts}),
        ATTENTION: functools.partial(_recompute, {"save_regions": (ATTENTION,)}),
        INSIDE: _inside,
        NO_RECIPES: _without_recipes,
    }
    return checkpointed.get(level) or functools.partial(_run_at, level)


def _run_at(level: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with saving_at(level):
        return forward(*args, **kwargs)


def saving_at(level: str) -> AbstractContextManager[None]:
    """Return a context in which fused layers save a level of a plan."""
    if level == ROUNDED:
        return saving("inputs", store="int8")
    return saving(level) if level in LEVELS else nullcontext()


def _without_recipes(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # the fastest level: fused layers run no GEMM again
    with saving("preact"), nullcontext() if torch.compiler.is_compiling() else without_recipes():
        return forward(*args, **kwargs)


def _inside(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with saving("preact"), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        return forward(*args, **kwargs)


def _recompute(options: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Checkpoint a forward; its options tell which results stay saved: a role."""
    if is_plain_call() or current() is not None:
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(functools.partial(forward, **kwargs), *args, **options)
    return MultiCallSegment(NO_OPTIONS._replace(**options)).add_call(forward, args, kwargs)


def segmented(count: int = 1, offloads: bool = False) -> list[Role]:
    """Return the roles of modules that are checkpointed as one segment.

    offloads: whether its inputs wait for backward in host memory.
    """
    run = CallSequence(NO_OPTIONS._replace(offload=offloads)).run
    return [functools.partial(run, place) for place in range(count)]
