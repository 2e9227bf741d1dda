"""One training step as `report` takes it: forward, loss, backward, optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from itertools import tee
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from fusedckpt.autograd import private
from fusedckpt.autograd.accumulation import gradient_dtype
from fusedckpt.autograd.private import pytree
from fusedckpt.memory import nbytes_of
from fusedckpt.reporting.trial import aliased, tensors_of


class Step(NamedTuple):
    """One training step: forward, loss, backward, and the optimizers' steps."""

    # any module
    model: nn.Module
    # the model's positional arguments
    args: tuple[Any, ...]
    # its keyword arguments
    kwargs: dict[str, Any]
    # maps the model's output to a scalar
    loss: Callable[[Any], Any]
    # these step after backward
    optimizers: tuple[Optimizer, ...] = ()
    # the gradients that exist when it begins, by parameter
    gradients: Mapping[Tensor, Tensor] = MappingProxyType({})
    # the parameters with a gradient of the step before, which lives until backward begins
    stale: tuple[Tensor, ...] = ()
    # bytes that live through it beside all tensors here, such as a reducer's buckets
    bytes_beside: int = 0
    # bytes of the output of the step before, which lives until the model returns the next one
    output_bytes: int = 0
    # bytes that the step before leaves beside, which live until this one's loss is computed
    kept_bytes: int = 0
    # whether the optimizers step after it
    is_last: bool = True
    # the public function that takes it
    caller: str = "report"
    # puts random states to those that each step begins with
    reseed: Callable[[], None] | None = None
    # by parameter that the optimizers have, the one that the model has in its place
    stand_ins: Mapping[Tensor, Tensor] = MappingProxyType({})

    def take(
        self,
        mark: Callable[[str], Any],
        held: list[Tensor],
        forward_context: AbstractContextManager[Any] | None = None,
        see_results: Callable[[list[Tensor]], Any] = len,
    ) -> None:
        """Run it as a training loop does, where output and loss live on until the next step.

        mark: is called with the name of each phase as that begins. forward_context: surrounds
        forward and loss. see_results: is called with the output's tensors and the loss.
        """
        mark("forward")
        with forward_context or nullcontext():
            options: Any = {"dtype": torch.uint8, "device": held[0].device}
            last_output = torch.empty(self.output_bytes, **options)
            kept = torch.empty(self.kept_bytes, **options)
            for parameter in self.stale:
                parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
            output = self.model(*self.args, **self.kwargs)
            del last_output
            loss = self.checked_loss(output)
            del kept
        see_results([*tensors_of([output]), loss])
        # as where autocast ends before backward
        torch.clear_autocast_cache()
        mark("backward")
        for parameter in self.stale:
            parameter.grad = None
        loss.backward()
        if self.optimizers and self.is_last:
            mark("optimizer")
            for parameter, stand_in in self.stand_ins.items():
                parameter.grad = stand_in.grad
            for optimizer in self.optimizers:
                check_sparse(self.caller, optimizer)
                optimizer.step()
        mark("end")

    def checked_loss(self, output: Any) -> Tensor:
        """Return the loss of the model's output; raise ValueError where none can be trained."""
        loss = self.loss(output)
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss
        if self.loss is default_loss and not isinstance(loss, Tensor):
            raise ValueError(
                f"{self.caller}: the output of {type(self.model).__name__}, "
                f"{_kind_of(output)}, has neither a loss nor floating-point tensors that require "
                "grad: pass loss=, a function of the output"
            )
        came = type(loss).__name__
        if isinstance(loss, Tensor):
            came = f"shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ValueError(
            f"{self.caller}: the loss must be a scalar tensor that requires grad, got {came}"
        )

    def fresh(self) -> tuple[Step, list[Tensor]]:
        """Return the step on aliases of its inputs, and the tensors that exist when it begins.

        The parameters then have the gradients of `gradients`, and no others.
        """
        if self.reseed is not None:
            self.reseed()
        # weights that autocast has cast already would not be seen to take memory
        torch.clear_autocast_cache()
        for parameter in (*self.stand_ins, *self.parameters()):
            parameter.grad = self.gradients.get(parameter)
        args, kwargs = aliased(_restarted((self.args, self.kwargs)))
        step = self._replace(args=args, kwargs=kwargs)
        buffers = list(self.model.buffers())
        held = [*self.parameters(), *buffers, *step.inputs(), *self.state()]
        return step, [*held, *self.gradients.values()]

    def with_stand_ins(self, made: Mapping[Any, Any]) -> Step:
        """Return the step of a model whose parameters were replaced; made: by old ones, new."""
        gradients = {made.get(x, x): gradient for x, gradient in self.gradients.items()}
        return self._replace(stand_ins=made, gradients=gradients)

    def make_state(self, trained: Collection[Tensor]) -> None:
        """Let the optimizers make their states.

        trained: the parameters of the model that get a gradient. Those of other models, such as a
        discriminator, get theirs in other steps.
        """
        untrained = {*self.model.parameters()} - {*trained}
        for optimizer in self.optimizers:
            if optimizer.state:
                continue
            for parameter in (x for group in optimizer.param_groups for x in group["params"]):
                leaf = self.stand_ins.get(parameter, parameter)
                gradient = self.gradients.get(leaf)
                if gradient is None and parameter.requires_grad and leaf not in untrained:
                    gradient = _empty_gradient(parameter, isinstance(optimizer, SparseAdam))
                parameter.grad = gradient
            check_sparse(self.caller, optimizer)
            optimizer.step()

    def resident(self, held: list[Tensor]) -> int:
        """Return the bytes of tensors on the first tensor's device, and `bytes_beside`."""
        device = held[0].device
        return nbytes_of(x for x in held if x.device == device) + self.bytes_beside

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, else of the first buffer or input."""
        tensors = [*self.parameters(), *self.model.buffers(), *self.inputs()]
        return tensors[0].device

    def inputs(self) -> list[Tensor]:
        """Return the tensors that the model gets."""
        return list(tensors_of((self.args, self.kwargs)))

    def parameters(self) -> list[Tensor]:
        """Return the model's parameters, then those that only the optimizers have."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        stepped = [self.stand_ins.get(x, x) for group in groups for x in group["params"]]
        return list(dict.fromkeys([*self.model.parameters(), *stepped]))

    def state(self) -> list[Tensor]:
        """Return the tensors that the optimizers have, but for parameters and gradients."""
        parameters = {id(x) for x in (*self.stand_ins, *self.parameters())}
        tensors = {id(x): x for x in _tensors_in(self.optimizers, set())}
        return [x for key, x in tensors.items() if key not in parameters]


