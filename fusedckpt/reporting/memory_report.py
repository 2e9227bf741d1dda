"""Where the memory of one training step goes: bytes saved for backward per module, and the peak."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.allocations import profiled
from fusedckpt.autograd.tracker import choices
from fusedckpt.checkpointing import offload
from fusedckpt.fusing.fused_calls import FusedCalls, FusedModule
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
from fusedckpt.reporting.recipe_groups import RecipeGroup
from fusedckpt.reporting.step import Step, default_loss, optimizers_of
from fusedckpt.reporting.tables import Row, size, table
from fusedckpt.reporting.timeline import HeldBlock, Moment, Watch, read
from fusedckpt.reporting.trial import tensors_of, trial

# modules shown; the rest is summed
_MOST = 24
_MODULES = ("module", "saved", "share", "storages", "largest", "shared with")
_FUSED = ("fused modules", "ran", "modules", "saves more, up to", "first")


@dataclass(frozen=True)
class MemoryReport:
    """The result of `report`. Sizes are bytes of distinct storages.

    `saved` has the storages that autograd saves for the backward pass, with the names of the
    modules that saved them: "(model)" is the model's own code, "(loss)" the loss. `held` has the
    bytes that outlive a module's forward outside saved tensors, the largest first: attributes of
    autograd functions, RNG states of checkpoints, caches. `timeline` has the live bytes after every
    allocation and free; its first maximum is the peak. `fused` says of every module that `fuse`
    swapped whether it ran fused, or why not, and the cost of that. `left_graphs` has the names of
    attributes of modules in which the recompute of a checkpoint leaves a tensor with its graph:
    both live on after backward. Detach such tensors, or set them where `is_recomputing` is false.
    `recipes` has the tensors that functions of a model fused with recipes made, by these functions:
    those that backward makes again, and those where a chain was cut.
    """

    model: str
    device: str
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    # None without an optimizer
    optimizer_bytes: int | None
    gradient_bytes: int
    # bytes of parameters, buffers, inputs and optimizer that live on `device` when the step begins
    resident_bytes: int
    saved: tuple[SavedStorage, ...]
    timeline: tuple[Moment, ...]
    fused: tuple[FusedModule, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict, hash=False)
    left_graphs: tuple[str, ...] = ()
    # of checkpoints with offload=True: bytes that went to the host, and inputs that stay, by reason
    offloaded_bytes: int = 0
    not_offloaded: Mapping[str, int] = field(default_factory=dict, hash=False)
    recipes: tuple[RecipeGroup, ...] = ()

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
        there = self.optimizer_bytes or 0
        base = max(0, self.resident_bytes - there)
        kinds = {
            "parameters": [min(base, moment.live_bytes) for moment in self.timeline],
            "optimizer": [there + moment.optimizer_bytes for moment in self.timeline],
            "gradients": [moment.gradient_bytes for moment in self.timeline],
        }
        if self.optimizer_bytes is None:
            del kinds["optimizer"]
        named = map(sum, zip(*kinds.values(), strict=True))
        rest = [max(0, m.live_bytes - own) for m, own in zip(self.timeline, named, strict=True)]
        return {**kinds, "activations": rest}

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
        found = json.dumps(self.to_dict())
        if path is not None:
            Path(path).write_text(found + "\n", encoding="utf-8")
        return found

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
        lines = [f"Memory of one training step of {self.model} on {self.device}"]
        lines += [_line(kind, n) for kind, n in self.sizes.items() if n is not None]
        if where := _held_by(self.held):
            lines.append(_line("held otherwise", sum(self.held.values()), where))
        if self.offloaded_bytes or self.not_offloaded:
            told = [f"{count} inputs stay: {why}" for why, count in self.not_offloaded.items()]
            lines.append(_line("offloaded", self.offloaded_bytes, "; ".join(told)))
        peak = self.peak
        lines.append(_line("peak", peak.live_bytes, f"in {peak.phase}, in {peak.module}"))
        if self.left_graphs:
            lines.append(f"  {'graphs left in':20}{_listed(self.left_graphs)}, by a recompute")
        lines += ["", table(_MODULES, _module_rows(self.saved), numbers=(1, 2, 3))]
        if self.fused:
            lines += ["", table(_FUSED, _fused_rows(self.fused), numbers=(2, 3))]
        if self.recipes:
            lines += [
                "",
                table(recipe_groups.HEADS, recipe_groups.report_rows_of(self.recipes), (1, 2)),
            ]
        return "\n".join(lines)

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
    there.

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
        ValueError: an optimizer's step needs a closure, nothing requires grad, a parameter is not
            initialised, a tensor was made in inference mode, or the loss is not a scalar that
            requires grad.
        RuntimeError: the step wrote to a parameter that `optimizer` does not have.
    """
    optimizers = optimizers_of("report", optimizer)
    check_step("report", model, loss, optimizers, inputs=(args, kwargs))
    parts = nn.ModuleList([model, loss]) if isinstance(loss, nn.Module) else model
    step = Step(model, args, kwargs, loss or default_loss, optimizers=optimizers)
    with trial(parts, optimizers, (args, kwargs)), torch.enable_grad():
        before = nbytes_of(step.state())
        found = measure(step)
        if nbytes_of(step.state()) > before:
            found = measure(step)
    return found


