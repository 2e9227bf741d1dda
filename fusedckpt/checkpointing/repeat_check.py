"""A segment of one call that tells whether the call does the same twice, as a recompute expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd.private import storage_key
from fusedckpt.checkpointing.call_sequence import MultiCallSegment
from fusedckpt.checkpointing.calls import Argument, Options
from fusedckpt.checkpointing.determinism import Note, Results, note_of, same_note
from fusedckpt.checkpointing.module_calls import RecomputedCall
from fusedckpt.checkpointing.written_buffers import is_state
from fusedckpt.memory import storages_of, strided
from fusedckpt.state import rng

NOT_THE_SAME = "a second run of its forward gives other results"
_OVERWRITTEN = "later code of the step modifies its input"


class RepeatCheck(MultiCallSegment):
    """The first run of a call, which notes the tensors that it saves and returns.

    On a CPU it notes checksums of their bits; on other devices copies of the outputs alone, as
    atomics add in any order, and attention kernels leave parts of saved tensors unwritten.
    """

    def __init__(self, module: nn.Module, options: Options, before: Results | None = None):
        super().__init__(options)
        self.module = module
        # the results of the first run, in the second
        self._before = before
        # of saved tensors: their storage, and a note
        self._saved = list[tuple[int, Note]]()
        self._late = list[Tensor]()
        self._states = {(id(at), name): _state_of(x) for at, name, x in _states_in(module)}

    def pack(self, tensor: Tensor) -> Any:
        """Note a tensor that is saved."""
        # integers may be an unwritten workspace; random masks change the output
        if tensor.is_floating_point() and tensor.device.type == "cpu":
            if tensor.requires_grad:
                self._note(tensor)
            else:
                # rrelu saves its noise, and draws it then
                self._late.append(tensor)
        return super().pack(tensor)

    def _note(self, tensor: Tensor) -> None:
        for part in strided(tensor.detach()):
            self._saved.append((storage_key(part.untyped_storage()), note_of(part)))

    def finish(self, tensors: Iterable[Tensor]) -> None:
        """Note the tensors that the call returned, and those of the module that it wrote."""
        while self._late:
            self._note(self._late.pop())
        states = [*_states_in(self.module)]
        # batch_norm saves running statistics, and does not read them
        in_states = set(map(storage_key, storages_of(x for *_, x in states)))
        self.results = Results(note_of, self._before, rounds=True)
        self.results.see("the call", [part for x in tensors for part in strided(x.detach())])
        saved = [note for storage, note in self._saved if storage not in in_states]
        self.results.see_notes("saved tensors", saved)
        self._written = [
            (at, name)
            for at, name, x in states
            if not _is_unwritten(self._states.get((id(at), name)), x)
        ]

    def why_not_again(self, tensors_of: Callable[[Any], Iterable[Tensor]]) -> str:
        """Make the call again as its recompute would; return why that cannot be, or "".

        The call finds counters and generators as the model's forward left them. A recompute
        restores no generator of the module's own: none may draw. Of tensors of the module that its
        own call wrote it finds other values, as they may equal those before: a power iteration may
        have converged, and a state may depend on the last arguments alone.
        tensors_of: returns the tensors in an output.
        """
        (call,) = self.calls
        try:
            for value in (*call.inner, *call.values):
                if isinstance(value, Argument):
                    value.tensor()
        except RuntimeError:
            return _OVERWRITTEN
        repeat = RepeatCheck(self.module, self.options, self.results)
        generators = rng.states_in(self.module)
        values = [(at, name, at[name]) for at, name in self._written if name in at]
        try:
            for at, name, x in values:
                at[name] = 2 * x + 1
            args, kwargs = call.arguments({})
            hooks = torch.autograd.graph.saved_tensors_hooks(repeat.pack, repeat.unpack)
            with call.surroundings.restored(), RecomputedCall(call), hooks:
                repeat.finish(tensors_of([call.fn(*args, **kwargs)]))
        except Exception:
            # so would a recompute
            return NOT_THE_SAME
        finally:
            for at, name, x in values:
                at[name] = x
        if generators.have_moved():
            generators.restore()
            return NOT_THE_SAME
        return "" if repeat.results.difference is None else NOT_THE_SAME


def _states_in(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the floating-point buffers of modules, and such tensors among attributes."""
    for child in module.modules():
        for place in (child._buffers, vars(child)):
            for name, x in place.items():
                if is_state(x) and x.is_floating_point():
                    yield place, name, x


class _TensorState(NamedTuple):
    """A tensor as it is at some time."""

    # its id
    key: int
    version: int
    # of its values: batch_norm writes without a new version, and a power iteration may write the
    # same values with one
    note: Note


def _state_of(tensor: Tensor) -> _TensorState:
    return _TensorState(id(tensor), tensor._version, note_of(tensor))


def _is_unwritten(before: _TensorState | None, tensor: Tensor) -> bool:
    """Whether a tensor is as noted before, or was made since."""
    if before is None:
        return True
    key, version, note = before
    if (key, version) != (id(tensor), tensor._version):
        return False
    return same_note(note, note_of(tensor))
