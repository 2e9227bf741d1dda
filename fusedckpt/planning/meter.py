"""Steps of a model between markers, with its units in roles.

A marker begins a phase, which lasts until the next one. The markers of a step of two units, and the
code that runs in their phases:

    begin      nothing yet
    forward    code before the units
    enter 0    forward of unit 0
    leave 0    code between the units
    enter 1    forward of unit 1
    leave 1    code behind the units, the loss, and the backward of both
    back 1     recompute and backward of unit 1, backward of the code between the units
    back 0     recompute and backward of unit 0, backward of the code before the units
    optimizer  the optimizer's step
    end        nothing any more

Two more markers begin no phase: "returned", where the model returns, and "backward", where backward
begins. Both record the bytes that are live at that moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.private import num_nodes, number_of
from fusedckpt.memory import Mark, Phase, nbytes_of, phases_of, seconds, storage_ref
from fusedckpt.planning.graph import graph_of
from fusedckpt.planning.grouping import SurveyedUnit
from fusedckpt.planning.lifetimes import Lifetimes
from fusedckpt.planning.products import ProductWrites
from fusedckpt.planning.roles import UNCHANGED, Role, assigned, run_at, segmented
from fusedckpt.planning.trimming import trimmers_of
from fusedckpt.planning.whole_steps import Leftover, Times, times_of
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

# markers that begin no phase
_INSIDE = "returned", "backward"

# by unit, the roles of its modules
Roles = Sequence[Sequence[Role]]


class Reading:
    """A step's phases by unit: peaks, live bytes at its markers, and ms.

    lifetimes: of the tensors that units get and make in it. leftover: the bytes that it leaves.
    """

    def __init__(self, phases: Sequence[Phase], lifetimes: Lifetimes, leftover: Leftover):
        self._late_bytes = lifetimes.late_bytes()
        # by unit, the bytes of each argument that requires grad
        self.inputs = lifetimes.inputs
        # by unit, whether each of these lives until backward
        self.saved_inputs = lifetimes.saved_inputs()
        # by unit, the bytes of each of its other arguments that lives until backward, else 0
        self.saved_constants = lifetimes.saved_constants
        # by its places, the life of each of these
        self.constants = lifetimes.constants()
        # by marker, the live bytes there
        self.live = dict[str, int]()
        # by the marker that begins a phase, its peak in bytes
        self.peaks = Counter[str]()
        self._ms = Counter[str]()
        # the peak of the code behind the last unit until the model returns, and from there on
        self.peak_in_model = 0
        self.peak_returned = 0
        where = "begin"
        for phase in phases:
            self.live.setdefault(phase.name, phase.start)
            if phase.name in _INSIDE:
                self.peak_returned = max(self.peak_returned, phase.peak)
            else:
                where = phase.name
                if where.startswith("enter"):
                    self.peak_returned = 0
                if where.startswith("leave"):
                    self.peak_in_model = phase.peak
            self.peaks[where] = max(self.peaks[where], phase.peak)
            self._ms[where] += phase.ms  # type: ignore[assignment]  # counts may be floats
        # the bytes that it leaves for the next step
        self.kept_bytes = leftover.nbytes(self.live)

    def peak(self, kind: str, i: int) -> int:
        """Return the peak of a unit's phase; without that phase, the bytes live at its place."""
        return self.peaks.get(f"{kind} {i}", 0 if kind == "back" else self.live_at_begin(i))

    def ms(self, kind: str, i: int) -> float:
        """Return the ms of a unit's phase."""
        return float(self._ms[f"{kind} {i}"])

    def live_at_begin(self, i: int) -> int:
        """Return the live bytes when unit i begins, or when the model returns."""
        later = (self.live.get(f"enter {k}") for k in range(i, len(self._late_bytes)))
        return next((x for x in later if x is not None), self.live["returned"])

    def saved_before(self, i: int) -> int:
        """Return the bytes among these that live on until backward."""
        return self.live_at_begin(i) - self._late_bytes[i]


