"""Where the memory of one training step goes: bytes saved for backward per module, and the peak."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.allocations import profiled
from fusedckpt.autograd.tracker import choices
from fusedckpt.checkpointing import offload
from fusedckpt.fusing.first_step import learn_from
from fusedckpt.fusing.fuse_report import FusedCalls, FusedModule
from fusedckpt.fusing.recipe_models import saved_with_recipes
from fusedckpt.memory import (
    SavedStorage,
    SavedTensors,
    addresses_of,
    nbytes_of,
    saved_tensors,
)
from fusedckpt.reporting import recipe_groups
from fusedckpt.reporting.left_graphs import LeftGraphs
from fusedckpt.reporting.memory_plot import draw_memory
from fusedckpt.reporting.memory_text import text_of_report
from fusedckpt.reporting.recipe_groups import RecipeGroup
from fusedckpt.reporting.step import Step, check_step, default_loss, optimizers_of, replayable
from fusedckpt.reporting.timeline import (
    ModuleAllocation,
    Moment,
    RunningModules,
    TimelineReading,
    read_timeline,
)
from fusedckpt.reporting.trial import trial
from fusedckpt.reporting.wrappers import bucket_bytes, inside_of, stand_ins, without_root
from fusedckpt.state.rng import RandomStates, everywhere


@dataclass(frozen=True)
class MemoryReport:
    """The result of `report` and of `estimate`. Sizes are bytes of distinct storages.

    Modules have their names in `named_modules`; "(model)" is the model's own code, "(loss)" the
    loss, "(optimizer)" the optimizer's step.
    """

    # the class of the model
    model: str
    # the device of the first parameter
    device: str
    # bytes of all parameters, those that only the optimizer has, too
    parameter_bytes: int
    # bytes of all buffers
    buffer_bytes: int
    # bytes of the tensors that the model gets
    input_bytes: int
    # bytes of the optimizer's state, None without an optimizer
    optimizer_bytes: int | None
    # bytes of the gradients that the step leaves
    gradient_bytes: int
    # bytes of parameters, buffers, inputs and optimizer that live on `device` when the step begins
    resident_bytes: int
    # the storages that autograd saves for backward, with the names of the modules that saved them
    saved: tuple[SavedStorage, ...]
    # the live bytes after every allocation and free; the first maximum is the peak
    timeline: tuple[Moment, ...]
    # of every module that `fuse` swapped, whether it ran fused, or why not, and the cost of that
    fused: tuple[FusedModule, ...] = ()
    # by module, the bytes that outlive its forward outside saved tensors, the largest first:
    # attributes of autograd functions, random states of checkpoints, caches
    held: Mapping[str, int] = field(default_factory=dict, hash=False)
    # the attributes of modules in which the recompute of a checkpoint leaves a tensor with its
    # graph, which both live on after backward: detach such a tensor, or set it where
    # `is_recomputing` is false
    left_graphs: tuple[str, ...] = ()
    # of checkpoints with offload=True: the bytes that went to the host
    offloaded_bytes: int = 0
    # by reason, the number of inputs that stayed on the device all the same
    not_offloaded: Mapping[str, int] = field(default_factory=dict, hash=False)
    # bytes that the step would save with `fuse(model, recompute_elementwise=True)` beside the
    # modules that are fused now; None if the model has recipes, is sharded or compiled, or if that
    # forward raised
    saved_bytes_with_recipes: int | None = None
    # the tensors that functions of a model fused with recipes made, by these functions: those that
    # backward makes again, and those where a sequence was cut
    recipes: tuple[RecipeGroup, ...] = ()
    # whether the model was in training mode
    is_training: bool = True
    # whether nothing was allocated: then the peak is a lower bound, see `estimate`
    is_estimate: bool = False

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saves for the backward pass."""
        return sum(storage.nbytes for storage in self.saved)

    @property
    def saved_by_module(self) -> dict[str, int]:
        """Saved bytes by the module that saved them first, the largest first."""
        counts: Counter[str] = Counter()
        for storage in self.saved:
            counts[storage.owner] += storage.nbytes
        return dict(counts.most_common())

    @property
    def peak(self) -> Moment:
        """The moment of the peak: its `live_bytes`, `time_ns`, `phase` and `module`."""
        return max(self.timeline, key=lambda moment: moment.live_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at once, including those from before the step."""
        return self.peak.live_bytes

    @property
    def live_by_kind(self) -> dict[str, list[int]]:
        """Live bytes at every moment by kind, constant kinds first; they add up to the total."""
        optimizer = self.optimizer_bytes or 0
        resident = max(0, self.resident_bytes - optimizer)
        kinds = {
            "parameters": [min(resident, moment.live_bytes) for moment in self.timeline],
            "optimizer": [optimizer + moment.optimizer_bytes for moment in self.timeline],
            "gradients": [moment.gradient_bytes for moment in self.timeline],
        }
        if self.optimizer_bytes is None:
            del kinds["optimizer"]
        sums = map(sum, zip(*kinds.values(), strict=True))
        moments = zip(self.timeline, sums, strict=True)
        activations = [max(0, moment.live_bytes - nbytes) for moment, nbytes in moments]
        return {**kinds, "activations": activations}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dicts; the timeline by column."""
        peak = self.peak
        columns = zip(Moment._fields, zip(*self.timeline, strict=True), strict=True)
        return asdict(self) | {
            "timeline": {name: list(column) for name, column in columns},
            "saved": [asdict(storage) for storage in self.saved],
            "saved_bytes": self.saved_bytes,
            "saved_bytes_by_module": self.saved_by_module,
            "peak_bytes": peak.live_bytes,
            "peak_time_ns": peak.time_ns,
            "peak_phase": peak.phase,
            "peak_module": peak.module,
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return `to_dict()` as JSON, and write it to `path` if given."""
        document = json.dumps(self.to_dict())
        if path is not None:
            Path(path).write_text(document + "\n", encoding="utf-8")
        return document

    @property
    def sizes(self) -> dict[str, int | None]:
        """Bytes by kind; the optimizer's are None without one."""
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            "buffers": self.buffer_bytes,
            "inputs": self.input_bytes,
            "saved for backward": self.saved_bytes,
        }

    def __str__(self) -> str:
        return text_of_report(self)

    def plot(self, path: str | Path) -> None:
        """Draw the saved bytes by module, and the timeline with its peak.

        The file's suffix sets the format. Needs matplotlib: `pip install fusedckpt[bench]`.
        """
        draw_memory(self, path)


def report(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Run one training step and return where its memory goes.

        loss(model(*args, **kwargs)).backward(); optimizer.step()

    Afterwards model, optimizer and RNG states are restored. Gradients start as None. If the first
    step creates optimizer state, a second step is reported. Nothing is saved inside torch's
    checkpoints, so nothing is listed there; the recomputation shows in the timeline. Compiled code
    counts as one module; call it once before, so that the step does not compile. Models that call
    torch.func.grad and the like cannot be reported, as torch does not allow hooks on saved tensors
    there. For a DistributedDataParallel the report is of the module inside, with the bytes of the
    buckets in addition to the gradients. No rank waits for another.

    Sizes are requested bytes; blocks of CUDA's caching allocator are larger. With several devices,
    `timeline` and `resident_bytes` are those of the first parameter's device.

    Args:
        model: any module. Its name is "(model)"; modules in it have their names in `named_modules`.
        args, kwargs: the model's arguments: tensors in any nesting of lists, tuples and dicts.
        loss: maps the model's output to a scalar. None means the output's `.loss`, or, without one,
            the sum of mean squares, in float32, of all floating-point outputs that require grad.
        optimizer: if given, steps after the backward; of several, one after the other.

    Raises:
        TypeError: `model` is not an nn.Module, `loss` not callable, or `optimizer` no Optimizer.
        ValueError: an optimizer's step needs a closure, nothing requires grad, all inputs are
            empty, a parameter is not initialized, a tensor was made in inference mode, or the loss
            is not a scalar that requires grad.
        RuntimeError: the step wrote to a parameter that `optimizer` does not have.
    """
    model, parallel = inside_of(model)
    args, kwargs = replayable((args, kwargs))
    optimizers = optimizers_of("report", optimizer)
    check_step("report", model, loss, optimizers, inputs=(args, kwargs))
    learn_from(model, args, kwargs)
    parts = nn.ModuleList([model, loss]) if isinstance(loss, nn.Module) else model
    step = Step(model, args, kwargs, loss or default_loss, optimizers)
    if parallel is not None:
        step = step._replace(bytes_beside=bucket_bytes(parallel))
    with (
        trial(parts, optimizers, (args, kwargs), loss=loss),
        stand_ins(parallel) as replaced,
        without_root(model),
        torch.enable_grad(),
    ):
        step = step.with_stand_ins(replaced)
        return memory_of(step, ProfiledRun(step.model), str(step.device), tries_recipes=True)


class Run(Protocol):
    """How a step with measured memory runs."""

    # knows the module whose forward runs
    modules: RunningModules
    # whether it runs without memory
    is_estimate: bool

    def fresh(self, step: Step) -> tuple[Step, list[Tensor]]:
        """Return the step as it begins, and the tensors that exist then, see `Step.fresh`."""
        ...

    def resident(self, step: Step, held: list[Tensor]) -> int:
        """Return the bytes of these tensors on the model's device."""
        ...

    def take(self, take: Callable[[], None], step: Step, held: list[Tensor]) -> None:
        """Call `take`, which takes the step."""
        ...

    def apart(self) -> AbstractContextManager[Any]:
        """Return the context of a forward that is not part of the step."""
        ...

    def reading(self, gradients: Collection[int]) -> TimelineReading:
        """Return the timeline; gradients: the addresses of those that the step left."""
        ...


class ProfiledRun:
    """Runs a step under the profiler."""

    is_estimate = False

    def __init__(self, model: nn.Module):
        self.modules = RunningModules(model)

    def fresh(self, step: Step) -> tuple[Step, list[Tensor]]:
        """Return the step as it begins, and the tensors that exist then."""
        return step.fresh()

    def resident(self, step: Step, held: list[Tensor]) -> int:
        """Return the bytes of these tensors on the device of the first one."""
        return step.resident(held)

    def take(self, take: Callable[[], None], step: Step, held: list[Tensor]) -> None:
        """Take a step."""
        self._resident = step.resident(held)
        self._profile = profiled(take, held[0].device)

    def apart(self) -> AbstractContextManager[Any]:
        """Return no context."""
        return nullcontext()

    def reading(self, gradients: Collection[int]) -> TimelineReading:
        """Return the timeline."""
        return read_timeline(self._profile, self._resident, gradients)


def memory_of(step: Step, run: Run, device: str, *, tries_recipes: bool = False) -> MemoryReport:
    """Take a step, and return where its memory goes; if it made optimizer state, another step.

    tries_recipes: whether a forward with recipes runs behind it.
    """
    state_bytes = nbytes_of(step.state())
    states = RandomStates(everywhere())
    measured = _measured(step, run, device)
    # the optimizer made its state in that step
    if nbytes_of(step.state()) > state_bytes:
        states = RandomStates(everywhere())
        measured = _measured(step, run, device)
    if not tries_recipes:
        return measured
    return replace(measured, saved_bytes_with_recipes=_with_recipes(step, run, states))


def _measured(step: Step, run: Run, device: str) -> MemoryReport:
    """Take the step from the gradients that it begins with, and report it."""
    step, held = run.fresh(step)
    parameters = step.parameters()
    buffers = list(step.model.buffers())
    inputs = step.inputs()
    resident = run.resident(step, held)
    observed = _ObservedStep(step, held, run.modules)
    offload.num_bytes_left.clear()
    offload.stays.clear()
    run.take(observed.take, step, held)
    gradients = [x.grad for x in [*parameters, *inputs] if x.grad is not None]
    timeline = run.reading(addresses_of(gradients))
    unexplained = (x for x in timeline.held if x.address not in observed.explained)
    return MemoryReport(
        model=type(step.model).__name__,
        device=device,
        parameter_bytes=nbytes_of(parameters),
        buffer_bytes=nbytes_of(buffers),
        input_bytes=nbytes_of(inputs),
        optimizer_bytes=nbytes_of(step.state()) if step.optimizers else None,
        gradient_bytes=nbytes_of(gradients),
        resident_bytes=resident,
        saved=observed.saved.storages,
        timeline=tuple(timeline.moments),
        fused=observed.fused_calls.modules(observed.saved.storages),
        held=_bytes_by_module(unexplained),
        left_graphs=observed.left_graphs.names(),
        offloaded_bytes=offload.num_bytes_left.total(),
        not_offloaded=dict(offload.stays),
        recipes=observed.recipes,
        is_training=step.model.training,
        is_estimate=run.is_estimate,
    )


def _with_recipes(step: Step, run: Run, states: RandomStates) -> int | None:
    """Return the bytes that a forward saves with recipes, with the random numbers of the step."""
    step, held = run.fresh(step)
    try:
        with run.apart(), states.restored():
            return saved_with_recipes(step.model, step.args, step.kwargs, held, step.checked_loss)
    except Exception:  # arbitrary code of others, which ran without
        return None


class _ObservedStep:
    """A step, with observers around its forward, its backward, or both."""

    # the tensors that autograd saves in the forward
    saved: SavedTensors

    def __init__(self, step: Step, held: list[Tensor], running: RunningModules):
        self._step = step
        self._held = held
        self._running = running
        self.fused_calls = FusedCalls(step.model)
        self.left_graphs = LeftGraphs(step.model)
        # the tensors that recipes make
        self.recipes: tuple[RecipeGroup, ...] = ()
        # the addresses of saved tensors, outputs and loss when the forward is done
        self.explained: set[int] = set()

    def take(self) -> None:
        """Take the step."""
        # in backward too: a recompute calls modules
        with self._running.hooked():
            self._step.take(
                self._running.phase,
                self._held,
                forward_context=self._forward(),
                see_results=self._see_results,
            )

    @contextmanager
    def _forward(self) -> Iterator[None]:
        # outermost, and not in backward: tensors of a recompute were not saved since the forward
        saving = saved_tensors(self._held, self._running.current)
        with saving as self.saved, self.fused_calls.hooked(), choices() as recipe_choices:
            yield
        self.recipes = recipe_groups.grouped_recipes(recipe_choices)

    def _see_results(self, tensors: list[Tensor]) -> None:
        # other memory that lives on from the forward is held by other means
        self.explained = self.saved.addresses | addresses_of(tensors)
        self.left_graphs.begin()


def _bytes_by_module(allocations: Iterable[ModuleAllocation]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for allocation in allocations:
        counts[allocation.module] += allocation.nbytes
    return dict(counts.most_common())
