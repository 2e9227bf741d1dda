"""Models, to compare their ways of training: small ones of ours, and one from your factory."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench import tasks
from bench.models import HEAD_DIM, quantize
from bench.results import Row
from bench.tasks import KINDS, Task
from bench.workload import Batch, Workload
from fusedckpt.reporting.step import default_loss


class Subject(NamedTuple):
    """A model to compare ways of training of, and the columns that its rows have in common."""

    columns: Row
    # a seed -> the workload
    work: Callable[[int], Workload]


def ours(chosen: Namespace, kind: str, rank: int) -> Subject:
    """Return a small model of ours, with adapters of a rank or without."""
    if chosen.dim % HEAD_DIM:
        raise ValueError(f"--dim expects a multiple of the head size {HEAD_DIM}, got {chosen.dim}")
    packages = [] if kind == "own" else ["transformers"]
    packages += ["sklearn"] if kind == "vit" else []
    tasks.needs(chosen.command, *packages, *(["peft"] if rank else []))
    sizes = {name: getattr(chosen, name) for name in ("layers", "dim", "seq", "batch")}
    sizes["seq"] = tasks.SIDE**2 if kind == "vit" else chosen.seq
    dtype = getattr(torch, chosen.dtype)
    task = Task(kind, **sizes, mlp=chosen.mlp, dtype=dtype, device=torch.device(chosen.device))
    task.batches(1, 0)
    tuned = {"lora": rank, "base": chosen.base if rank else "dense"}
    columns = {"case": kind, **sizes, "mlp": chosen.mlp, **tuned, "steps": chosen.steps}
    return Subject(columns, partial(_workload, chosen, task, rank))


def _workload(chosen: Namespace, task: Task, rank: int, seed: int) -> Workload:
    """Return a model that was trained for some steps, frozen below adapters, with its data."""
    torch.manual_seed(seed)
    model: Any = task.model()
    batches = task.batches(chosen.pretrain + chosen.steps, seed)
    first = batches[: chosen.pretrain]
    batches = batches[chosen.pretrain :]
    adam = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1)
    # a ViT learns nothing at the rate of a Llama as small
    rate = min(3e-3, 0.75 / (max(1000, task.dim) if task.kind == "vit" else task.dim))
    _train(Workload(model, first, tasks.loss, adam, _rates(rate, len(first))))
    if rank:
        model.requires_grad_(False)
        model = quantize(model) if chosen.base == "int8" else model
        model = _adapted(model, task.kind, rank, chosen.targets)
    elif chosen.pretrain:
        # all weights are tuned at a fourth of the rate of adapters
        rate /= 4
    work = Workload(model, batches, tasks.loss, adam, _rates(rate, len(batches)))
    return work._replace(held_out=task.held_out() if chosen.command == "paper" else None)


def _rates(rate: float, count: int) -> list[float]:
    """Return learning rates that rise over a tenth of the steps, then fall to a tenth."""
    ramp = max(1, count // 10)
    return [rate * min((step + 1) / ramp, 1.1 - step / count) for step in range(count)]


def _train(work: Workload) -> None:
    """Train a model for good."""
    optimizer = work.optimizer(work.model.parameters())
    for rate, batch in zip(work.rates or (), work.batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        work.backward(work.model, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _adapted(model: nn.Module, kind: str, rank: int, targets: str) -> nn.Module:
    """Return a model with peft's adapters, without dropout of their input."""
    import peft

    names = "all-linear" if targets == "all" else ["q_proj", "v_proj"]
    head = ["classifier"] if kind == "vit" else None
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=names, modules_to_save=head
    )
    adapted: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    return adapted.train()


def factory_of(spec: str) -> Callable[[], Any]:
    """Return the function that a spec names. Raises ValueError where there is none."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise ValueError(f"--model: there is no file {file}")
        sys.path.insert(0, str(file.parent.resolve()))
        place = file.stem
    if not place or not name:
        kinds = ", ".join(KINDS)
        text = f"--model expects {kinds}, module:factory or file.py:factory, got {spec!r}"
        raise ValueError(text)
    try:
        factory = resolve_name(f"{place}:{name}")
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"--model {spec}: {error}") from error
    if not callable(factory):
        raise ValueError(f"--model {spec}: {name} is no function")
    return factory


def yours(chosen: Namespace, spec: str, factory: Callable[[], Any]) -> Subject:
    """Return the model of a factory, made once: seeds but the first change nothing."""
    torch.manual_seed(chosen.seed[0])
    model, batch = _parts_of(spec, factory())
    first = next(model.parameters())
    # where the caller put it
    chosen.device = str(first.device)
    chosen.dtype = str(first.dtype).removeprefix("torch.")
    if getattr(getattr(model, "config", None), "use_cache", False):
        # a second run of a layer would add to it once more
        config: Any = model.config
        config.use_cache = False
        print("model.config.use_cache was set to False, as checkpoints need")
    sgd = partial(torch.optim.SGD, lr=1e-3)
    work = Workload(model, [batch] * chosen.steps, lambda y, target: default_loss(y), sgd)
    return Subject({"case": spec, "steps": chosen.steps}, lambda seed: work)


def _parts_of(spec: str, made: Any) -> tuple[nn.Module, Batch]:
    """Read the result of a factory: (model, args), (model, kwargs) or (model, args, kwargs)."""
    parts = made if isinstance(made, (tuple, list)) else (made,)
    model, *inputs = parts
    kwargs = inputs.pop() if inputs and isinstance(inputs[-1], dict) else {}
    args = inputs.pop() if inputs and isinstance(inputs[-1], (Tensor, tuple, list)) else ()
    if inputs or not isinstance(model, nn.Module) or len(parts) == 1:
        came = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            f"--model {spec} is to return (model, args), (model, kwargs) or (model, args, "
            f"kwargs): an nn.Module, a tuple or one tensor, a dict; it returned ({came})"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"--model {spec}: no parameter of the {type(model).__name__} is trained")
    return model, Batch((args,) if isinstance(args, Tensor) else tuple(args), kwargs)
