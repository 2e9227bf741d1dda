"""`fuse`, `plan` and `report` on the first batch that a model trains on, in any loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fusedckpt.autograd import arguments
from fusedckpt.autograd.private import COMPILED_CHILD
from fusedckpt.fusing.fuser import fuse as fuse_model
from fusedckpt.planning.planner import plan as make_plan
from fusedckpt.planning.roles import is_assigned
from fusedckpt.reporting.memory_report import report as make_report
from fusedckpt.reporting.trial import tensors_of

__all__ = ["at_first_batch"]


def at_first_batch(
    model: nn.Module,
    *,
    fuse: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    report: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    log: Callable[[Any], Any] = print,
) -> RemovableHandle:
    """Fuse, plan and report, on the inputs of `model`'s first training forward, before it runs.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        at_first_batch(model, plan={"budget": "20GiB"}, optimizer=optimizer)

    Training then continues from the same state, under the plan. Call it with the module that the
    loop calls, after DDP, FSDP and torch.compile: a forward inside a sharded or compiled one is no
    place for another step. Of a compiled model it is the step without torch.compile. Sharded
    modules can be reported, not planned.

    Args:
        fuse: arguments of `fusedckpt.fuse` besides the batch, {} for none. With the batch it finds
            modules that are better run again by running a copy of the model. Fuse before as well:
            modules that are sharded or compiled by then are left. None fuses nothing.
        plan: arguments of `fusedckpt.plan` besides the batch, {"budget": "20GiB"}; the plan is
            applied, unless one is already, which stays. None plans nothing.
        report: whether one step is reported, under the plan.
        loss, optimizer: as in `fusedckpt.report`.
        log: gets the FuseReport, the Plan and the MemoryReport.

    Returns:
        A handle; `.remove()` undoes this call.

    Raises:
        TypeError: `model` is not an nn.Module, `fuse` or `plan` not a dict, or `log` not callable.
    """
    arguments.module("at_first_batch", "model", model)
    for key, options in (("fuse", fuse), ("plan", plan)):
        if options is not None and not isinstance(options, Mapping):
            arguments.wrong_type("at_first_batch", key, "a dict of arguments or None", options)
    if not callable(log):
        arguments.wrong_type("at_first_batch", "log", "callable", log)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()) or _is_empty((args, kwargs)):
            return
        handle.remove()
        module = getattr(module, COMPILED_CHILD, module)
        if fuse is not None:
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            log(fuse_model(inner, **{"example_inputs": _batch_of(inner, args, kwargs), **fuse}))
        step = {"loss": loss, "optimizer": optimizer, **kwargs}
        if plan is not None and not any(is_assigned(part) for part in module.modules()):
            made = make_plan(module, *args, **plan, **step)
            made.apply(module)
            log(made)
        if report:
            log(make_report(module, *args, **step))

    # else torch.compile would look into all the steps that are tried
    uncompiled: Any = torch.compiler.disable(hook)
    handle = model.register_forward_pre_hook(uncompiled, prepend=True, with_kwargs=True)
    return handle


def _is_empty(inputs: Any) -> bool:
    """Whether there is nothing to measure, as in a batch of which a rank got no rows."""
    tensors = [*tensors_of(inputs)]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


def _batch_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as `fuse` takes them, by name where some are."""
    if not kwargs:
        return args
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