def replayable(inputs: Any) -> Any:
    """Return a model's arguments with iterators that every step can read from their first item.

    The caller's iterators advance, by as many items as a step reads.
    """
    kept: dict[int, Any] = {}

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, Iterator):
            return leaf
        return kept.setdefault(id(leaf), tee(leaf, 1)[0])

    has_iterators = any(isinstance(leaf, Iterator) for leaf in pytree.tree_leaves(inputs))
    return pytree.tree_map(replaced, inputs) if has_iterators else inputs


_Tee: Any = type(tee(())[0])


def _restarted(inputs: Any) -> Any:
    """Return arguments with iterators that are at their first item."""
    started: dict[int, Any] = {}

    def restarted(leaf: Any) -> Any:
        if not isinstance(leaf, _Tee):
            return leaf
        return started.setdefault(id(leaf), map(aliased, copy(leaf)))

    has_iterators = any(isinstance(leaf, _Tee) for leaf in pytree.tree_leaves(inputs))
    return pytree.tree_map(restarted, inputs) if has_iterators else inputs


def _empty_gradient(parameter: Tensor, is_sparse: bool) -> Tensor:
    if not is_sparse:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    indices = parameter.new_empty((1, 0), dtype=torch.long)
    values = parameter.detach()[:0]
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in an optimizer: in its state, groups and attributes, or one it wraps."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Optimizer):
            value = vars(value)
        if isinstance(value, Mapping):
            value = list(value.values())
        for item in value if isinstance(value, (list, tuple)) else ():
            yield from _tensors_in(item, seen)


