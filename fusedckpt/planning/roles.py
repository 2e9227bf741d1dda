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
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.levels import LEVELS, saving
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import backward_id, pytree
from fusedckpt.checkpointing.calls import (
    Argument,
    Call,
    Options,
    layout_of,
    storage_of,
)
from fusedckpt.checkpointing.entry import checkpoint
from fusedckpt.checkpointing.segment import Segment, is_plain_call
from fusedckpt.fusing.causal_loss import FusedHead
from fusedckpt.fusing.subclass import made_of, subclass

# in the module's __dict__: its role, and a forward that was set on it and not on its class
_ROLE, _FORWARD = "_fusedckpt_role", "_fusedckpt_forward"
# of the segments of a plan: units may draw from Python's and NumPy's generators
OPTIONS = Options(preserve_python_rng=True)

# the level of a module without fused layers, the level that saves outputs of matrix products, and
# the one whose recompute does not run attention
PLAIN, PRODUCTS, ATTENTION = OWN_LEVELS = "plain", "products", "attention"
# as layers save in a segment's recompute: its hooks keep norms from sharing the tensors they save
INSIDE = "inside"

# a function that runs in place of a module's forward: gets that forward, its args and its kwargs
Role: TypeAlias = Callable[[Callable[..., Any], Any, Any], Any]


class Planned(nn.Module):
    """The methods of a module that runs in a role."""

    # it prints, and is found by name, as the class that it was
    _fusedckpt_prefix = ""
    # `unfuse` refuses it: its role would stay
    _fusedckpt_is_role = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in its role."""
        return self._in_role(self.__dict__.get(_FORWARD) or super().forward, args, kwargs)

    def _in_role(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        run = _Gathering(self, own) if _is_sharded(self) else own
        return self.__dict__[_ROLE](run, args, kwargs)


class PlannedHead(Planned):
    """The methods of a head that computes its loss: the loss runs in its role."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits."""
        return (self.__dict__.get(_FORWARD) or super(Planned, self).forward)(*args, **kwargs)

    def _fusedckpt_loss(self, run: Callable[..., Any], *args: Any) -> Any:
        return self._in_role(run, args, {})


# a forward that is set on the module, and calls its class's, is not to call these again
for _kind in (Planned, PlannedHead):
    _kind.forward.is_role = True  # type: ignore[attr-defined]


@cache
def _unplanned(kind: Any) -> Any:
    """Return the class that a planned one was, also where a subclass was made of that since."""
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
    module.__dict__[_ROLE] = role
    if "forward" in module.__dict__:
        module.__dict__[_FORWARD] = module.__dict__.pop("forward")


def release(module: nn.Module) -> None:
    """Undo `assign`."""
    module.__class__ = _unplanned(type(module))
    del module.__dict__[_ROLE]
    if _FORWARD in module.__dict__:
        module.__dict__["forward"] = module.__dict__.pop(_FORWARD)


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


class _Gathering:
    """A sharded module's forward; in backward it gathers parameters where no hook has."""

    def __init__(self, module: Any, forward: Callable[..., Any]):
        self.__self__, self._forward = module, forward

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
    """Return the role of a unit that saves a level: of the above, or of fused layers."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _keeps_products)
    others: dict[str, Role] = {
        PRODUCTS: functools.partial(_recompute, {"context_fn": contexts}),
        ATTENTION: functools.partial(_recompute, {"save_regions": (ATTENTION,)}),
        INSIDE: _inside,
    }
    return others.get(level) or functools.partial(_run_at, level)


def _run_at(level: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with saving(level) if level in LEVELS else nullcontext():
        return forward(*args, **kwargs)


def _inside(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with saving("preact"), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        return forward(*args, **kwargs)


def _recompute(options: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Checkpoint a forward with options that say which results stay saved: a role."""
    if is_plain_call() or current() is not None:
        return forward(*args, **kwargs)
    run = functools.partial(forward, **kwargs)
    return checkpoint(run, *args, preserve_python_rng=True, **options)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")


