"""Steps of a model between markers, with its units in roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.memory import nbytes_of, storage_ref
from fusedckpt.planning.marks import Mark, Reading, phases_of
from fusedckpt.planning.repeats import Noting, why_not_again
from fusedckpt.planning.roles import PLAIN, Role, Segmented, assigned, in_chunks, run_at
from fusedckpt.planning.survey import Found
from fusedckpt.planning.timing import Times, seconds, times_of
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

__all__ = ["Differs", "Meter", "peak_of"]


def peak_of(step: Step) -> int:
    """Run a step and return its peak, in bytes."""
    step, held = step.fresh()
    phases = phases_of(partial(step.take, held=held), held[0].device, step.resident(held))
    return max(phase.peak for phase in phases)


class Differs(Exception):
    """Units that cannot be recomputed, by number, with the reasons."""

    def __init__(self, reasons: dict[int, str]):
        super().__init__()
        self.reasons = reasons


class _Held:
    """The tensors that units get and make in a step, and how long they live.

    A caller may hold a tensor that no backward needs for longer than the unit runs, as the forward
    of an nn.Sequential holds its argument. It is gone when the model returns.
    """

    def __init__(self, count: int):
        self._count, self._given = count, set[StorageWeakRef]()
        # by storage: the marker from which on nothing has to hold it, its bytes, and the marker at
        # which it was first gone
        self._since: dict[StorageWeakRef, tuple[int, int]] = {}
        self._gone: dict[StorageWeakRef, int] = {}

    def note(self, i: int, tensors: Iterable[Tensor], is_given: bool) -> None:
        """Note the tensors that unit i gets, or makes."""
        if is_given:
            self.see(i)
        for x in tensors:
            storage = storage_ref(x)
            # a tensor that a unit makes for another is for the first that gets it to hold
            is_first = is_given and storage not in self._given
            if x.requires_grad and (is_first or storage not in self._since):
                self._since[storage] = i + 1, nbytes_of([x])
            if is_given:
                self._given.add(storage)

    def see(self, marker: int) -> None:
        """Note the tensors that are gone; marker: a number of a unit, or of all units."""
        for storage in self._since:
            if storage not in self._gone and storage.expired():
                self._gone[storage] = marker

    def late(self) -> list[int]:
        """Return by marker the bytes of tensors that nothing holds in the end."""
        found = [0] * (self._count + 1)
        for storage, marker in self._gone.items():
            since, nbytes = self._since[storage]
            for between in range(since, marker):
                found[between] += nbytes
        return found


def _marked(
    mark: Mark, held: _Held, i: int, role: Role, forward: Any, args: Any, kwargs: Any
) -> Any:
    """Run a unit in its role between markers: itself a role."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    known = {id(x): (x, x.grad_fn) for x in tensors_of([args, kwargs])}
    held.note(i, (x for x, _ in known.values()), is_given=True)
    mark(f"enter {i}")
    output, arrived = role(forward, args, kwargs), list[bool]()

    def arrive(_: Any) -> None:
        if not arrived:
            arrived.append(True)
            mark(f"back {i}")

    held.note(i, tensors_of([output]), is_given=False)
    for x in tensors_of([output]):
        # written in place, a tensor that was given has another node
        if x.grad_fn is not None and known.get(id(x), (x, None))[1] is not x.grad_fn:
            x.grad_fn.register_prehook(arrive)
    del known
    mark(f"leave {i}")
    return output


class Meter:
    """Runs steps of a model with its units in roles."""

    def __init__(self, step: Step, found: Sequence[Found], chunks: int):
        self._step, self._found, self._chunks = step, found, chunks

    def read(self, roles: Sequence[Role], returned: Callable[[], Any] = tuple) -> Reading:
        """Run a step and read its phases; returned: called between forward and loss."""
        step, held = self._step.fresh()
        noted = _Held(len(self._found))

        def run(mark: Mark) -> None:
            def loss(output: Any) -> Any:
                mark("returned")
                noted.see(len(self._found))
                mark("check")
                returned()
                mark("checked")
                return step.loss(output)

            with self._in(roles, mark, noted):
                step._replace(loss=loss).take(mark, held)

        phases = phases_of(run, held[0].device, step.resident(held))
        return Reading(phases, noted.late())

    def times(self, roles: Sequence[Role]) -> tuple[Times, list[float]]:
        """Return the times of a step, and the ms of each unit's forward in it."""
        device, entries = self._step.parameters()[0].device, dict[str, float]()
        noted = _Held(len(roles))
        with self._in(roles, lambda name: entries.update({name: seconds(device)}), noted):
            found = times_of(self._step)
        spans = [(entries.get(f"enter {i}"), entries.get(f"leave {i}")) for i in range(len(roles))]
        return found, [1e3 * (end - start) if start and end else 0.0 for start, end in spans]

    def _in(self, roles: Sequence[Role], mark: Mark, noted: _Held) -> Any:
        given = {
            x.module: partial(_marked, mark, noted, i, in_chunks(role, self._chunks))
            for i, (x, role) in enumerate(zip(self._found, roles, strict=True))
        }
        return assigned(given)

    def alone(self) -> Reading:
        """Read a step in which every unit is in a checkpoint of its own; raise Differs."""
        segments = dict[int, Noting]()

        def role(i: int, forward: Any, args: Any, kwargs: Any) -> Any:
            segment = segments[i] = Noting(self._found[i].module)
            return segment.finish(segment.go_on(forward, args, kwargs))

        def check() -> None:
            reasons = {i: why for i, x in segments.items() if (why := why_not_again(x))}
            # the graph keeps those that backward needs
            segments.clear()
            if reasons:
                raise Differs(reasons)

        pairs = enumerate(self._found)
        return self.read([run_at(PLAIN) if u.fixed else partial(role, i) for i, u in pairs], check)

    def freed(self) -> list[int]:
        """Run a forward with units in segments as long as can be; return bytes by unit.

        Those of the inputs that nothing keeps until backward where a segment goes on with the unit.
        """
        roles, count = list[Role](), len(self._found)
        while (i := len(roles)) < count:
            stop = i + 1
            while stop < count and self._found[stop].joined:
                stop += 1
            roles += [run_at(PLAIN)] if self._found[i].fixed else Segmented(stop - i).roles()
        given = list[list[tuple[StorageWeakRef, int]]]([[] for _ in roles])
        takers: Counter[int] = Counter()

        def noting(i: int, role: Role, forward: Any, args: Any, kwargs: Any) -> Any:
            tensors = [x for x in tensors_of([args, kwargs]) if x.requires_grad]
            given[i] = [(storage_ref(x), nbytes_of([x])) for x in tensors]
            takers.update({storage.cdata for storage, _ in given[i]})
            return role(forward, args, kwargs)

        step, _ = self._step.fresh()
        pairs = enumerate(zip(self._found, roles, strict=True))
        with assigned({x.module: partial(noting, i, role) for i, (x, role) in pairs}):
            output = step.model(*step.args, **step.kwargs)
        found = [
            sum(n for x, n in known if x.expired() and takers[x.cdata] == 1) for known in given
        ]
        del output
        return found

    def saving(self, levels: Sequence[str], group: Sequence[int]) -> Reading:
        """Read a step in which the units of a group save a level each, the others nothing."""
        chosen = {i: run_at(levels[i]) for i in group}
        pairs = enumerate(self._found)
        others = {i: run_at(PLAIN) if u.fixed else Segmented(1).roles()[0] for i, u in pairs}
        return self.read([chosen.get(i, role) for i, role in others.items()])
