"""Real training steps on someone's model that leave no trace.

Measuring needs real steps: only they show the tensors that autograd keeps, the use of the
allocator and the time. Their changes are put back, so that a model measured in the middle of its
training goes on as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedckpt.autograd.private import fsdp_parameters, unsharded_of, updates_early
from fusedckpt.checkpointing.written_buffers import is_state
from fusedckpt.checkpointing.written_tensors import digest_of, has_digest, written_parameters
from fusedckpt.fusing.first_step import on_trial
from fusedckpt.memory import strided
from fusedckpt.state import rng
from fusedckpt.state.holders import (
    ATOMS,
    CONTAINERS,
    nested,
    parts_of,
    put_back,
    restorer,
    with_tensors,
)
from fusedckpt.state.tensors import put_memory_back, tensor_restorer
from fusedckpt.state.variables import noted_variables


@contextmanager
def trial(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    inputs: Any = (),
    budget: int = 0,
    loss: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Put back, on leaving or at an exception, everything that training steps inside change.

        with trial(model, optimizer, (args, kwargs)):
            args, kwargs = aliased((args, kwargs))
            loss(model(*args, **kwargs)).backward()
            optimizer.step()

    Inside, every `.grad` is None, as after `zero_grad()`. Put back are: every `.grad`, the same
    object as before, and gradients that FSDP2 has not reduced yet; buffers, the optimizer's state,
    options and parameters, and the tensors in `inputs`, from copies on their device where these
    fit, in pinned host memory otherwise; attributes of modules, such as `training`, with the
    containers, tensors, arrays and random number generators among them, and of the optimizer;
    variables that the code of modules, their hooks and the loss name: those that it assigns,
    containers, plain objects, generators and tensors without gradients; the random state of
    Python, NumPy, the CPU and all CUDA devices. A tensor that did not change is not
    written to. Parameters that `optimizer` does not have are not copied, but for those that code of
    modules may write, and those with hooks that run when their gradients are complete, such as an
    optimizer's in backward.

    Items of containers, and attributes of objects among `inputs`, are read and written past the
    methods of their own classes, and written only where they changed. Containers with more than
    1,024 entries outside of modules are not looked into, nor are objects of libraries, and tensors
    of more than 256 MiB are not copied there.

    Args:
        model: any module, lazy ones after their first forward.
        optimizer: the one that steps inside, several, or None.
        inputs: the arguments of the model: tensors in any nesting of containers and objects.
        budget: bytes that the steps inside may have in use on a device at once, 0 for unknown.
        loss: the function that the steps call, or None.

    Raises:
        RuntimeError: on leaving, a parameter that `optimizer` does not have was written to: it
            keeps its new value, all else is put back. Replacing its `.data` is put back.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*(optimizer or ())]
    groups = [group for each in optimizers for group in each.param_groups]
    trained = [parameter for group in groups for parameter in group["params"]]
    leaves = [tensor for tensor in tensors_of(inputs) if isinstance(tensor, nn.Parameter)]
    parameters = [*model.parameters(), *trained, *leaves]
    with torch.inference_mode(False), on_trial(), ExitStack() as undo:
        watched: list[tuple[str, nn.Parameter, int, Tensor | None]] = []
        # undone in reverse: this raises once all else is put back
        undo.callback(_check_unwritten, watched)
        undo.callback(rng.RandomStates(rng.everywhere()).restore)
        for parameter in dict.fromkeys(parameters):
            undo.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        _set_unreduced_aside(model, undo)
        backup = _Backup(undo, budget)
        for each in optimizers:
            backup.add(each)
        backup.add(inputs)
        backup.add_modules(model)
        backup.add_variables(model, loss)
        for parameter in written_parameters(model):
            backup.add(parameter)
        for name, parameter in model.named_parameters():
            undo.callback(put_memory_back, parameter, parameter.detach())
            if updates_early(parameter):
                # by an optimizer of other code, which may write without a version
                backup.add(parameter)
            if not backup.has(parameter):
                watched.append((name, parameter, parameter._version, digest_of(parameter)))
        yield


def aliased(tree: Any) -> Any:
    """Return `tree` with new containers, and tensors that share memory with its own.

    A step on it reaches neither the graph a tensor came from nor its `.grad`, and cannot add to or
    take from the caller's containers. Objects with tensors or containers among their attributes,
    such as dataclasses, are copied as well. Parameters are not copied, and a tensor that occurs
    twice is copied once.
    """
    return with_tensors(tree, _alias)


def _alias(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in any nesting of containers and objects that are data, each once."""
    yield from (value for value in nested(tree) if isinstance(value, Tensor))


