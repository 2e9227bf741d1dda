"""`estimate`: the report of a training step that is taken on tensors without memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.autograd import private, private_memory
from fusedckpt.autograd.private import is_fsdp_module, local_of, storage_key
from fusedckpt.memory import nbytes_of
from fusedckpt.reporting.memory_report import MemoryReport, memory_of
from fusedckpt.reporting.step import Step, check_step, default_loss, optimizers_of, replayable
from fusedckpt.reporting.timeline import RunningModules, TimelineReading
from fusedckpt.reporting.trial import trial
from fusedckpt.reporting.without_memory import (
    META,
    MetaModules,
    MetaRun,
    may_have_value,
    on_meta,
)
from fusedckpt.reporting.wrappers import bucket_bytes, inside_of, replaced
from fusedckpt.state.holders import contents_of, put_back, with_tensors

_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# elements of the largest buffer with values that a step may read
_MOST_OF_BUFFER = 2**16


def estimate(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Return the record of `report` for a training step, without allocating its memory.

        with torch.device("meta"):
            model = Llama(config)
            tokens = torch.zeros(8, 4096, dtype=torch.long)
        print(fusedckpt.estimate(model, tokens, optimizer=torch.optim.AdamW(model.parameters())))

    The step runs on the meta device, where tensors have shapes and no memory: parameters, buffers
    and the optimizer's state of a model that has memory are replaced by such tensors meanwhile.
    Bytes of parameters, gradients, optimizer state, buffers, inputs and saved tensors are those of
    the step on the model's device. The peak is a lower bound: memory that an op allocates and frees
    itself is not seen, nor are the allocator's cache and the CUDA context; times are not known, and
    a moment of `timeline` has the number of ops so far in place of a time. Attention saves the
    tensors of torch's fused kernel, other functions those of a CPU.

    Integers, booleans and single numbers have values, so that code may read masks and lengths.
    Modules that wait for their first training call (`fuse`) count as they are. All devices count as
    one.

    Args:
        model: any module, on the meta device or on another.
        args, kwargs, loss, optimizer: as in `report`; tensors on the meta device or on another.

    Raises:
        TypeError, ValueError: as `report` does.
        ValueError: the forward reads values of numbers, or an op has no shapes without them;
            autocast is enabled, which does nothing on the meta device; the model is sharded or
            compiled, or a parameter has hooks that run when its gradient is complete.
    """
    model, parallel = inside_of(model)
    args, kwargs = replayable((args, kwargs))
    optimizers = optimizers_of("estimate", optimizer)
    check_step("estimate", model, loss, optimizers, (args, kwargs), needs_data=False)
    _check_plain(model)
    run = MetaRun()
    step = Step(model, args, kwargs, loss or default_loss, optimizers, caller="estimate")
    if parallel is not None:
        step = step._replace(bytes_beside=bucket_bytes(parallel))
    return estimated(step, run, tries_recipes=True)


def estimated(
    step: Step,
    run: MetaRun,
    device: torch.device | None = None,
    *,
    tries_recipes: bool = False,
) -> MemoryReport:
    """Take a step on meta tensors, and report it, and perhaps a forward with recipes behind it.

    run: has the values of those that exist. device: that of the model, unless it is on meta.
    """
    device = device or step.device
    loss = step.loss
    parts = nn.ModuleList([step.model, loss] if isinstance(loss, nn.Module) else [step.model])
    with (
        moved_to_meta(parts, step.optimizers, run) as copies,
        private_memory.optimizers_of_a(device),
        private_memory.without_autocast(_refuse_autocast),
        torch.enable_grad(),
    ):
        args, kwargs = copies.tree((step.args, step.kwargs))
        step = step._replace(args=args, kwargs=kwargs)
        with trial(parts, step.optimizers, (args, kwargs), loss=loss):
            on_run = _RunOnMeta(step.model, run, device)
            return memory_of(step, on_run, str(device), tries_recipes=tries_recipes)


class _RunOnMeta:
    """Runs a step on meta tensors."""

    is_estimate = True

    def __init__(self, model: nn.Module, run: MetaRun, device: torch.device):
        self.modules: RunningModules = MetaModules(model, run)
        self._run = run
        # a GPU's optimizer has its number of steps on the CPU
        self._is_on_gpu = device.type not in ("cpu", "meta")

    def fresh(self, step: Step) -> tuple[Step, list[Tensor]]:
        """Return the step as it begins, and the tensors that exist then."""
        # aliases of inputs have their values
        with self._run:
            return step.fresh()

    def resident(self, step: Step, held: list[Tensor]) -> int:
        """Return the bytes of these tensors, of a GPU's step without those on a CPU."""
        return nbytes_of(self._on_device(held)) + step.bytes_beside

    def _on_device(self, held: list[Tensor]) -> list[Tensor]:
        return [x for x in held if x.is_meta] if self._is_on_gpu else held

    def take(self, take: Callable[[], None], step: Step, held: list[Tensor]) -> None:
        """Take a step; name the line that needs numbers."""
        self._run.begin(self._on_device(held), step.bytes_beside)
        try:
            with on_meta(self._run):
                take()
        except Exception as error:  # arbitrary user code
            if str(error).startswith("estimate: "):
                raise
            name = type(step.model).__name__
            raise ValueError(
                f"estimate: {name} cannot run without numbers, at {_line(error)}: "
                f"{str(error).rstrip('.')}. "
                "fusedckpt.report measures a step of a small batch where the model runs"
            ) from error

    def apart(self) -> AbstractContextManager[Any]:
        """Return the context of a forward that is not part of the step."""
        return on_meta(self._run)

    def reading(self, gradients: Collection[int]) -> TimelineReading:
        """Return the timeline."""
        return self._run.reading(gradients)


