"""Wrappers of models that learn from a first step: of a report or a plan they learn nothing.

The reducer of DDP has a hook behind the accumulation of every gradient, also in a backward that did
not begin in DDP's own forward. There it counts: in the first backward of static_graph=True how
often each parameter gets a gradient, with find_unused_parameters=True which ones do. Nothing puts
these counts back, and a count of other steps than the loop's makes ranks wait for each other for
good. A parameter that shares the memory, and has an accumulation of its own, calls no such hook.

FSDP2 takes the first module that is called for the root, and refuses another one from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedckpt.autograd import private
from fusedckpt.autograd.accumulation import gradient_dtype
from fusedckpt.autograd.private import fsdp_lazy_state
from fusedckpt.memory import nbytes_of

# by parameter, the one in its place
StandIns = dict[Tensor, Tensor]


def inside_of(model: Any) -> tuple[Any, DistributedDataParallel | None]:
    """Return the module in a DistributedDataParallel, and that; else the model, and None."""
    parallel = model if isinstance(model, DistributedDataParallel) else None
    return (model if parallel is None else parallel.module), parallel


def bucket_bytes(parallel: DistributedDataParallel) -> int:
    """Return the bytes of the buckets in which a DistributedDataParallel reduces gradients."""
    ignored = getattr(parallel, "parameters_to_ignore", ())
    reduced = dict(parallel.module.named_parameters())
    return nbytes_of(p for n, p in reduced.items() if p.requires_grad and n not in ignored)


@contextmanager
def stand_ins(parallel: DistributedDataParallel | None) -> Iterator[StandIns]:
    """Replace the trained parameters of the module in `parallel` meanwhile; yield by old ones, new.

    Without `parallel` nothing is replaced. Optimizers have the old ones, see `Step.stand_ins`.
    """
    if parallel is None:
        yield {}
        return
    with replaced(parallel.module, _stand_in, is_replaced=attrgetter("requires_grad")) as made:
        yield made


@contextmanager
def replaced(
    model: nn.Module,
    make: Callable[[Any], Any],
    is_replaced: Callable[[Any], bool] = lambda parameter: True,
) -> Iterator[StandIns]:
    """Replace parameters of a model meanwhile; yield by old ones, new ones.

    make: returns the one in the place of a parameter. is_replaced: whether a parameter is replaced.
    """
    made: StandIns = {}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and is_replaced(parameter)
    ]
    for _, _, parameter in places:
        if parameter not in made:
            made[parameter] = make(parameter)
    try:
        for module, name, parameter in places:
            _set(module, name, made[parameter])
        yield made
    finally:
        for module, name, parameter in places:
            _set(module, name, parameter)


@contextmanager
def without_root(model: nn.Module) -> Iterator[None]:
    """Forget on leaving which module FSDP2 took for the root meanwhile, if it had none before."""
    before = [(place, name, vars(place)[name]) for place, name in fsdp_lazy_state(model)]
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
            if name == "_state_ctx":
                value.all_states.clear()


def _set(module: nn.Module, name: str, parameter: Any) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        # a recurrent module has its weights in a list, too
        setattr(module, name, parameter)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter that shares memory, version, class, attributes and hooks with another."""
    made = nn.Parameter(parameter.detach())
    made.__class__ = parameter.__class__
    vars(made).update(vars(parameter))
    made.grad_dtype = gradient_dtype(parameter)
    made._backward_hooks = parameter._backward_hooks
    if private.updates_early(parameter):
        made.register_post_accumulate_grad_hook(partial(_run_hooks, parameter))
    return made


def _run_hooks(parameter: nn.Parameter, stand_in: Any) -> None:
    """Run the hooks of a parameter, such as the step of its optimizer, on that parameter."""
    parameter.grad = stand_in.grad
    stand_in.grad = None
    for hook in private.hooks_after_accumulation(parameter):
        hook(parameter)
    stand_in.grad = parameter.grad
    parameter.grad = None
