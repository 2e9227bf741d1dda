"""The tensor parallel styles of linears: placements of their inputs and outputs.

A fused MLP does not call its linears, nor a deferred head its own forward, so they do the work of
the hooks. Those of torch's styles, of transformers and of torchtitan are recognised by their code;
with others the original forward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fusedckpt.autograd.private import style_functions
from fusedckpt.layers.parallel import Style, is_sharded, library

# the dicts of a module's hooks, all of which are known here
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_KINDS = {"ColwiseParallel": "columns", "RowwiseParallel": "rows"}


def layout_of(*linears: nn.Module | None) -> Style | None:
    """Return how an MLP of these linears is laid out over ranks, None for anything else."""
    styles = []
    for linear in linears:
        style = None if linear is None else style_of(linear)
        if style is None or style.mesh.ndim != 1:
            return None
        styles.append(style)
    *first, last = styles
    same = all(style[:4] == first[0][:4] for style in first) and first[0].mesh == last.mesh
    ends = library().Shard(-1)
    fits = first[0].split == "columns" and first[0].output == ends
    if not (same and fits and last.split == "rows" and last.input == ends):
        return None
    return first[0]._replace(output=last.output, is_local=last.is_local)


def classes_of(head: Any) -> Style | None:
    """Return the style around a linear split by its classes, evenly, None for anything else.

    Its result holds all classes: it is gathered, or a DTensor.
    """
    style, found = style_of(head), library()
    if style is None or style.split != "columns" or style.mesh.ndim != 1:
        return None
    ends = (found.Replicate(),) if style.is_local else (found.Replicate(), found.Shard(-1))
    if style.output not in ends or head.weight.shape[0] % style.mesh.size():
        return None
    split = (style.mesh, (found.Shard(0),))
    given = [p for p in (head.weight, head.bias) if p is not None]
    are_split = all(is_sharded(p) and (p.device_mesh, p.placements) == split for p in given)
    return style if are_split else None


def is_known(layer: nn.Module) -> bool:
    """Whether it is known how a layer's DTensors are laid out, so that they need not be refused."""
    given: list[Any] = [p for p in layer._parameters.values() if p is not None]
    if not any(map(is_sharded, given)):
        return False
    # as those of a norm that has rows of its own on every rank
    whole = all(is_sharded(p) and all(q.is_replicate() for q in p.placements) for p in given)
    return whole or style_of(layer) is not None


def unwrapped(layer: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without a forward by which a known style calls its own."""
    attributes = vars(layer)
    if "forward" not in attributes or style_of(layer) is None:
        return attributes
    return {name: value for name, value in attributes.items() if name != "forward"}


def style_of(linear: nn.Module) -> Style | None:
    """Return the known style around a linear, None for nothing and for anything else."""
    if library() is None:
        return None
    hooks = [[*vars(linear)[name].values()] for name in _HOOKS]
    if "forward" in vars(linear):
        forward = vars(linear)["forward"]
        found = _of_transformers(linear, forward) or _of_torchtitan(linear, forward)
        return None if any(hooks) else found
    if [len(some) for some in hooks] != [1, 1, 0, 0] or linear._forward_pre_hooks_with_kwargs:
        return None
    return _of_torch(hooks[0][0], hooks[1][0])


def _held(function: Any, by: Any) -> dict[str, Any] | None:
    """Return the closure of a function that `by` defined, None for any other function."""
    code = getattr(function, "__code__", None)
    if code is None or code not in getattr(by, "__code__", by).co_consts:
        return None
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _of_torch(before: Callable[..., Any], after: Callable[..., Any]) -> Style | None:
    """Return the style of the hooks that `distribute_module` set."""
    styles, by = sys.modules.get("torch.distributed.tensor.parallel"), library().distribute_module
    taken, given = _held(before, by), _held(after, by)
    if styles is None or taken is None or given is None:
        return None
    mesh, prepare, finish = taken["device_mesh"], taken["input_fn"], given["output_fn"]
    if given["device_mesh"] != mesh or not isinstance(prepare, partial):
        return None
    for name, split in _KINDS.items():
        style = getattr(styles, name)
        at_input, at_output = style_functions(style)
        is_it = prepare.func is at_input
        if is_it and isinstance(finish, partial) and finish.func is at_output:
            (inputs, wanted), (outputs, is_local) = prepare.args, finish.args
            found = library()
            if wanted != ((found.Replicate(),) if split == "columns" else (found.Shard(-1),)):
                return None
            return Style(split, mesh, inputs[0], outputs[0], is_local)
    return None


def _of_transformers(linear: nn.Module, forward: Any) -> Style | None:
    """Return the style that replaced a linear's forward by its `install_forward`."""
    styles = sys.modules.get("transformers.distributed.tensor_parallel")
    base = getattr(styles, "TensorParallelLayer", None)
    held = None if base is None else _held(forward, base.install_forward)
    if held is None or not _is_own(linear, held["original_forward"]):
        return None
    style, mesh = held["self"], held["mesh"]
    split = _KINDS.get(type(style).__name__)
    if split is None or type(style) is not getattr(styles, type(style).__name__, None):
        return None
    if getattr(linear, "_hf_quantized_needs_local_tp", False):
        return None
    return Style(split, mesh, style.input_layouts, style.output_layouts, style.use_local_output)


def _of_torchtitan(linear: Any, forward: Any) -> Style | None:
    """Return the style that `Module.parallelize` made of a linear's DTensor sharding."""
    module = getattr(sys.modules.get("torchtitan.protocols.module"), "Module", None)
    held = None if module is None else _held(forward, module.parallelize)
    if held is None or not _is_own(linear, held["fn"]):
        return None
    dims, sharding = held["parallel_dims"], linear._sharding_config
    around = (sharding.in_src_shardings, sharding.in_dst_shardings, sharding.local_map)
    if dims.spmd_backend == "spmd_types" or any(around) or sharding.out_src_shardings is None:
        return None
    outputs = [sharding.out_src_shardings, sharding.out_dst_shardings or sharding.out_src_shardings]
    mesh = dims.resolve_shared_mesh(outputs)
    if mesh is None or mesh.ndim != 1:
        return None
    resolve = sys.modules["torchtitan.protocols.sharding"].resolve_placements
    (made,), (given,) = (resolve(output, mesh) for output in outputs)
    found = library()
    if made == found.Shard(-1):
        return Style("columns", mesh, found.Replicate(), given, False)
    return Style("rows", mesh, found.Shard(-1), given, False) if made.is_partial() else None


def _is_own(linear: nn.Module, forward: Any) -> bool:
    """Whether a bound method is a linear's own forward, or was so before its class was swapped."""
    if getattr(forward, "__self__", None) is not linear:
        return False
    return any(vars(kind).get("forward") is forward.__func__ for kind in type(linear).__mro__)
