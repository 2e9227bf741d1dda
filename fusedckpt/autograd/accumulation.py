"""Gradients in float32: a fused layer's GEMM adds that of a weight to `.grad` itself.

Autograd adds a gradient to `.grad` when the layer has returned it: a second tensor of the weight's
size, rounded to the weight's dtype before the sum. For parameters that are marked here, `.grad` is
float32, and the backward of a fused layer passes it to the GEMM, which adds to it. The layer then
returns no gradient. Autograd runs the parameter's node all the same, so that hooks on the node run,
such as those of DistributedDataParallel. Hooks after accumulation run for a gradient alone: for
these the layer returns zeros, which take no memory. A hook on the parameter may change the
gradient: for such a parameter the layer returns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedckpt.autograd import private
from fusedckpt.autograd.backward import nodes_of_inputs
from fusedckpt.autograd.private import fsdp_parameters, local_of, unsharded_of
from fusedckpt.kernels.runtime import HALF, KERNEL_DTYPES

# an attribute of a parameter: the last backward that added to its `.grad` in place, and its stream
_SUMS_MARK = "_fusedckpt_sums"
# whether any parameter was marked: no backward looks for marks before
is_used = False


def accumulate_in_fp32(model: nn.Module, enabled: bool = True) -> None:
    """Keep the gradients of a model in float32; fused layers add those of weights in place.

        fuse(model)
        accumulate_in_fp32(model)
        for batch in batches:
            (loss(model(batch)) / len(batches)).backward()

    Sets `grad_dtype` of all bfloat16 and float16 parameters to float32, so that `.grad` is float32
    for clipping, GradScaler and the optimizer: 4 bytes per weight. In the backward of a fused layer
    a weight's GEMM reads half precision and adds to `.grad`: no other tensor has the weight's size.
    Where `.grad` is None, as after zero_grad(), it becomes the GEMM's result. Gradients of norms,
    biases, adapters and experts are not rounded either. Parameters in float32, as under autocast,
    are added to in place likewise. Other layers, such as nn.Linear, return gradients in their
    dtype, which autograd adds in float32.

    A fused layer returns a float32 gradient as large as the weight where a GEMM cannot write
    `.grad`, a parameter has a hook of `register_hook`, or one backward reads it on several CUDA
    streams. A gradient is rounded to the weight's dtype, once a backward, where a layer reads a
    view or a cast of the parameter, in code that torch.compile compiles, in second derivatives, and
    by torch's kernel for experts. Hooks before the parameter's node see no gradient, or zeros. Only
    one thread at a time may run a backward of the model.

    Call it after `fully_shard`: it marks the parameters that FSDP2 gathers, whose gradients FSDP2
    then reduces in `reduce_dtype`, or in float32. An optimizer has to take float32 gradients of
    half precision parameters: torch.optim.SGD does, AdamW needs float32 copies of the parameters,
    as layers/README.md has them.

    Args:
        model: any module, fused or not.
        enabled: False for gradients in each parameter's dtype again; existing ones are rounded.

    Raises:
        TypeError: `model` is no module.
        ValueError: it is DistributedDataParallel of half precision parameters, whose buckets have
            the parameters' dtype and take no other.
        RuntimeError: at the first forward, if `fully_shard` replaced the parameters since.
    """
    global is_used
    if not isinstance(model, nn.Module):
        raise TypeError(f"accumulate_in_fp32: model must be a Module, got {type(model).__name__}")
    parameters = [p for p in model.parameters() if p.dtype in KERNEL_DTYPES]
    if isinstance(model, DistributedDataParallel) and any(p.dtype in HALF for p in parameters):
        raise ValueError(
            "accumulate_in_fp32: the buckets of DistributedDataParallel have the dtype of its "
            "parameters: use fully_shard, or float32 parameters under autocast"
        )
    is_used = is_used or enabled
    for parameter in parameters:
        _mark(parameter, enabled)
    sharded = [module for module in model.modules() if fsdp_parameters(module)]
    for module in sharded:
        _mark_gathered(module, enabled)
    if enabled and not sharded:
        _refuse_sharded(model)


def _mark(parameter: Any, enabled: bool) -> None:
    """Mark a parameter, and let its `.grad` be float32; or undo that."""
    if enabled:
        vars(parameter).setdefault(_SUMS_MARK, None)
    else:
        vars(parameter).pop(_SUMS_MARK, None)
    # the gradient of a DTensor is made by FSDP2, in the parameter's dtype
    if parameter.dtype in HALF and local_of(parameter) is parameter:
        existing = parameter.grad
        wide = torch.float32 if enabled else parameter.dtype
        parameter.grad = None
        parameter.grad_dtype = wide
        parameter.grad = None if existing is None else existing.to(wide)


def _mark_gathered(module: nn.Module, enabled: bool) -> None:
    """Mark the whole parameters that FSDP2 gathers for a module, now or when they first exist."""
    parameters = [unsharded_of(record) for record in fsdp_parameters(module)]
    for parameter in parameters:
        if parameter is not None and parameter.dtype in KERNEL_DTYPES:
            _mark(parameter, enabled)
    if enabled and None in parameters:

        def mark(*_: Any) -> None:
            handle.remove()
            _mark_gathered(module, True)

        handle = module.register_forward_pre_hook(mark)


def _refuse_sharded(model: nn.Module) -> None:
    """Raise at the first forward where FSDP2 has replaced the parameters since."""

    def check(*_: Any) -> None:
        handle.remove()
        if any(map(fsdp_parameters, model.modules())):
            raise RuntimeError(
                "accumulate_in_fp32: fully_shard replaced the parameters after this call: call "
                "accumulate_in_fp32 after fully_shard"
            )

    handle = model.register_forward_pre_hook(check)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's `.grad`, where it may have one of its own."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter with a gradient that is added up in float32."""
    return is_used and _SUMS_MARK in vars(tensor)