def _keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    library, _, name = op.name().partition("::")
    is_product = name.split(".")[0] in _PRODUCTS or library == "fusedckpt" or "attention" in name
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class _Output(Argument):
    """An argument that an earlier call of the segment returned, as its leaf of that number."""

    storage = 0

    def __init__(self, call: int, leaf: int):
        self.place = call, leaf

    def tensor(self, made: dict[Any, Any] | None = None) -> Tensor:
        """Return the tensor that the call returned at this place in this recompute."""
        assert made is not None
        return made[self.place]


class _Part(Call):
    """A call that may take and leave outputs; `last_uses` says which calls take them last."""

    number, last_uses = 0, {}

    def leave(self, result: Any, made: dict[Any, Any]) -> None:
        """Leave in `made` the outputs that later calls take."""
        made |= {(self.number, i): leaf for i, leaf in enumerate(pytree.tree_leaves(result))}
        for place in [p for p in made if self.last_uses.get(p, 0) <= self.number]:
            del made[place]


class HandingOn(Segment):
    """A segment of several calls in a row, which hand on their outputs instead of keeping them."""

    def __init__(self, options: Options = OPTIONS) -> None:
        super().__init__(options)
        # by place in memory, while they live as they were returned
        self._outputs: dict[Any, tuple[weakref.ref[Tensor], tuple[int, ...], _Output]] = {}
        self._last_uses: dict[tuple[int, int], int] = {}

    def go_on(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `fn` as the next call of the segment."""
        number = len(self.calls)
        if number:
            # an output of an earlier call may be anywhere in them
            args, spec = pytree.tree_flatten((args, kwargs))
            fn, kwargs = _Flat(fn, spec), {}
        part = _Part(fn, args, kwargs, self.options, self._hold)
        part.number, part.last_uses = number, self._last_uses
        output = self.run(part, args, kwargs)
        for i, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor):
                known = weakref.ref(leaf), versions_of(leaf), _Output(number, i)
                self._outputs[_place_of(leaf)] = known
        return output

    def _hold(self, tensor: Tensor) -> Argument:
        known = self._outputs.get(_place_of(tensor))
        if known is None or known[0]() is None or known[1] != versions_of(tensor):
            return Argument(tensor)
        self._last_uses[known[2].place] = len(self.calls)
        return known[2]


def _place_of(tensor: Tensor) -> Any:
    """Return a key that a tensor shares with an alias of it, such as hooks of a call may make."""
    storage = storage_of(tensor)
    if not storage:
        return id(tensor)
    return storage, layout_of(tensor), tensor.dtype, tensor.requires_grad


class _Flat:
    """A function of the leaves of its arguments."""

    def __init__(self, fn: Callable[..., Any], spec: pytree.TreeSpec):
        self.fn, self.spec = fn, spec
        # the module that a bound method is of
        self.__self__ = getattr(fn, "__self__", None)

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.fn(*args, **kwargs)


class _Thread(threading.local):
    # the segment that a later call may go on with, its `Segmented`, and the place of that call
    running: tuple[Callable[[], Any], Any, int] = (lambda: None), None, 0


_thread = _Thread()


class Segmented:
    """Several modules, called one after the other, checkpointed as one segment.

    Under torch.compile every module is a checkpoint of its own.
    """

    def run(self, place: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run member `place`; called out of order, it starts a segment of its own."""
        # inside a checkpoint it is run again anyway, and perhaps without the members before it
        if is_plain_call() or current() is not None:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(functools.partial(forward, **kwargs), *args)
        # the segment that runs, while a graph holds it, if it expects this member next
        known, of, expected = _thread.running
        segment = known() if place and of is self and expected == place else None
        segment, _thread.running = segment or HandingOn(), _Thread.running
        output = segment.go_on(forward, args, kwargs)
        _thread.running = weakref.ref(segment), self, place + 1
        return output


def segmented(count: int = 1) -> list[Role]:
    """Return the roles of modules that are checkpointed as one segment."""
    run = Segmented().run
    return [functools.partial(run, place) for place in range(count)]