def check_step(
    name: str, model: Any, loss: Any, optimizers: Sequence[Optimizer], inputs: Any
) -> None:
    """Refuse arguments that make no training step; `name` is the public function's."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be an nn.Module, got {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"{name}: loss must be callable or None, got {type(loss).__name__}")
    for key, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name}: {key} is not initialised: call the model once before")
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(inputs)]
    if any(tensor.is_inference() for tensor in tensors):
        raise ValueError(f"{name}: expected ordinary tensors, some were made in inference mode")
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(f"{name}: expected tensors with data, some are on the meta device")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if groups and not {id(x) for group in groups for x in group["params"]} & {*map(id, tensors)}:
        raise ValueError(f"{name}: the optimizer has no parameter of the {type(model).__name__}")
    if not any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"{name}: expected a parameter or an input that requires grad, none of the "
            f"{type(model).__name__}'s does"
        )


def measure(step: Step) -> MemoryReport:
    """Take the step from the gradients that it begins with."""
    step, held = step.fresh()
    parameters, buffers = step.parameters(), list(step.model.buffers())
    inputs = step.inputs()
    device = held[0].device
    resident = step.resident(held)
    watch, calls, left = Watch(step.model), FusedCalls(step.model), LeftGraphs(step.model)
    counted: list[tuple[SavedTensors, tuple[RecipeGroup, ...]]] = []
    offload.num_bytes_left.clear()
    offload.stays.clear()
    profile = profiled(lambda: counted.append(_taken(step, held, watch, calls, left)), device)
    ((saved, recipes),) = counted
    gradients = [x.grad for x in [*parameters, *inputs] if x.grad is not None]
    found = read(profile, resident, addresses_of(gradients))
    return MemoryReport(
        model=type(step.model).__name__,
        device=str(device),
        parameter_bytes=nbytes_of(parameters),
        buffer_bytes=nbytes_of(buffers),
        input_bytes=nbytes_of(inputs),
        optimizer_bytes=nbytes_of(step.state()) if step.optimizers else None,
        gradient_bytes=nbytes_of(gradients),
        resident_bytes=resident,
        saved=saved.storages,
        timeline=tuple(found.moments),
        fused=calls.modules(saved.storages),
        held=_by_module(block for block in found.held if block.address not in saved.known),
        left_graphs=left.names(),
        offloaded_bytes=offload.num_bytes_left.total(),
        not_offloaded=dict(offload.stays),
        recipes=recipes,
    )


def _taken(
    step: Step, held: list[Tensor], watch: Watch, calls: FusedCalls, left: LeftGraphs
) -> tuple[SavedTensors, tuple[RecipeGroup, ...]]:
    """Take a step, and return the tensors that its forward saved, and those that recipes make."""
    found: list[SavedTensors] = []
    recipes: tuple[RecipeGroup, ...] = ()

    @contextmanager
    def counted() -> Iterator[None]:
        # outermost, and not in backward: tensors of a recompute were not kept since the forward
        nonlocal recipes
        with saved_tensors(held, watch.current) as saved, calls.hooked(), choices() as noted:
            found.append(saved)
            yield
        recipes = recipe_groups.grouped_recipes(noted)

    def made(tensors: list[Tensor]) -> None:
        # beside these, memory that lives on from the forward was kept by other means
        found[0].known = found[0].addresses | addresses_of(tensors)
        left.begin()

    # in backward too: a recompute calls modules
    with watch.hooked():
        step.take(watch.phase, held, counted(), made)
    return found[0], recipes


def _by_module(blocks: Iterable[HeldBlock]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for block in blocks:
        counts[block.module] += block.nbytes
    return dict(counts.most_common())


def _held_by(held: Mapping[str, int]) -> str | None:
    """Write the bytes of a forward that live on outside saved tensors, by module, largest first."""
    rest = f", and {len(held) - 2} more" if len(held) > 2 else ""
    names = [f"{size(nbytes)} in {name}" for name, nbytes in held.items()][:2]
    return f"outside saved tensors: {', '.join(names)}{rest}" if names else None


def _listed(names: Sequence[str]) -> str:
    """Write the first two of some names, and how many more there are."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _line(kind: str, nbytes: int, where: str = "") -> str:
    return f"  {kind:20}{size(nbytes):>12}  {where}".rstrip()