class _NodeSpan(NamedTuple):
    """The numbers of the nodes of autograd's graph that a unit's forward made."""

    # the number of the first node
    first: float
    # the number of the first node behind them
    stop: float
    # the unit's number
    unit: int


class _Marker:
    """Sets markers where units begin and end, and where the first of their gradients arrives."""

    def __init__(self, mark: Mark, lifetimes: Lifetimes):
        self._mark = mark
        self._lifetimes = lifetimes
        # by unit, the nodes that its forward made
        self._spans: dict[int, _NodeSpan] = {}

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
            self._lifetimes.note_arguments(i, tensors_of([args, kwargs]))
            self._mark(f"enter {i}")
            self._spans[i] = _NodeSpan(num_nodes(), num_nodes(), i)
        output = role(forward, args, kwargs)
        if is_last:
            self._spans[i] = self._spans[i]._replace(stop=num_nodes())
            self._lifetimes.note_outputs(i, tensors_of([output]))
            self._mark(f"leave {i}")
        return output

    def hook(self, loss: Tensor) -> None:
        """Set the markers of a backward from `loss`.

        A gradient may arrive by another tensor than a unit returns: by one in an attribute, or by
        one that a hook of a module inside noted.
        """
        spans = sorted(self._spans.values())
        starts = [span.first for span in spans]

        def unit_of(node: Any) -> int | None:
            place = bisect_right(starts, number_of(node)) - 1
            is_inside = place >= 0 and number_of(node) < spans[place].stop
            return spans[place].unit if is_inside else None

        arrived = set[int]()

        def arrive(i: int, _: Any) -> None:
            if i not in arrived:
                arrived.add(i)
                self._lifetimes.note_backward(i)
                self._mark(f"back {i}")

        # the nodes of units that get a gradient from code outside of the unit, and that unit
        entries = dict[Any, int]()
        for node in graph_of([loss]):
            reader = unit_of(node)
            for child, _ in node.next_functions:
                # a leaf has no number, and belongs to no unit
                if child is not None and not hasattr(child, "variable"):
                    unit = unit_of(child)
                    if unit is not None and unit != reader:
                        entries[child] = unit
        for node, i in entries.items():
            node.register_prehook(partial(arrive, i))


def roles_at(level: str, unit: SurveyedUnit) -> list[Role]:
    """Return the roles of a unit's modules that save a level."""
    return [run_at(level) for _ in unit.members]