class MetaCopies:
    """Meta tensors in the place of others: those of one memory have one memory again."""

    def __init__(self, run: MetaRun):
        self._run = run
        # by id a tensor, which lives so that its id is its own, and the one in its place
        self._made: dict[int, tuple[Tensor, Any]] = {}
        # by key a storage, and the one in its place
        self._storages: dict[int, tuple[Any, torch.UntypedStorage]] = {}

    def tree(self, tree: Any) -> Any:
        """Return arguments of a model with meta tensors."""
        return with_tensors(tree, self._with_values)

    def _with_values(self, tensor: Tensor) -> Tensor:
        return self.of(tensor, most_values=2**24)

    def of(self, tensor: Tensor, most_values: int = 0) -> Any:
        """Return the meta tensor in the place of one.

        most_values: values of integers are known up to so many elements, on a CPU.
        """
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._made:
            made = self._copy(tensor)
            if most_values and may_have_value(tensor, most_values):
                self._run.set_value(made, tensor.detach().to("cpu", copy=True))
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]

    def _copy(self, tensor: Tensor) -> Any:
        data = tensor.detach()
        kind: Any = type(tensor)
        made: Any
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            names, context = flatten()
            inner = {name: self.of(getattr(tensor, name)) for name in names}
            made = kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        elif tensor.layout != torch.strided or data.is_nested:
            made = data.to(META)
        else:
            storage = self._storage_of(data.untyped_storage())
            made = torch.empty(0, dtype=data.dtype, device=META)
            made.set_(storage, data.storage_offset(), data.shape, data.stride())
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        if kind not in (Tensor, nn.Parameter):
            made.__class__ = kind
        attributes = getattr(tensor, "__dict__", None)
        if attributes:
            # such as the state by which a quantized weight dequantizes
            vars(made).update(with_tensors(dict(attributes), self.of))
        return made

    def _storage_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = storage_key(storage)
        if key not in self._storages:
            made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META)
            self._storages[key] = storage, made.untyped_storage()
        return self._storages[key][1]


@contextmanager
def moved_to_meta(
    parts: nn.Module, optimizers: Collection[Optimizer], run: MetaRun
) -> Iterator[MetaCopies]:
    """Replace the parameters and buffers of modules and the state of optimizers meanwhile."""
    copies = MetaCopies(run)
    with ExitStack() as undo:
        undo.enter_context(replaced(parts, copies.of))
        for module in parts.modules():
            buffers = module._buffers
            undo.callback(put_back, buffers, dict(buffers))
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = copies.of(buffer, most_values=_MOST_OF_BUFFER)
        for optimizer in optimizers:
            _move_optimizer(optimizer, copies, undo)
        yield copies


def _move_optimizer(optimizer: Optimizer, copies: MetaCopies, undo: ExitStack) -> None:
    """Replace the tensors of an optimizer, and of those that it wraps."""
    attributes = vars(optimizer)
    undo.callback(put_back, attributes, dict(attributes))
    for name, value in list(attributes.items()):
        if isinstance(value, Optimizer):
            _move_optimizer(value, copies, undo)
            continue
        moved = with_tensors(value, partial(copies.of, most_values=1))
        if name == "state":
            contents = contents_of(moved).items()
            keys = {k: copies.of(k) if isinstance(k, Tensor) else k for k, _ in contents}
            put_back(moved, {keys[k]: x for k, x in contents})
        attributes[name] = moved


def _check_plain(model: nn.Module) -> None:
    """Refuse models that do more in a step than their code does on one device."""
    for name, module in model.named_modules():
        if private.compiled_call(module) is not None or private.COMPILED_CHILD in module._modules:
            raise ValueError(
                f"estimate: {name or 'the model'} is compiled: estimate it before torch.compile, "
                "or measure a step with fusedckpt.report"
            )
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"estimate: {name or 'the model'} is an nn.{type(module).__name__}, which saves "
                "other tensors on each device: measure a step with fusedckpt.report"
            )
        if is_fsdp_module(module):
            raise ValueError(
                f"estimate: {name or 'the model'} is sharded: estimate it before sharding, or "
                "measure a step with fusedckpt.report"
            )
    for name, parameter in model.named_parameters():
        if local_of(parameter) is not parameter:
            raise ValueError(f"estimate: {name} is a DTensor: estimate the model before sharding")
        if private.updates_early(parameter):
            raise ValueError(
                f"estimate: {name} has hooks that run when its gradient is complete, which may "
                "step an optimizer: measure a step with fusedckpt.report"
            )
    if private_memory.is_autocast_enabled():
        _refuse_autocast()


def _refuse_autocast() -> None:
    raise ValueError(
        "estimate: autocast is enabled, and does nothing on the meta device: estimate the model "
        "in the dtype of its products (model.to(torch.bfloat16)), or measure a step with "
        "fusedckpt.report"
    )


def _line(error: BaseException) -> str:
    """Return the innermost line outside of torch and this library."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_FOLDERS)]
    frame = (outside or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
