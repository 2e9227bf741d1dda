"""Steps of a model between markers, with its units in roles."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.private import num_nodes, number_of
from fusedckpt.memory import Mark, Phase, nbytes_of, phases_of, seconds, storage_ref
from fusedckpt.planning.grouping import SurveyedUnit
from fusedckpt.planning.roles import PLAIN, Role, assigned, run_at, segmented
from fusedckpt.planning.survey import graph_of, trimmers_of
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

# markers that begin no phase
_INSIDE = "returned", "backward"

T = TypeVar("T")
# by unit, the roles of its modules
Roles = Sequence[Sequence[Role]]


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
    # classes tell models apart that print the same, such as one whose functions save recipes
    modes = tuple((type(module), module.training) for module in step.model.modules())
    return repr(step.model), modes, likes, tensors[0].device, torch.get_num_threads()


def peak_of(step: Step) -> int:
    """Run a step and return its peak, in bytes."""
    step, held = step.fresh()
    phases = phases_of(partial(step.take, held=held), held[0].device, step.resident(held))
    return max(phase.peak for phase in phases)


class _Held:
    """The tensors that units get and make in a step, and how long they live.

    A caller may hold a tensor that no backward needs for longer than the unit runs, as the forward
    of an nn.Sequential holds its argument. It is gone when the model returns.
    """

    def __init__(self, count: int):
        self._count, self._given = count, set[StorageWeakRef]()
        # by unit the storages of the arguments that require grad
        self._inputs: list[list[StorageWeakRef]] = [[] for _ in range(count)]
        self.inputs: list[list[int]] = [[] for _ in range(count)]
        # by storage: the marker from which on nothing has to hold it, its bytes, and the marker at
        # which it was first gone
        self._since: dict[StorageWeakRef, tuple[int, int]] = {}
        self._gone: dict[StorageWeakRef, int] = {}
        # by unit the storages of the arguments that do not require grad, and their bytes
        self._constants: list[dict[StorageWeakRef, int]] = [{} for _ in range(count)]
        # the same where a storage lives until backward, else 0; counted for the last unit that
        # gets it
        self.kept_constants: list[list[int]] = [[] for _ in range(count)]

    def note(self, i: int, tensors: Iterable[Tensor], is_given: bool) -> None:
        """Note the tensors that unit i gets, or makes."""
        all_tensors = [*tensors]
        constants = [x for x in all_tensors if not x.requires_grad]
        tensors = [x for x in all_tensors if x.requires_grad]
        if is_given:
            self.see(i)
            self._constants[i] = {storage_ref(x): nbytes_of([x]) for x in constants}
            self._inputs[i] = [*map(storage_ref, tensors)]
            self.inputs[i] = [nbytes_of([x]) for x in tensors]
        for x in tensors:
            storage = storage_ref(x)
            # a tensor that a unit makes for another is for the first that gets it to hold
            is_first = is_given and storage not in self._given
            if is_first or storage not in self._since:
                self._since[storage] = i + 1, nbytes_of([x])
            if is_given:
                self._given.add(storage)

    def see(self, marker: int) -> None:
        """Note the tensors that are gone; marker: a number of a unit, or of all units."""
        for storage in self._since:
            if storage not in self._gone and storage.expired():
                self._gone[storage] = marker
        if marker == self._count:
            last = {storage: i for i, row in enumerate(self._constants) for storage in row}
            self.kept_constants = [
                [nbytes * (last[x] == i and not x.expired()) for x, nbytes in row.items()]
                for i, row in enumerate(self._constants)
            ]

    def kept_inputs(self) -> list[list[bool]]:
        """Return by unit whether each of its arguments lives until backward."""
        return [[storage not in self._gone for storage in own] for own in self._inputs]

    def late(self) -> list[int]:
        """Return by marker the bytes of tensors that nothing holds in the end."""
        found = [0] * (self._count + 1)
        for storage, marker in self._gone.items():
            since, nbytes = self._since[storage]
            for between in range(since, marker):
                found[between] += nbytes
        return found


class Reading:
    """A step's phases by unit: peaks, live bytes at its markers, and ms.

    held: the tensors that units get and make in it.
    """

    def __init__(self, phases: Sequence[Phase], held: _Held):
        # bytes that live when a unit begins, or the model returns, and are gone in the end
        self._late = held.late()
        # by unit, of its arguments that require grad: bytes, and whether they live until backward
        self.inputs, self.kept_inputs = held.inputs, held.kept_inputs()
        # by unit, the bytes of each of its other arguments that lives until backward, else 0
        self.kept_constants = held.kept_constants
        self.live = dict[str, int]()
        self.peaks, self._ms = Counter[str](), Counter[str]()
        where = "begin"
        for phase in phases:
            self.live.setdefault(phase.name, phase.start)
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


class _Marker:
    """Sets markers where units begin and end, and where the first of their gradients arrives."""

    def __init__(self, mark: Mark, held: _Held):
        self._mark, self._held = mark, held
        # by unit, the numbers of the first node of autograd's graph that it made, and of the next
        self._nodes: dict[int, tuple[float, float]] = {}

    def roles_of(self, i: int, roles: Sequence[Role]) -> list[Role]:
        """Return roles in which the modules of unit i run in these between markers."""
        last = len(roles) - 1
        return [partial(self._run, i, k == 0, k == last, role) for k, role in enumerate(roles)]

    def _run(
        self,
        i: int,
        is_first: bool,
        is_last: bool,
        role: Role,
        forward: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if is_first:
            self._held.note(i, tensors_of([args, kwargs]), is_given=True)
            self._mark(f"enter {i}")
            self._nodes[i] = num_nodes(), num_nodes()
        output = role(forward, args, kwargs)
        if is_last:
            self._nodes[i] = self._nodes[i][0], num_nodes()
            self._held.note(i, tensors_of([output]), is_given=False)
            self._mark(f"leave {i}")
        return output

    def hook(self, loss: Tensor) -> None:
        """Set the markers of a backward from `loss`.

        A gradient may arrive by another tensor than a unit returns: by one in an attribute, or by
        one that a hook of a module inside noted.
        """
        units = sorted((first, stop, i) for i, (first, stop) in self._nodes.items())
        starts = [first for first, _, _ in units]

        def unit_of(node: Any) -> int | None:
            place = bisect_right(starts, number_of(node)) - 1
            is_inside = place >= 0 and number_of(node) < units[place][1]
            return units[place][2] if is_inside else None

        arrived = set[int]()

        def arrive(i: int, _: Any) -> None:
            if i not in arrived:
                arrived.add(i)
                self._mark(f"back {i}")

        entries = dict[Any, int]()
        for node in graph_of([loss]):
            own = unit_of(node)
            for after, _ in node.next_functions:
                # a leaf has no number, and belongs to no unit
                if after is not None and not hasattr(after, "variable"):
                    unit = unit_of(after)
                    if unit is not None and unit != own:
                        entries[after] = unit
        for node, i in entries.items():
            node.register_prehook(partial(arrive, i))


def roles_at(level: str, unit: SurveyedUnit) -> list[Role]:
    """Return the roles of a unit's modules that save a level."""
    return [run_at(level) for _ in unit.members]