def optimizers_of(caller: str, optimizer: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers of a caller's argument: none, one, or several.

    Raises:
        TypeError: it is another object.
        ValueError: an optimizer's step needs a closure, which runs the model several times.
    """
    if optimizer is None:
        return ()
    is_list = isinstance(optimizer, Iterable) and not isinstance(optimizer, (str, Mapping))
    optimizers: tuple[Any, ...] = tuple(optimizer) if is_list else (optimizer,)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"{caller}: optimizer must be a torch.optim.Optimizer, a list of these, or None, "
                f"got {type(each).__name__}"
            )
        closure = inspect.signature(each.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{caller}: expected an optimizer whose step() needs no closure, got "
                f"{type(each).__name__}, which runs the model several times a step: pass "
                "optimizer=None, and count its state yourself"
            )
    return optimizers


def check_step(
    name: str,
    model: Any,
    loss: Any,
    optimizers: Sequence[Optimizer],
    inputs: Any,
    needs_data: bool = True,
) -> None:
    """Refuse arguments that make no training step; `name` is the public function's.

    needs_data: whether the step cannot be taken on tensors without memory.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be an nn.Module, got {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"{name}: loss must be callable or None, got {type(loss).__name__}")
    for key, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name}: {key} is not initialized: call the model once before")
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(inputs)]
    if any(tensor.is_inference() for tensor in tensors):
        raise ValueError(
            f"{name}: some tensors of the model or its inputs were made under "
            "torch.inference_mode(): make them outside of it"
        )
    if needs_data and any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            f"{name}: some tensors are on the meta device, and have no data: call "
            "fusedckpt.estimate, or move the model and its inputs to another device"
        )
    batch = [*tensors_of(inputs)]
    if batch and not any(tensor.numel() for tensor in batch):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in batch[:3])
        raise ValueError(f"{name}: expected a batch to measure, got empty tensors of {shapes}")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if groups and not {id(x) for group in groups for x in group["params"]} & {*map(id, tensors)}:
        raise ValueError(
            f"{name}: optimizer= has no parameter of the {type(model).__name__}: make it of "
            "model.parameters()"
        )
    _check_hooks(name, model, optimizers)
    if not any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"{name}: no parameter or input of the {type(model).__name__} requires grad: call "
            "requires_grad_() on those that are trained"
        )


def _check_hooks(name: str, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that step in hooks of parameters, unless the caller passes them.

    A step would change parameters that have no copy.
    """
    # by id of a hook, the optimizers that it has
    known: dict[int, list[Optimizer]] = {}
    for key, parameter in model.named_parameters():
        stepping = private.optimizers_in_backward(parameter)
        for hook in private.hooks_after_accumulation(parameter):
            if id(hook) not in known:
                known[id(hook)] = [*_optimizers_in(hook, 3)]
            stepping += known[id(hook)]
        mine = [x for x in stepping if any(parameter is p for p in _parameters_of(x))]
        if any(x not in optimizers for x in mine):
            raise ValueError(
                f"{name}: a hook of {key} steps an optimizer in backward, "
                f"{type(mine[0]).__name__}, whose parameters and state would change: pass it, or "
                "all of these as a list, as optimizer="
            )


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _optimizers_in(value: Any, depth: int) -> Iterator[Optimizer]:
    """Yield the optimizers that a function names, has in its cells, or among its attributes."""
    if isinstance(value, Optimizer):
        yield value
    elif depth and isinstance(value, partial):
        yield from _optimizers_in([value.func, *value.args, *value.keywords.values()], depth - 1)
    elif depth and isinstance(value, MethodType):
        yield from _optimizers_in([value.__self__, value.__func__], depth)
    elif depth and isinstance(value, FunctionType):
        names = [*value.__code__.co_names]
        places = [value.__globals__[name] for name in names if name in value.__globals__]
        # a cell without a value has no contents
        places += [x for cell in value.__closure__ or () for x in _contents_of(cell)]
        yield from _optimizers_in([*places, *(value.__defaults__ or ())], depth - 1)
    elif depth and isinstance(value, (Mapping, list, tuple)):
        values = value.values() if isinstance(value, Mapping) else value
        for item in values:
            yield from _optimizers_in(item, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
        yield from _optimizers_in(vars(value), depth - 1)


def _contents_of(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def check_sparse(caller: str, optimizer: Optimizer) -> None:
    """Refuse a dense gradient for SparseAdam, with more advice than its own error has."""
    if isinstance(optimizer, SparseAdam):
        parameters = [x for group in optimizer.param_groups for x in group["params"]]
        dense = [x for x in parameters if x.grad is not None and not x.grad.is_sparse]
        if dense:
            raise ValueError(
                f"{caller}: SparseAdam takes only sparse gradients, got a dense one for a "
                f"parameter of shape {list(dense[0].shape)}: give it the weights of "
                "nn.Embedding(..., sparse=True), whose gradients begin as None"
            )


def default_loss(output: Any) -> Any:
    """Return the output's `.loss`, or the sum of the mean squares of its tensors."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    tensors = [x for x in tensors_of(output) if x.is_floating_point() and x.requires_grad]
    return sum(x.float().square().mean() for x in tensors)


def _kind_of(output: Any) -> str:
    return "None" if output is None else f"a {type(output).__name__}"
