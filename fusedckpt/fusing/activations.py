"""Activations that backward runs again, in the state that the forward found.

An activation may read numbers, flags and tables of its own, and code between forward and backward
may change them: a slope that is annealed, `model.eval()`. Its forward is recorded in training and
in evaluation, which shows what it reads. A call copies these values, and backward runs the copy. A
module that draws random numbers, computes another function in each call, or reads tensors that it
does not own runs once, and saves what it always saved. State that a recording cannot see, a global
or a contextvar, is not brought back: where it changes the result, the backward raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.blocks.norm_sharing import Recipe
from fusedckpt.checkpointing.samples import Pair, compare_at_end, sampled
from fusedckpt.fusing.held import CONTAINERS, MARK, MISSING, Held, broken, held_by
from fusedckpt.fusing.recording import FOREIGN_OP, Recording, described, record
from fusedckpt.fusing.replica import Path
from fusedckpt.fusing.sharing import Shared, cast_by, note_maker, read
from fusedckpt.layers.fallbacks import NotFused

# a shape on which activations are recorded
_SHAPE = (2, 3, 8)


class Purity(NamedTuple):
    """Whether a module's result depends on its input, its tensors and the state `held` alone.

    reason: why backward must not run it again, None if it may.
    """

    held: tuple[Held, ...]
    reason: NotFused | None


def purity_of(module: nn.Module) -> Purity:
    """Record a module without children in both modes, and say whether backward may run it again."""
    bare = _bare(module)
    if bare._modules:
        return Purity((Held((), None, len(bare._modules), ()),), NotFused("parametrized", "it"))
    run = partial(record, bare, _SHAPE, keeps_rates=True)
    # in a call, hooks around it would see what the recordings save
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved):
        # twice, as a counter or a generator of its own shows in the second run
        recordings = [run(), *(run(training=True, grad=grad) for grad in (False, False, True))]
    return Purity(held_by([recording.log for recording in recordings]), _impurity(*recordings))


def _impurity(
    evaluated: Recording, first: Recording, second: Recording, graded: Recording
) -> NotFused | None:
    """Return why a module must not be run again, by its runs in evaluation and in training."""
    is_function = graded.log.stop is not None and graded.log.stop.key == "function"
    recordings = evaluated, first, second, *(() if is_function else (graded,))
    for recording in recordings:
        if recording.y is None:
            return recording.reason
        if any(node.op == FOREIGN_OP for node in recording.nodes):
            return NotFused("foreign")
    if len({repr(described(recording)) for recording in recordings[1:]}) > 1:
        return NotFused("counts")
    return None


def _bare(module: nn.Module) -> nn.Module:
    """Return a module over the same state, of the class that it had before it was swapped."""
    original = vars(module).get(MARK)
    if original is None:
        return module
    bare = object.__new__(original.kind)
    vars(bare).update((n, v) for n, v in vars(module).items() if n not in original.attributes)
    return bare


class Snapshot:
    """A module without children as it was in one call: its mode, and the values it read there."""

    # elements of the call's result: state that no recording sees may change it, as a global does
    sample: Tensor | None = None

    def __init__(self, module: nn.Module, held: tuple[Held, ...]):
        self.module = _bare(module)
        self.names = [name for name, p in module._parameters.items() if p is not None]
        # eager saves no buffer that is only added, and lets code write it before backward
        buffers = {n: b if b is None else b.detach().clone() for n, b in module._buffers.items()}
        vars(self.module)["_buffers"] = buffers
        for state in held:
            for path, _ in state.reads:
                _copy_attribute(module, self.module, path)

    def __call__(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """Return the module's own forward of x, with these parameters."""
        vars(self.module)["_parameters"] = dict(zip(self.names, parameters, strict=True))
        return type(self.module).forward(self.module, x)


def _copy_attribute(source: Any, target: Any, path: Path) -> None:
    """Copy the value at a path of attributes, and the objects that lead to it."""
    name, *rest = path
    value = getattr(source, name, MISSING)
    if value is MISSING:
        return
    attributes = vars(target)
    if not (rest and hasattr(value, "__dict__")):
        attributes[name] = copy.copy(value) if type(value) in CONTAINERS else value
        return
    if attributes.get(name) in (None, value):
        attributes[name] = object.__new__(type(value))
        vars(attributes[name]).update(vars(value))
    _copy_attribute(value, attributes[name], tuple(rest))


class SharedActivation(Shared):
    """Forward of a function of single elements, which may have parameters and buffers."""

    _fusedckpt_reads = ("linear",)
    # pickles of earlier releases have none
    _fusedckpt_purity: Purity | None = None

    def _shared(self, x: Tensor, recipe: Recipe, forward: Callable[..., Tensor]) -> Tensor:
        purity = self._fusedckpt_purity
        if purity is None or broken(self, purity.held) is not None:
            # values that no recording has seen: another branch may draw random numbers
            purity = purity_of(self)
            self.__dict__["_fusedckpt_purity"] = purity
        if purity.reason is not None:
            return forward(x)
        parameters = [p for p in self._parameters.values() if p is not None]
        snapshot = Snapshot(self, purity.held)
        again = partial(_run, snapshot, autocast_dtype(x.device))
        y = read(recipe, x, lambda z: Rerun.apply(forward, again, z, *parameters))
        snapshot.sample = sampled(y, 0)
        note_maker(self, y, recipe, again, "activation", *parameters)
        return y


def _run(snapshot: Snapshot, cast: torch.dtype | None, x: Tensor, *parameters: Tensor) -> Tensor:
    """Run a module as in its first run, under the autocast of that run, and compare the results."""
    with cast_by(x.device, cast):
        y = snapshot(x, *parameters)
    if snapshot.sample is not None and (sample := sampled(y, 0)) is not None:
        compare_at_end([Pair(type(snapshot.module).__name__, snapshot.sample, sample)])
    return y


class Rerun(torch.autograd.Function):
    """A function that saves only its inputs: backward runs it again."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Tensor], Tensor],
        again: Callable[..., Tensor],
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Return run(x); again: the same as a function of x and the parameters that run reads."""
        ctx.save_for_backward(x, *parameters)
        ctx.again = again
        return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of x and of the parameters."""
        creates, needs = torch.is_grad_enabled(), ctx.needs_input_grad[2:]
        tensors = ctx.saved_tensors
        if not creates:
            # leaves of their own: code may have frozen a parameter since
            tensors = [
                t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)
            ]
        with torch.enable_grad():
            y = ctx.again(*tensors)
            wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
            grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=creates))
        return None, None, *[next(grads) if need else None for need in needs]
