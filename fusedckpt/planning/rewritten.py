"""Units that get a tensor of an earlier unit which code in between writes without a new version.

    for block in self.blocks:
        x = block(x)
        x.data.clamp_(-65504, 65504)

A segment of two such units would pass x from one to the other as the first returned it. Ops show
a write that leaves the values of this step; bits one by NumPy. A write that the measured steps do
not have, behind a condition that comes true later, is seen in none of these ways: there a segment
sees new versions, and `x.data = y`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.private import TorchDispatchMode, schema_of, written_by
from fusedckpt.checkpointing.determinism import Note, note_of, same_note
from fusedckpt.memory import storage_ref
from fusedckpt.planning.roles import assigned, segmented
from fusedckpt.planning.trimming import trimmers_of
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

REWRITTEN = (
    "no segment joins it to the units before, because code in between writes their outputs by "
    ".data or NumPy, which autograd does not see"
)


class _Result(NamedTuple):
    """A tensor that a unit returned."""

    tensor: weakref.ref[Tensor]
    # its version then
    version: int
    # its values then
    note: Note


class _Boundaries(TorchDispatchMode):
    """The tensors that units return, and the ops of the code between units that write."""

    def __init__(self) -> None:
        super().__init__()
        # by id
        self._returned: dict[int, _Result] = {}
        self._written = set[StorageWeakRef]()
        self._is_inside = False
        # the names of units that get a tensor which was written
        self.names = list[str]()
        # see `trimmers_of`
        self._trimmers = list[Callable[[], None]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; of one between units, note the memory that it writes."""
        kwargs = kwargs or {}
        if not self._is_inside and schema_of(func).is_mutable:
            self._written.update(map(storage_ref, written_by(func, args, kwargs)))
        return func(*args, **kwargs)

    def visit(self, name: str, role: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a unit in its role, between looks at its arguments and at its outputs: a role."""
        if not torch.is_grad_enabled() or self._is_inside:
            return role(forward, args, kwargs)
        self._is_inside = True
        try:
            if any(map(self._is_rewritten, tensors_of([args, kwargs]))):
                self.names.append(name)
            self._trimmers += trimmers_of(args, kwargs)
            output = role(forward, args, kwargs)
            for x in tensors_of([output]):
                self._returned[id(x)] = _Result(weakref.ref(x), x._version, note_of(x))
        finally:
            self._is_inside = False
        return output

    def _is_rewritten(self, x: Tensor) -> bool:
        before = self._returned.get(id(x))
        if before is None or before.tensor() is not x or before.version != x._version:
            return False
        return storage_ref(x) in self._written or not same_note(before.note, note_of(x))

    def trim(self) -> None:
        """Remove the items that units added to containers among their arguments."""
        for trim in self._trimmers:
            trim()


def rewritten_units(step: Step, names: Sequence[str]) -> list[str]:
    """Run a forward with each unit in a checkpoint; return the units that get a written tensor."""
    boundaries = _Boundaries()
    try:
        return _seen(boundaries, step, names, boundaries)
    except NotImplementedError:
        # operators of higher order refuse modes that they do not know
        return _seen(_Boundaries(), step, names, nullcontext())


def _seen(
    boundaries: _Boundaries, step: Step, names: Iterable[str], ops: AbstractContextManager[Any]
) -> list[str]:
    step, _ = step.fresh()
    roles = {
        step.model.get_submodule(name): partial(boundaries.visit, name, *segmented())
        for name in names
    }
    with assigned(roles), ops:
        step.model(*step.args, **step.kwargs)
    boundaries.trim()
    return boundaries.names