class Meter:
    """Runs steps of a model with its units in roles."""

    def __init__(self, step: Step, units: Sequence[SurveyedUnit]):
        # its `kept_bytes` are those of the baseline, once that is read
        self.step = step
        self._units = units

    def baseline(self) -> Reading:
        """Read a step in which every unit is in a checkpoint of its own, unless none may."""
        reading = self._read(self._baseline_roles())
        if reading.kept_bytes > self.step.kept_bytes:
            self.step = self.step._replace(kept_bytes=reading.kept_bytes)
            reading = self._read(self._baseline_roles())
        return reading

    def writing_products(self) -> list[str]:
        """Run a forward; return the units that write the output of a product in place."""
        writes = ProductWrites()
        roles = [
            [partial(writes.visit, unit.name, role) for role in unit_roles]
            for unit, unit_roles in zip(self._units, self._baseline_roles(), strict=True)
        ]
        step, _ = self.step.fresh()
        with assigned(self._by_module(roles)), writes:
            step.model(*step.args, **step.kwargs)
        writes.trim()
        return [unit.name for unit in self._units if unit.name in writes.names]

    def at_levels(self, levels: Sequence[str], group: Sequence[int]) -> Reading:
        """Read a step in which each unit of a group saves a level, and others as the baseline."""
        roles = self._baseline_roles()
        for i in group:
            roles[i] = roles_at(levels[i], self._units[i])
        return self._read(roles)

    def _baseline_roles(self) -> list[list[Role]]:
        return [
            roles_at(UNCHANGED, unit) if unit.fixed else segmented(len(unit.members))
            for unit in self._units
        ]

    def _by_module(self, roles: Roles) -> dict[nn.Module, Role]:
        """Return roles by the module that runs in each."""
        members = [member for unit in self._units for member in unit.members]
        flat = [role for unit_roles in roles for role in unit_roles]
        return {module: role for (_, module), role in zip(members, flat, strict=True)}

    def _marked(self, roles: Roles, marker: _Marker) -> Any:
        """Let units run in roles between markers meanwhile."""
        marked = [marker.roles_of(i, unit_roles) for i, unit_roles in enumerate(roles)]
        return assigned(self._by_module(marked))

    def _read(self, roles: Roles) -> Reading:
        """Run a step and read its phases."""
        step, held = self.step.fresh()
        lifetimes = Lifetimes(len(self._units))
        leftover = Leftover(step, held)

        def run(mark: Mark) -> None:
            def loss(output: Any) -> Any:
                mark("returned")
                lifetimes.note_gone(len(self._units))
                value = step.loss(output)
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    marker.hook(value)
                return value

            marker = _Marker(mark, lifetimes)
            with self._marked(roles, marker):
                step._replace(loss=loss).take(mark, held, see_results=leftover.see_results)

        phases = phases_of(run, held[0].device, step.resident(held))
        return Reading(phases, lifetimes, leftover)

    def times(self, roles: Roles) -> tuple[Times, list[float]]:
        """Return the times of a step, and the ms of each unit's forward in it."""
        device = self.step.device
        marked = dict[str, float]()
        marker = _Marker(lambda name: marked.update({name: seconds(device)}), Lifetimes(len(roles)))
        with self._marked(roles, marker):
            times = times_of(self.step)
        units = range(len(roles))
        spans = (marked.get(f"leave {i}", 0.0) - marked.get(f"enter {i}", 0.0) for i in units)
        return times, [1e3 * span for span in spans]

    def freed_by_segments(self, baseline: Reading) -> list[int]:
        """Run a forward with units in segments as long as can be; return bytes by unit.

        These are the bytes of the inputs that a segment of the unit alone saves until backward, and
        a segment that begins earlier does not.
        """
        # by unit, the storages that it gets which require grad, and their bytes
        inputs = list[list[tuple[StorageWeakRef, int]]]([[] for _ in self._units])
        num_takers: Counter[int] = Counter()
        trimmers = list[Callable[[], None]]()

        def noting(i: int, role: Role, forward: Any, args: Any, kwargs: Any) -> Any:
            tensors = [x for x in tensors_of([args, kwargs]) if x.requires_grad]
            inputs[i] = [(storage_ref(x), nbytes_of([x])) for x in tensors]
            num_takers.update({storage.cdata for storage, _ in inputs[i]})
            trimmers.extend(trimmers_of(args, kwargs))
            return role(forward, args, kwargs)

        roles = self._by_module([[role] for role in self._longest_segments()])
        for i, unit in enumerate(self._units):
            _, first = unit.members[0]
            roles[first] = partial(noting, i, roles[first])
        step, _ = self.step.fresh()
        with assigned(roles):
            output = step.model(*step.args, **step.kwargs)
        freed = [
            sum(
                nbytes
                for (storage, nbytes), is_saved in zip(row, baseline.saved_inputs[i], strict=False)
                if is_saved and storage.expired() and num_takers[storage.cdata] == 1
            )
            for i, row in enumerate(inputs)
        ]
        del output
        for trim in trimmers:
            trim()
        return freed

    def _longest_segments(self) -> list[Role]:
        """Return a role for each module of the units, in segments as long as can be."""
        roles = list[Role]()
        count = len(self._units)
        start = 0
        while start < count:
            following = range(start + 1, count)
            stop = next((k for k in following if not self._units[k].joined), count)
            num_modules = sum(len(unit.members) for unit in self._units[start:stop])
            is_fixed = bool(self._units[start].fixed)
            roles += [run_at(UNCHANGED)] * num_modules if is_fixed else segmented(num_modules)
            start = stop
        return roles
