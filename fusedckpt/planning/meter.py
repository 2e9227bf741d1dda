"""Steps of a model between markers, with its units in roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.memory import Mark, Phase, nbytes_of, phases_of, seconds, storage_ref
from fusedckpt.planning.repeats import Noting, why_not_again
from fusedckpt.planning.roles import PLAIN, Role, assigned, in_chunks, run_at, segmented
from fusedckpt.planning.survey import Found
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

# markers that begin no phase
_INSIDE = "returned", "checked", "backward"

T = TypeVar("T")


class Times(NamedTuple):
    """The ms of a forward, and of that and its backward."""

    forward: float
    both: float


def times_of(step: Step) -> Times:
    """Return the times of a step, without the optimizer's."""
    step, held = step.fresh()
    device = held[0].device
    start = seconds(device)
    output = step.model(*step.args, **step.kwargs)
    middle = seconds(device)
    step.loss(output).backward()
    return Times(1e3 * (middle - start), 1e3 * (seconds(device) - start))


# measurements, by all that they depend on
_known: dict[Any, Any] = {}


def once(key: Any, measure: Callable[[], T]) -> T:
    """Return the first measurement for this key, so that equal steps have equal plans."""
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = measure()
    return _known[key]


def step_kind(step: Step) -> Any:
    """Return a key that steps which take the same time share."""
    tensors = [*step.parameters(), *step.inputs()]
    likes = tuple((x.shape, x.dtype, x.requires_grad, x.grad is None) for x in tensors)
    modes = tuple(module.training for module in step.model.modules())
    return repr(step.model), modes, likes, tensors[0].device, torch.get_num_threads()


def peak_of(step: Step) -> int:
    """Run a step and return its peak, in bytes."""
    step, held = step.fresh()
    phases = phases_of(partial(step.take, held=held), held[0].device, step.resident(held))
    return max(phase.peak for phase in phases)


class Reading:
    """A step's phases by unit: peaks, live bytes at its markers, and ms.

    late: bytes that live when a unit begins, or the model returns, and are gone in the end.
    """

    def __init__(self, phases: Sequence[Phase], late: Sequence[int]):
        self._late, self.live = late, dict[str, int]()
        self.peaks, self._ms = Counter[str](), Counter[str]()
        where = "begin"
        for phase in phases:
            self.live.setdefault(phase.name, phase.start)
            if phase.name == "check":
                continue
            where = where if phase.name in _INSIDE else phase.name
            self.peaks[where] = max(self.peaks[where], phase.peak)
            self._ms[where] += phase.ms  # type: ignore[assignment]  # counts may be floats

    def peak(self, kind: str, i: int) -> int:
        """Return the peak of a unit's phase; of one that was not called, the bytes of then."""
        return self.peaks.get(f"{kind} {i}", 0 if kind == "back" else self.begin(i))

    def ms(self, kind: str, i: int) -> float:
        """Return the ms of a unit's phase."""
        return float(self._ms[f"{kind} {i}"])

    def begin(self, i: int) -> int:
        """Return the live bytes when unit i begins, or when the model returns."""
        later = (self.live.get(f"enter {k}") for k in range(i, len(self._late)))
        return next((x for x in later if x is not None), self.live["returned"])

    def kept(self, i: int) -> int:
        """Return the bytes of them that live on until backward."""
        return self.begin(i) - self._late[i]


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

    def _alone(self) -> list[Role]:
        """Return roles in which each unit is in a segment of its own, unless none may hold it."""
        return [run_at(PLAIN) if unit.fixed else segmented()[0] for unit in self._found]

    def _in(self, roles: Sequence[Role], mark: Mark, noted: _Held) -> Any:
        pairs = enumerate(zip(self._found, roles, strict=True))
        return assigned(
            {
                unit.module: partial(_marked, mark, noted, i, in_chunks(role, self._chunks))
                for i, (unit, role) in pairs
            }
        )

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
        device, at = self._step.parameters()[0].device, dict[str, float]()
        with self._in(roles, lambda x: at.update({x: seconds(device)}), _Held(len(roles))):
            found = times_of(self._step)
        spans = (at.get(f"leave {i}", 0.0) - at.get(f"enter {i}", 0.0) for i in range(len(roles)))
        return found, [1e3 * span for span in spans]

    def alone(self) -> Reading:
        """Read a step in which every unit is in a checkpoint of its own; raise Differs."""
        segments, roles = dict[int, Noting](), self._alone()

        def role(i: int, forward: Any, args: Any, kwargs: Any) -> Any:
            segment = segments[i] = Noting(self._found[i].module)
            return segment.finish(segment.go_on(forward, args, kwargs))

        def check() -> None:
            reasons = {i: why for i, x in segments.items() if (why := why_not_again(x))}
            # the graph keeps those that backward needs
            segments.clear()
            if reasons:
                raise Differs(reasons)

        units = enumerate(self._found)
        return self.read([roles[i] if u.fixed else partial(role, i) for i, u in units], check)

    def freed(self) -> list[int]:
        """Run a forward with units in segments as long as can be; return bytes by unit.

        Those of the inputs that nothing keeps until backward where a segment goes on with the unit.
        """
        roles, count = list[Role](), len(self._found)
        while (i := len(roles)) < count:
            stop = next((k for k in range(i + 1, count) if not self._found[k].joined), count)
            roles += [run_at(PLAIN)] if self._found[i].fixed else segmented(stop - i)
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
        roles = self._alone()
        for i in group:
            roles[i] = run_at(levels[i])
        return self.read(roles)