def _set_unreduced_aside(model: nn.Module, undo: ExitStack) -> None:
    """Set aside gradients that `set_requires_gradient_sync(False)` leaves outside parameters."""
    before = {(id(place), name): getattr(place, name) for place, name in _unreduced(model)}

    def put_back() -> None:
        for place, name in _unreduced(model):
            setattr(place, name, before.get((id(place), name)))

    undo.callback(put_back)
    for place, name in _unreduced(model):
        setattr(place, name, None)


def _unreduced(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the objects and attributes in which FSDP2 has gradients of whole parameters.

    They are private: no public name leads to them.
    """
    for module in model.modules():
        for sharded in fsdp_parameters(module):
            # of another dtype than parameters; torch 2.15 has them as `.grad` too
            if "unsharded_accumulated_grad" in vars(sharded):
                yield sharded, "unsharded_accumulated_grad"
            # made when it is first gathered
            if (whole := unsharded_of(sharded)) is not None:
                yield whole, "grad"


class _Backup:
    """Copies of the state that training steps may change; `undo` puts it back."""

    def __init__(self, undo: ExitStack, budget: int):
        self._undo = undo
        self._copies = Copies(budget)
        # the ids of objects that are copied, or were looked into
        self._seen = set[int]()

    def has(self, value: Any) -> bool:
        """Whether an object is copied."""
        return id(value) in self._seen

    def add_modules(self, model: nn.Module) -> None:
        """Copy buffers and attributes of a model's modules."""
        for module in model.modules():
            attributes = vars(module)
            self._undo.callback(put_back, attributes, dict(attributes))
            for buffer in module.buffers(recurse=False):
                self.add(buffer)
            # parameters are watched, or copied with the optimizer
            for slot in ("_buffers", "_parameters"):
                if isinstance(attributes.get(slot), dict):
                    self._undo.callback(put_back, attributes[slot], dict(attributes[slot]))
            for name, value in attributes.items():
                if name not in ("_buffers", "_parameters", "_modules"):
                    self.add(value, is_attribute=True)

    def add_variables(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        """Note the variables that code of modules, their functions or the loss may write."""
        noted = noted_variables(model, loss, objects=True)
        self._undo.callback(noted.state.put_back)
        for tensor in noted.tensors:
            self.add(tensor, is_attribute=True)
        for parameter in noted.parameters:
            self.add(parameter)

    def add(self, value: Any, is_attribute: bool = False) -> None:
        """Copy tensors, arrays and states of generators in `value`, and items of its containers."""
        if type(value) in ATOMS:
            return
        if isinstance(value, Optimizer):
            # one that wraps another has it as an attribute
            value = vars(value)
        if isinstance(value, Tensor) and is_attribute and not is_state(value):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if (generator := rng.of_object(value)) is not None:
            self._undo.callback(rng.RandomStates([generator]).restore)
        if isinstance(value, Tensor):
            # one on the meta device has no values
            for part in () if value.is_meta else strided(value):
                self._undo.callback(tensor_restorer(part, self._copies.copy))
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            self._undo.callback(np.copyto, value, value.copy())
        elif not is_attribute or isinstance(value, CONTAINERS):
            self._undo.callback(restorer(value))
            for part in parts_of(value):
                self.add(part, is_attribute)


class Copies:
    """Copies of tensors: on their device where there is room beside the steps, else on the host.

    The state of Adam for 7B parameters is 56 GB: pageable host memory would be slow both ways.
    """

    def __init__(self, budget: int = 0):
        self._budget = budget
        # by device the bytes that copies may still take
        self._room: dict[torch.device, int] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor."""
        device = tensor.device
        if device.type == "cpu":
            return tensor.to("cpu", copy=True)
        if device not in self._room:
            self._room[device] = room_of(device, self._budget)
        if tensor.nbytes <= self._room[device]:
            self._room[device] -= tensor.nbytes
            return tensor.to(device, copy=True)
        return pinned_copy(tensor)


def room_of(device: torch.device, budget: int) -> int:
    """Return the bytes that copies may take on a device beside steps; budget: see `trial`."""
    if device.type != "cuda":
        return 0
    in_use = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - in_use
    free = int(0.8 * (torch.cuda.mem_get_info(device)[0] + unused))
    # a step of unknown size gets most of it
    return max(0, free - max(0, budget - in_use)) if budget else free // 4


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy in pinned host memory, in pageable memory where there is not enough of it."""
    try:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:
        return tensor.to("cpu", copy=True)
    return copy.copy_(tensor, non_blocking=True)


def _check_unwritten(watched: list[tuple[str, nn.Parameter, int, Tensor | None]]) -> None:
    written = []
    for name, parameter, version, digest in watched:
        if parameter._version != version or not has_digest(parameter, digest):
            written.append(name)
    if written:
        raise RuntimeError(
            f"fusedckpt: the step changed {', '.join(written)}, which no optimizer= has, and their "
            "former values are lost: load them again, and pass all optimizers as optimizer="
        )
