"""How a computation becomes a torch op: implementation, fake, FLOP formula, and a guard.

The ops are not differentiable; the autograd Function over them is. A CPU implementation made of
ATen calls would be differentiable by accident, and hide a missing gradient formula, so an op called
with grad mode on and inputs that require grad raises.

Ops exist for code that watches ops, such as selective checkpoints and FLOP counters. Where nothing
does, the Function calls the implementation itself, which spares two ways through torch's dispatcher
and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("fusedckpt", "DEF")

# what implementations run below: autograd, where a result that is a view of its own could not be
# written in place by the caller, and autocast, which would cast the GEMMs inside once more
with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowADInplaceOrView():
    BELOW = torch._C._dispatch_tls_local_exclude_set()
below: Callable[[Any], Any] = torch._C._ExcludeDispatchKeyGuard


def define(
    schema: str,
    implementation: Callable[..., list[Tensor]],
    fake: Callable[..., list[Tensor]],
    flops: Callable[..., int],
) -> Callable[..., list[Tensor]]:
    """Define `fusedckpt::<schema>` for every backend, and return its overload.

    `implementation` computes inside of `below(BELOW)`; `fake` takes the same arguments and returns
    empty tensors of the results' shapes and dtypes; `flops` takes the arguments with shapes in
    place of tensors and returns the GEMM FLOPs.
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.fusedckpt, name).default

    def refuse(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in pytree.tree_leaves(args)
        ):
            raise RuntimeError(
                f"fusedckpt::{name} has no autograd formula: call fusedckpt.functional instead"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    _library.impl(name, implementation, "CompositeExplicitAutograd")
    _library.impl(name, refuse, "Autograd")
    torch.library.register_fake(f"fusedckpt::{name}", fake, lib=_library)
    register_flop_formula(getattr(torch.ops.fusedckpt, name))(flops)
    return overload
