"""A segment of several calls, which pass their outputs to later calls without saving them.

A planner checkpoints modules of someone's model in one segment, while the code of that model calls
them. A call is known to belong to the segment only when it comes:

    open segment              call                  the call
    none                      place 0               opens a segment
    next place 1              place 1               is added to it: its argument is an output of the
                                                    call before, which the segment does not save
    next place 2              place 4, behind       is added to it, if its argument is an output of
                              calls that a step     one of its calls; else opens another segment
                              skips
    next place 2              place 1, out of turn  opens another segment

Containers among the arguments are copied, shallowly, for the recompute: a model may append to a
list that a module got, as dense networks do, and a module may write to a dict. The forward gets the
containers themselves.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import pytree
from fusedckpt.autograd.storages import storage_of
from fusedckpt.checkpointing.calls import Argument, Call, Options, layout_of
from fusedckpt.checkpointing.entry import checkpoint
from fusedckpt.checkpointing.segment import Segment, is_plain_call


class CallOutput(Argument):
    """An argument that an earlier call of the segment returned, as its leaf of that number."""

    storage = 0

    def __init__(self, call: int, leaf: int):
        self.place = call, leaf

    def tensor(self, made: dict[Any, Any] | None = None) -> Tensor:
        """Return the tensor that the call returned at this place in this recompute."""
        assert made is not None
        return made[self.place]


class SegmentCall(Call):
    """A call of a segment of several.

    number: of calls before it. last_uses: by output of a call, the number of the last call that
    takes it, complete once the segment is.
    """

    def __init__(
        self,
        fn: Any,
        args: Any,
        kwargs: Any,
        options: Options,
        save: Callable[[Tensor], Argument],
        number: int,
        last_uses: dict[tuple[int, int], int],
    ):
        # an output of an earlier call may be anywhere in them
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        super().__init__(fn, leaves, {}, options, save)
        self._number = number
        self._last_uses = last_uses

    def arguments(self, made: dict[Any, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments, with containers as they were before the call."""
        leaves, _ = super().arguments(made)
        return pytree.tree_unflatten(leaves, self._spec)

    def leave(self, result: Any, made: dict[Any, Any]) -> None:
        """Leave in `made` the outputs that later calls take."""
        made |= {(self._number, i): leaf for i, leaf in enumerate(pytree.tree_leaves(result))}
        for place in [p for p in made if self._last_uses.get(p, 0) <= self._number]:
            del made[place]


class _Returned(NamedTuple):
    """A tensor that a call of a segment returned."""

    tensor: weakref.ref[Tensor]
    # its version then
    versions: tuple[int, ...]
    # the tensor as an argument of a later call
    argument: CallOutput


class MultiCallSegment(Segment):
    """A segment of several calls in a row."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        # by place in memory
        self._outputs: dict[Any, _Returned] = {}
        # see `SegmentCall`
        self._last_uses: dict[tuple[int, int], int] = {}

    def add_call(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `fn` as the next call of the segment, and return its output."""
        number = len(self.calls)
        call = SegmentCall(
            fn, args, kwargs, self.options, self._argument_of, number, self._last_uses
        )
        output = self.run(call, args, kwargs)
        for i, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor):
                self._outputs[_key_of(leaf)] = _Returned(
                    weakref.ref(leaf), versions_of(leaf), CallOutput(number, i)
                )
        return output

    def has_returned(self, args: Any) -> bool:
        """Whether a call before returned one of these arguments."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        returned = [self._outputs.get(_key_of(x)) for x in tensors]
        return any(x is not None and x.tensor() is not None for x in returned)

    def _mark(self, output: Any, inputs: tuple[Any, ...]) -> None:
        # a tensor in a container is not the segment's own either
        super()._mark(output, tuple(pytree.tree_leaves(inputs)))

    def _argument_of(self, tensor: Tensor) -> Argument:
        returned = self._outputs.get(_key_of(tensor))
        if returned is None or returned.tensor() is None:
            return self.save_argument(tensor)
        if returned.versions != versions_of(tensor):
            return self.save_argument(tensor)
        self._last_uses[returned.argument.place] = len(self.calls)
        return returned.argument


def _key_of(tensor: Tensor) -> Any:
    """Return a key that a tensor shares with an alias of it, such as hooks of a call may make."""
    storage = storage_of(tensor)
    if not storage:
        return id(tensor)
    return storage, layout_of(tensor), tensor.dtype, tensor.requires_grad


class Open(NamedTuple):
    """The segment to which the next call of this thread may be added."""

    # a weak reference: it is open while a graph keeps it
    segment: Callable[[], MultiCallSegment | None]
    # the functions that it is a segment of
    owner: CallSequence | None
    # the place among these of the call that it expects
    next_place: int


class _Thread(threading.local):
    open = Open((lambda: None), None, 0)


_thread = _Thread()


class CallSequence:
    """Functions that are called one after the other, and checkpointed as one segment.

    Under torch.compile every function is a checkpoint of its own.
    """

    def __init__(self, options: Options):
        self._options = options

    def run(self, place: int, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the function at a place; called out of turn, it opens another segment."""
        # inside a checkpoint it is run again anyway, and perhaps without the calls before it
        if is_plain_call() or current() is not None:
            return fn(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(functools.partial(fn, **kwargs), *args)
        opened = _thread.open
        segment = None
        if place and opened.owner is self and opened.next_place <= place:
            segment = opened.segment()
            # behind a call that was skipped, as at random, or of another forward
            if segment is not None and opened.next_place < place:
                segment = segment if segment.has_returned(args) else None
        if segment is None:
            segment = MultiCallSegment(self._options)
        # a call inside this one opens segments of its own
        _thread.open = _Thread.open
        output = segment.add_call(fn, args, kwargs)
        _thread.open = Open(weakref.ref(segment), self, place + 1)
        return output