def _module_rows(saved: Sequence[SavedStorage]) -> list[Row]:
    """Return a row of `_MODULES` for every module that saves something, the largest first."""
    owned: dict[str, list[SavedStorage]] = {}
    for storage in saved:
        owned.setdefault(storage.owner, []).append(storage)
    total = max(_nbytes(saved), 1)

    def row(name: str, storages: Sequence[SavedStorage], *details: str) -> Row:
        nbytes = _nbytes(storages)
        return (name, size(nbytes), f"{nbytes / total:.1%}", str(len(storages)), *details)

    rows = []
    names = sorted(owned, key=lambda name: -_nbytes(owned[name]))
    for name in names[:_MOST]:
        largest = max(owned[name], key=lambda storage: storage.nbytes)
        sharers = list(dict.fromkeys(other for s in owned[name] for other in s.sharers))
        shared = ", ".join(sharers[:2]) + (f" +{len(sharers) - 2}" if len(sharers) > 2 else "")
        rows.append(row(name, owned[name], f"{largest.dtype} {list(largest.shape)}", shared))
    if rest := names[_MOST:]:
        storages = [storage for name in rest for storage in owned[name]]
        rows.append(row(f"{len(rest)} more", storages, "", ""))
    return rows


def _nbytes(storages: Sequence[SavedStorage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _fused_rows(fused: Sequence[FusedModule]) -> list[Row]:
    """Return a row of `_FUSED` for all fused modules that ran alike, the most costly first."""
    groups: dict[tuple[str, str], list[FusedModule]] = {}
    for module in fused:
        ran = module.reason or ("fused" if module.calls else "not called, or in compiled code")
        groups.setdefault((module.change, ran), []).append(module)
    rows = []
    for (change, ran), modules in groups.items():
        known = [module.extra_bytes for module in modules if module.extra_bytes is not None]
        unknown = modules[0].reason is not None and not known
        cost = "?" if unknown else size(sum(known)) if sum(known) else ""
        row = (change, ran, str(len(modules)), cost, modules[0].name or "(model)")
        rows.append((sum(known), row))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