class Meter:
    """Runs steps of a model with its units in roles."""

    def __init__(self, step: Step, found: Sequence[SurveyedUnit]):
        self._step, self._units = step, found

    def _alone(self) -> list[list[Role]]:
        """Return roles in which each unit is in a segment of its own, unless none may hold it."""
        return [
            roles_at(PLAIN, unit) if unit.fixed else segmented(len(unit.members))
            for unit in self._units
        ]

    def _in(self, roles: Roles, marker: _Marker) -> Any:
        marked = [marker.roles_of(i, own) for i, own in enumerate(roles)]
        return assigned(self._by_module(marked))

    def _by_module(self, roles: Roles) -> dict[nn.Module, Role]:
        """Return roles by the module that runs in each."""
        members = [member for unit in self._units for member in unit.members]
        flat = [role for own in roles for role in own]
        return {module: role for (_, module), role in zip(members, flat, strict=True)}

    def read(self, roles: Roles) -> Reading:
        """Run a step and read its phases."""
        step, held = self._step.fresh()
        noted = _Held(len(self._units))

        def run(mark: Mark) -> None:
            def loss(output: Any) -> Any:
                mark("returned")
                noted.see(len(self._units))
                value = step.loss(output)
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    marker.hook(value)
                return value

            marker = _Marker(mark, noted)
            with self._in(roles, marker):
                step._replace(loss=loss).take(mark, held)

        phases = phases_of(run, held[0].device, step.resident(held))
        return Reading(phases, noted)

    def times(self, roles: Roles) -> tuple[Times, list[float]]:
        """Return the times of a step, and the ms of each unit's forward in it."""
        device, at = self._step.device, dict[str, float]()
        marker = _Marker(lambda x: at.update({x: seconds(device)}), _Held(len(roles)))
        with self._in(roles, marker):
            found = times_of(self._step)
        spans = (at.get(f"leave {i}", 0.0) - at.get(f"enter {i}", 0.0) for i in range(len(roles)))
        return found, [1e3 * span for span in spans]

    def alone(self) -> Reading:
        """Read a step in which every unit is in a checkpoint of its own."""
        return self.read(self._alone())

    def freed(self, alone: Reading) -> list[int]:
        """Run a forward with units in segments as long as can be; return bytes by unit.

        Those of the inputs that a segment of the unit alone keeps until backward, and one that
        begins earlier does not. alone: the reading in which each unit is in its own.
        """
        roles, count = list[Role](), len(self._units)
        start = 0
        while start < count:
            behind = range(start + 1, count)
            stop = next((k for k in behind if not self._units[k].joined), count)
            members = sum(len(unit.members) for unit in self._units[start:stop])
            is_fixed = bool(self._units[start].fixed)
            roles += [run_at(PLAIN)] * members if is_fixed else segmented(members)
            start = stop
        given = list[list[tuple[StorageWeakRef, int]]]([[] for _ in self._units])
        takers: Counter[int] = Counter()
        trimmers = list[Callable[[], None]]()

        def noting(i: int, role: Role, forward: Any, args: Any, kwargs: Any) -> Any:
            tensors = [x for x in tensors_of([args, kwargs]) if x.requires_grad]
            given[i] = [(storage_ref(x), nbytes_of([x])) for x in tensors]
            takers.update({storage.cdata for storage, _ in given[i]})
            trimmers.extend(trimmers_of(args, kwargs))
            return role(forward, args, kwargs)

        assignment = self._by_module([[role] for role in roles])
        for i, unit in enumerate(self._units):
            _, first = unit.members[0]
            assignment[first] = partial(noting, i, assignment[first])
        step, _ = self._step.fresh()
        with assigned(assignment):
            output = step.model(*step.args, **step.kwargs)
        freed = [
            sum(
                nbytes
                for (storage, nbytes), is_kept in zip(known, alone.kept_inputs[i], strict=False)
                if is_kept and storage.expired() and takers[storage.cdata] == 1
            )
            for i, known in enumerate(given)
        ]
        del output
        for trim in trimmers:
            trim()
        return freed

    def saving(self, levels: Sequence[str], group: Sequence[int]) -> Reading:
        """Read a step in which the units of a group save a level each, the others nothing."""
        roles = self._alone()
        for i in group:
            roles[i] = roles_at(levels[i], self._units[i])
        return self.read(roles)