class Sums(NamedTuple):
    """The marked parameters of a call that want a gradient, by their places among its tensors."""

    # all of them
    places: frozenset[int]
    # `.grad`, where a GEMM may add to it
    totals: dict[int, Tensor]
    # places of `totals` with hooks that run after accumulation
    hooked: frozenset[int]

    def returned(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients for autograd: None where a gradient was added in place."""
        returned = list(gradients)
        for place, total in self.totals.items():
            if returned[place] is total:
                torch.autograd.graph.increment_version(total)
                zeros = total.new_zeros(()).expand(total.shape) if place in self.hooked else None
                returned[place] = zeros
        return returned

    def dtypes(self, dtypes: Sequence[torch.dtype | None]) -> list[torch.dtype | None]:
        """Return the dtypes of a call's gradients."""
        places = enumerate(dtypes)
        return [torch.float32 if place in self.places else dtype for place, dtype in places]


def sums_of(ctx: Any, first: int) -> Sums | None:
    """Return the marked parameters that a Function's node reads, None for none.

    first: the place of the first tensor among the Function's arguments.
    """
    if torch.compiler.is_compiling() or private.current_node() is not ctx:
        return None
    nodes = nodes_of_inputs(ctx)
    needed = [place - first for place, need in enumerate(ctx.needs_input_grad) if need]
    if len(nodes) != len(needed):
        return None
    leaves = [getattr(node, "variable", None) for node in nodes]
    marked = [
        (place, node, leaf)
        for place, node, leaf in zip(needed, nodes, leaves, strict=True)
        if leaf is not None and _SUMS_MARK in vars(leaf)
    ]
    if not marked:
        return None
    added = [(place, leaf) for place, node, leaf in marked if _takes_sums(node, leaf)]
    return Sums(
        frozenset([place for place, _, _ in marked]),
        {place: leaf.grad for place, leaf in added},
        frozenset([place for place, leaf in added if private.updates_early(leaf)]),
    )


def _takes_sums(node: Any, leaf: Any) -> bool:
    """Whether a GEMM of this backward may add to a parameter's `.grad`."""
    grad = leaf.grad
    if (
        type(grad) is not Tensor
        or grad.dtype != torch.float32
        or grad.shape != leaf.shape
        or not grad.is_contiguous()
        or grad.requires_grad
        # a hook may change the gradient before it is added
        or private.hooks_of(leaf)
        or not private.adds_to_grad(node)
    ):
        return False
    if not grad.is_cuda:
        return True
    # another stream of the same backward may add to it meanwhile
    backward = private.backward_id()
    stream = torch.cuda.current_stream(grad.device).cuda_stream
    last = vars(leaf)[_SUMS_MARK]
    if last is not None and last[0] == backward:
        return last[1] == stream
    vars(leaf)[_SUMS_MARK] = backward, stream
    return True
